"""Public images, which server and clients hold: the inputs on which similarities are distilled (FADngs, SED)."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lit_fedad.contracts.randomness import generator
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.image_files import folder_name, images_in
from lit_fedad.data.labelled import HALF, LabelledSet, draw, read_images, resized
from lit_fedad.data.packed import packed_images


def image_folder(
    root: str | Path,
    test: str,
    train: str | None = None,
    size: int = 32,
    train_images: int | None = None,
    test_images: int | None = None,
    name: str | None = None,
    mean: Sequence[float] = HALF,
    std: Sequence[float] = HALF,
    seed: int = 0,
) -> LabelledSet:
    """Reads the images of one or two folders as a set of a single class.

    Args:
        root: The folder that the others are relative to.
        test: Folder of the test images.
        train: Folder of the training images; None for a set that is only tested on.
        size: Side of the square images in pixels; see `read_images`.
        train_images: At most this many random training images; None takes all. Only those drawn are read.
        test_images: At most this many random test images, likewise.
        name: Name of the set and of its one class; by default the name of ``root``.
        mean: Mean of the three channels in [0, 1].
        std: Standard deviation of the three channels.
        seed: Seed of the two draws.

    Raises:
        UserError: A folder is missing, holds no image or is given for both parts, an image cannot be read, or a
            limit is below 0.
    """
    root = expand_home(root)
    if train == test:
        raise UserError(f"{root / test}: is given for training and for testing; use each folder once")
    train_files, test_files = images_in(root / train) if train else [], images_in(root / test)

    def read(files: Sequence[Path], limit: int | None, key: str) -> tuple[Tensor, Tensor]:
        chosen = [files[i] for i in draw(len(files), limit, key, seed)]
        return read_images(chosen, size), torch.zeros(len(chosen), dtype=torch.int64)

    training, testing = (
        read(train_files, train_images, "train_images"),
        read(test_files, test_images, "test_images"),
    )
    name = name or folder_name(root)
    return LabelledSet(name, (name,), *training, *testing, mean, std)


_CHUNK = 250  # images drawn at once: bounds memory, and makes a smaller set part of a larger one
_GRATINGS = 3
_BLOBS = 4


def synthetic(count: int, size: int, seed: int = 0) -> Tensor:
    """Draws synthetic colour pictures: mixtures of noise, windowed gratings and soft blobs.

    Args:
        count: Number of pictures P.
        size: Side in pixels.
        seed: Seed of all pictures; a smaller set is part of a larger one.

    Returns:
        uint8 [P, 3, size, size].

    Raises:
        UserError: If ``count`` or ``size`` is below 1.
    """
    at_least("public", 1, count=count, size=size)
    chunks = [_pictures(size, seed, chunk) for chunk in range(math.ceil(count / _CHUNK))]
    return torch.cat(chunks)[:count]


def natural(
    root: str | Path | None, size: int, count: int | None = 1000, seed: int = 0, file: str | None = None
) -> Tensor:
    """Reads random natural images where they are given, and draws pictures otherwise.

    Args:
        root: A folder, whose images and those below it are read; an ``.npz`` file (see `lit_fedad.data.packed`), whose
            labels are ignored; None for `synthetic`.
        size: Side in pixels (`read_images`).
        count: At most this many images, of which only those drawn are read, or the number of pictures; None takes all.
        seed: Seed of the draw.
        file: Name of an ``.npz`` file below ``root``; None where ``root`` says all.

    Returns:
        uint8 [P, 3, size, size].

    Raises:
        UserError: A folder or file is missing or damaged, or holds no image; an image cannot be read; ``count`` is
            below 1, or missing for pictures.
    """
    if root is None:
        if count is None:
            raise UserError("public.count=null takes every image of public.root=..., and none is given")
        return synthetic(count, size, seed)
    path = expand_home(root) / (file or "")
    if path.suffix == ".npz":
        images = packed_images(path)
        return resized(images[_drawn(len(images), count, seed)], size, size)
    files = images_in(path)
    return read_images([files[i] for i in _drawn(len(files), count, seed)], size)


def refuse_overlap(public: Tensor, private: Tensor, name: str) -> None:
    """Checks that no private image is public.

    Args:
        public: uint8 [P, 3, S, S].
        private: uint8 [N, 3, S, S].
        name: Name of the private set.

    Raises:
        UserError: If images of both are the same, byte by byte.
    """
    private_digests = {_digest(image) for image in private}
    shared = [position for position, image in enumerate(public) if _digest(image) in private_digests]
    if shared:
        raise UserError(
            f"public: {len(shared)} of {len(public)} images are also in {name}, the first is image {shared[0]};"
            " give public images that no client holds"
        )


def _digest(image: Tensor) -> bytes:
    return hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest()


def _drawn(population: int, count: int | None, seed: int) -> Tensor:
    at_least("public", 1, count=count)
    return torch.from_numpy(draw(population, count, "count", seed))


def _pictures(size: int, seed: int, chunk: int) -> Tensor:
    """Draws one chunk of synthetic pictures, uint8 [_CHUNK, 3, size, size]."""
    random = generator(seed, "public pictures", chunk)
    layers = torch.stack([layer(size, random) for layer in (_noise, _gratings, _blobs)])
    layers = layers / layers.std((2, 3, 4), keepdim=True).clamp_min(1e-6)
    share = torch.rand(3, _CHUNK, 1, 1, 1, generator=random)
    picture = (share * layers).sum(0) / share.square().sum(0).sqrt()
    contrast = _uniform(random, 0.1, 0.3, 1, 1, 1)
    brightness = _uniform(random, 0.3, 0.7, 3, 1, 1)
    return (255 * (brightness + contrast * picture)).round().clamp(0, 255).byte()


def _uniform(random: torch.Generator, low: float, high: float, *shape: int) -> Tensor:
    return low + (high - low) * torch.rand(_CHUNK, *shape, generator=random)


def _noise(size: int, random: torch.Generator) -> Tensor:
    """Draws noise with a power law for its amplitude spectrum, [_CHUNK, 3, size, size]; channels are correlated."""
    spectrum = torch.fft.rfft2(torch.randn(_CHUNK, 3, size, size, generator=random))
    frequency = torch.hypot(torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)).clamp_min(1 / size)
    coloured = spectrum * frequency ** -_uniform(random, 0.5, 2, 1, 1, 1)
    coloured[..., 0, 0] = 0
    mixing = torch.randn(_CHUNK, 3, 3, generator=random)
    return torch.einsum("ncd,ndhw->nchw", mixing, torch.fft.irfft2(coloured, s=(size, size)))


def _windows(size: int, number: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Returns offsets down and across from random centres, and Gaussians there, each [_CHUNK, number, size, size]."""
    side = (torch.arange(size) + 0.5) / size
    down = side[:, None] - _uniform(random, 0, 1, number, 1, 1)
    across = side - _uniform(random, 0, 1, number, 1, 1)
    width = _uniform(random, 0.08, 0.4, number, 1, 1)
    return down, across, torch.exp(-(down**2 + across**2) / (2 * width**2))


def _gratings(size: int, random: torch.Generator) -> Tensor:
    """Draws sinusoidal gratings that fade out from a centre, each of one colour, [_CHUNK, 3, size, size]."""
    down, across, window = _windows(size, _GRATINGS, random)
    angle = _uniform(random, 0, math.pi, _GRATINGS, 1, 1)
    cycles = _uniform(random, 2, 9, _GRATINGS, 1, 1)
    wave = torch.cos(2 * math.pi * cycles * (down * angle.sin() + across * angle.cos()))
    colour = torch.randn(_CHUNK, 3, _GRATINGS, generator=random)
    return torch.einsum("ncg,nghw->nchw", colour, wave * window)


def _blobs(size: int, random: torch.Generator) -> Tensor:
    """Draws soft blobs, each of one colour, [_CHUNK, 3, size, size]."""
    colour = torch.randn(_CHUNK, 3, _BLOBS, generator=random)
    return torch.einsum("ncb,nbhw->nchw", colour, _windows(size, _BLOBS, random)[2])
