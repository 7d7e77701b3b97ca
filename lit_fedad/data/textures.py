"""Embedded default set: textured surfaces with defects, drawn on first use into a folder."""

import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw
from scipy import ndimage

from lit_fedad.contracts.randomness import numpy_generator
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home, user_cache
from lit_fedad.data.mvtec import mvtec_mixture
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.surfaces import SURFACES, coloured, pixel_centres, smooth_noise


def draw(product: str, defect: str, size: int, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws one picture.

    Args:
        product: A key of ``SURFACES``.
        defect: A key of ``DEFECTS``, or ``"good"``.
        size: Side in pixels.
        rng: Source of everything random in the picture.

    Returns:
        RGB image, uint8 [size, size, 3], and mask, uint8 [size, size] with 255 where the defect is.
    """
    image = coloured(SURFACES[product](rng, size), product)
    alpha = np.zeros((size, size))
    if defect != "good":
        elsewhere = [name for name in SURFACES if name != product]
        other = SURFACES[elsewhere[rng.integers(len(elsewhere))]](rng, size)
        image, alpha = DEFECTS[defect](image, coloured(other, product), rng)
    image = _light(image, rng)
    return (image.clip(0, 1) * 255).round().astype(np.uint8), np.where(alpha > 0.35, 255, 0).astype(np.uint8)


def _light(image: np.ndarray, rng: Generator) -> np.ndarray:
    """Adds uneven lighting, exposure, white balance and sensor noise."""
    x, y = pixel_centres(len(image))
    angle, slope = rng.uniform(0, 2 * np.pi), rng.uniform(0, 0.18)
    gradient = 1 + slope * ((x - 128) * np.cos(angle) + (y - 128) * np.sin(angle)) / 128
    exposure = rng.uniform(0.9, 1.1) * rng.uniform(0.985, 1.015, size=3)
    return image * gradient[..., None] * exposure + rng.normal(0, 0.006, image.shape)


# Defects take an image and another surface, [size, size, 3] each, and return the image with the defect and the opacity
# of the defect, [size, size].


def _blob(rng: Generator, size: int, radius: tuple[float, float], softness: float) -> np.ndarray:
    """Draws the opacity of an irregular, somewhat elongated blob in the middle three fifths of the picture."""
    x, y = pixel_centres(size)
    centre = rng.uniform(51, 205, size=2)
    turn, stretch = rng.uniform(0, np.pi), rng.uniform(1, 1.5)
    dx, dy = x - centre[0], y - centre[1]
    along = (dx * np.cos(turn) + dy * np.sin(turn)) / stretch
    across = (dy * np.cos(turn) - dx * np.sin(turn)) * stretch
    angle = np.arctan2(across, along)
    outline = np.ones_like(angle)
    for wave in range(2, 8):
        outline += rng.normal(0, 0.28 / wave) * np.cos(wave * angle + rng.uniform(0, 2 * np.pi))
    distance = rng.uniform(*radius) * outline.clip(0.5) - np.hypot(along, across)
    return (distance / softness + 0.5).clip(0, 1)


def _mix(image: np.ndarray, other: np.ndarray | float, alpha: np.ndarray) -> np.ndarray:
    return image + alpha[..., None] * (other - image)


def _shifted(alpha: np.ndarray, units: float) -> np.ndarray:
    """Moves an opacity down and right, for edges that catch light or cast a shadow."""
    return ndimage.shift(alpha, units * len(alpha) / 256, order=1)


def _scratch(image: np.ndarray, other: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws one to three curved strokes, pale or dark, with a shadow along one side."""
    size, oversampling = len(image), 3
    scale = oversampling * size / 256
    canvas = Image.new("L", (size * oversampling,) * 2)
    middle, heading, bend = rng.uniform(60, 196, size=2), rng.uniform(0, 2 * np.pi), rng.normal(0, 0.35)
    for _ in range(rng.integers(1, 4)):
        angle = heading + rng.normal(0, 0.12)
        along, across = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
        t = np.linspace(0, 1, 24)[:, None]
        curve = rng.uniform(50, 130) * ((t - 0.5) * along + bend * t * (1 - t) * across)
        points = (middle + rng.normal(0, 7, size=2) + curve) * scale
        width = max(oversampling, round(rng.uniform(1.6, 3.2) * scale))  # a pixel or more
        ImageDraw.Draw(canvas).line([(x, y) for x, y in points], fill=255, width=width, joint="curve")
    alpha = np.asarray(canvas.resize((size, size), Image.Resampling.BOX)) / 255
    worn = alpha * (0.75 + 0.25 * smooth_noise(rng, size, 60, 60)).clip(0, 1)
    floor = image * 0.35 + (0.5 if rng.integers(2) else 0.0)
    return _mix(_mix(image, image * 0.6, _shifted(alpha, 1.5)), floor, worn), alpha


def _stain(image: np.ndarray, other: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws a dried liquid: translucent, with a darker rim."""
    alpha = _blob(rng, len(image), (20, 36), softness=7)
    rim = 4 * alpha * (1 - alpha)
    colours = ((0.70, 0.58, 0.42), (0.55, 0.55, 0.60), (0.62, 0.52, 0.50))
    filtered = image * colours[rng.integers(len(colours))]
    density = alpha * (0.8 + 0.15 * smooth_noise(rng, len(image), 16, 16)) + 0.25 * rim
    return _mix(image, filtered, density.clip(0, 1.2)), alpha


def _hole(image: np.ndarray, other: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws a cavity: one wall lies in shadow, the other catches the light."""
    alpha = _blob(rng, len(image), (9, 17), softness=2)
    depth = ndimage.gaussian_filter(alpha, 3.5 * len(image) / 256) * alpha
    shadow, lit = (alpha - _shifted(alpha, 4)).clip(0, 1), (alpha - _shifted(alpha, -3)).clip(0, 1)
    cavity = image * (0.75 - 0.5 * depth - 0.3 * shadow + 0.35 * lit)[..., None]
    return _mix(image, cavity * rng.uniform(0.6, 1), alpha), alpha


def _foreign_patch(image: np.ndarray, other: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inserts a piece of another product type in this one's colours, brightness matched."""
    alpha = _blob(rng, len(image), (18, 32), softness=3)
    inside = alpha > 0.5
    matched = other + 0.7 * (image[inside].mean(axis=0) - other[inside].mean(axis=0))
    return _mix(image, matched, alpha), alpha


def _distortion(image: np.ndarray, other: np.ndarray, rng: Generator) -> tuple[np.ndarray, np.ndarray]:
    """Twists and smears the surface around a point."""
    size = len(image)
    alpha = _blob(rng, size, (20, 32), softness=36)
    rows, columns = np.indices((size, size), dtype=float)
    centre = (alpha * rows).sum() / alpha.sum(), (alpha * columns).sum() / alpha.sum()
    twist = rng.choice([-1, 1]) * rng.uniform(1.0, 1.8) * alpha
    zoom = 1 - rng.uniform(0.2, 0.5) * alpha
    dy, dx = rows - centre[0], columns - centre[1]
    source = np.stack(
        [
            centre[0] + zoom * (dy * np.cos(twist) + dx * np.sin(twist)),
            centre[1] + zoom * (dx * np.cos(twist) - dy * np.sin(twist)),
        ]
    )
    channels = np.moveaxis(image, -1, 0)
    warped = [ndimage.map_coordinates(channel, source, order=1, mode="reflect") for channel in channels]
    smeared = ndimage.gaussian_filter(np.stack(warped, axis=-1), 1.2 * size / 256, axes=(0, 1))
    return _mix(image, smeared, (2 * alpha).clip(0, 1)), alpha


DEFECTS: dict[str, Callable[[np.ndarray, np.ndarray, Generator], tuple[np.ndarray, np.ndarray]]] = {
    "scratch": _scratch,
    "stain": _stain,
    "hole": _hole,
    "foreign_patch": _foreign_patch,
    "distortion": _distortion,
}


_VERSION = 2  # raise it when the same parameters begin to give other pictures


def textures(
    root: str | Path | None = None,
    size: int = 256,
    train_per_product: int = 40,
    test_per_product: int = 40,
    seed: int = 0,
    split_seed: int | None = None,
) -> ImageSet:
    """Reads, and on first use draws, surfaces of five product types with five kinds of defect and their masks.

    The pictures are drawn once, into a folder in MVTec layout, and read from there afterwards. All are
    independent of each other.

    Args:
        root: New or empty folder in which ``textures-<key>`` is written, or one that holds such folders alone; by
            default in `user_cache`.
        size: Side of the square pictures in pixels.
        train_per_product: Normal training pictures of each product type.
        test_per_product: Test pictures of each product type: half good, half with a defect, the kinds in
            turn.
        seed: Seed of all pictures. A picture does not depend on how many others there are.
        split_seed: Seed of another split of the normal pictures (`resplit`); None keeps the first.

    Returns:
        The image set, with masks.

    Raises:
        UserError: A number is too small, or the folder holds other files or cannot be written.
    """
    at_least("data", 32, size=size)
    at_least("data", 1, train_per_product=train_per_product)
    at_least("data", 2, test_per_product=test_per_product)
    parameters = (_VERSION, size, train_per_product, test_per_product, seed)
    key = sha256(repr(parameters).encode()).hexdigest()[:12]
    folder = (expand_home(root) if root else user_cache()) / f"textures-{key}"
    samples = _plan(folder, train_per_product, test_per_product)
    if not _complete(samples):
        if root:
            _refuse_used(folder.parent)
        try:
            _publish(folder, samples, size, seed)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written ({error}); choose another root: data=textures data.root=DIR"
            ) from error
    return mvtec_mixture(folder, products=list(SURFACES), name="textures", split_seed=split_seed)


def _refuse_used(root: Path) -> None:
    """Refuses a folder with files of the user's, who meant them to be read.

    Raises:
        UserError: If it holds anything but drawn pictures.
    """
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    if others := [name for name in names if not name.lstrip(".").startswith("textures-")]:
        raise UserError(
            f"data.root={root}: holds {others[0]}, and data=textures draws its pictures and reads no others; give"
            " data=NAME for your images (lit-fedad data list), or leave data.root out"
        )


def _plan(folder: Path, train_per_product: int, test_per_product: int) -> list[Sample]:
    """Lists every picture that belongs into the folder."""
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
    return all(file.is_file() for sample in samples for file in sample.files)


def _publish(folder: Path, samples: list[Sample], size: int, seed: int) -> None:
    """Draws everything next to the folder and renames it into place: no half-drawn folder is ever seen."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workshop:
        fresh = Path(workshop) / "fresh"
        for sample in samples:
            path = sample.path.relative_to(folder)
            rng = numpy_generator(seed, path.as_posix())  # a picture depends on no other
            image, mask = draw(sample.category, sample.defect, size, rng)
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
