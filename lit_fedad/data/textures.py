"""Embedded default set: textured surfaces with defects, painted on first use into a folder."""

import os
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
from PIL import Image

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.data.mvtec import mvtec_mixture
from lit_fedad.data.painting import DEFECTS, SURFACES, paint
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.errors import UserError

_VERSION = 1  # raise it when the same parameters begin to give other pictures


def textures(
    root: str | Path | None = None,
    size: int = 256,
    train_per_product: int = 40,
    test_per_product: int = 40,
    seed: int = 0,
    split_seed: int | None = None,
) -> ImageSet:
    """Reads, and on first use paints, surfaces of five product types with five kinds of defect and their masks.

    The pictures are painted once, into a folder in MVTec layout, and read from there afterwards. Training and
    test pictures come from disjoint regions of the photographs.

    Args:
        root: Folder in which ``textures-<key>`` is written; by default ``lit_fedad`` in the cache folder of
            the user (``$XDG_CACHE_HOME`` or ``~/.cache``).
        size: Side of the square pictures in pixels.
        train_per_product: Normal training pictures of each product type.
        test_per_product: Test pictures of each product type: half good, half with a defect, the kinds in
            turn.
        seed: Seed of all pictures. A picture does not depend on how many others there are.
        split_seed: Seed of another split of the normal pictures (`resplit`), which mixes the regions; None keeps it.

    Returns:
        The image set, with masks.

    Raises:
        UserError: A number is too small, or the folder cannot be written.
    """
    if size < 32 or train_per_product < 1 or test_per_product < 2:
        raise UserError(
            f"textures size={size}, train_per_product={train_per_product},"
            f" test_per_product={test_per_product}: give at least 32, 1 and 2"
        )
    parameters = (_VERSION, size, train_per_product, test_per_product, seed)
    key = sha256(repr(parameters).encode()).hexdigest()[:12]
    folder = (Path(root).expanduser() if root else _cache_folder()) / f"textures-{key}"
    samples = _plan(folder, train_per_product, test_per_product)
    if not _complete(samples):
        try:
            _publish(folder, samples, size, seed)
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error}); choose another root") from error
    return mvtec_mixture(folder, products=list(SURFACES), name="textures", split_seed=split_seed)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_fedad"


def _plan(folder: Path, train_per_product: int, test_per_product: int) -> list[Sample]:
    """Every picture that belongs into the folder."""
    defects = list(DEFECTS)
    samples = []
    for product in SURFACES:
        train, test = folder / product / "train", folder / product / "test"
        samples += [Sample(train / "good" / f"{i:03}.png", product) for i in range(train_per_product)]
        samples += [Sample(test / "good" / f"{i:03}.png", product) for i in range(test_per_product // 2)]
        for i in range(test_per_product - test_per_product // 2):
            defect, stem = defects[i % len(defects)], f"{i // len(defects):03}"
            mask = folder / product / "ground_truth" / defect / f"{stem}_mask.png"
            samples.append(Sample(test / defect / f"{stem}.png", product, defect, mask))
    return samples


def _complete(samples: list[Sample]) -> bool:
    return all(path.is_file() for sample in samples for path in (sample.path, sample.mask) if path)


def _publish(folder: Path, samples: list[Sample], size: int, seed: int) -> None:
    """Paints everything beside the folder and renames it into place: no half-painted folder is ever seen."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workshop:
        fresh = Path(workshop) / "fresh"
        for sample in samples:
            path = sample.path.relative_to(folder)
            rng = numpy_generator(seed, path.as_posix())  # a picture depends on no other
            image, mask = paint(sample.category, sample.defect, path.parts[1], size, rng)
            _save(image, fresh / path)
            if sample.mask:
                _save(mask, fresh / sample.mask.relative_to(folder))
        try:
            if folder.exists() and not _complete(samples):
                folder.rename(Path(workshop) / "damaged")
            fresh.rename(folder)
        except OSError:
            if not _complete(samples):  # otherwise another process was faster, with the same pictures
                raise


def _save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, compress_level=1)
