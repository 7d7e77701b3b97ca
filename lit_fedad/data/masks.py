"""Reading of masks: which pixels a file marks, how they are resized, and what may be wrong with a set's masks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from scipy import ndimage

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import LeftOut, find_images, images_in
from lit_fedad.data.pictures import Picture, open_picture, shown_size, warn_once
from lit_fedad.data.sample import grouped

_SOFT_VALUES = 16  # a mask of more grey values than this may have soft edges
_LARGE_SHARE = 0.5  # of an image: a mask that marks more of it may be inverted


@dataclass(frozen=True)
class Marks:
    """What a mask says of its image.

    Attributes:
        pixels: Whether each pixel is anomalous, bool [H, W], upright and of the image's size.
        unsure: Whether the image is turned by its EXIF orientation and the mask, which fits both ways, is not.
    """

    pixels: np.ndarray
    unsure: bool = False


def read_marks(path: Path, image_path: Path, page: int | None = None) -> Marks:
    """Reads the mask of an image.

    Every value above 0 is anomalous. A lossy coding (JPEG, WebP) smears edges: there, values above half of the
    brightest one are anomalous. In a mask with soft edges, values of at least half of the full range are.

    Args:
        path: The mask, or a folder of masks, whose union counts.
        image_path: The image it belongs to, whose size it must have.
        page: Page or frame of the image, and of a mask that has several.

    Raises:
        UserError: A file cannot be read, its size is not that of the image, or what it marks cannot be known.
    """
    size, turned = shown_size(image_path, page)
    parts = []
    unsure = False
    for file in images_in(path) if path.is_dir() else [path]:
        mask = open_picture(file, page, alone=True)
        if mask.image.size != size:
            remark = ", as EXIF turns it" if turned and mask.image.size == size[::-1] else ""
            raise UserError(
                f"{file}: the mask is {mask.image.width}x{mask.image.height} but its image {image_path} is"
                f" {size[0]}x{size[1]}{remark}; save the mask at the size of the image"
            )
        parts.append(marked_pixels(mask, file))
        unsure |= turned and not mask.turned
    return Marks(np.logical_or.reduce(parts), unsure)


def marked_pixels(mask: Picture, path: Path) -> np.ndarray:
    """Tells which pixels a mask marks, bool [H, W].

    Args:
        mask: The decoded mask.
        path: Its file, for messages.

    Raises:
        UserError: It marks by transparency, by colours that look like the background, or by values of unclear meaning.
    """
    values, coloured = _brightness(mask, path)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UserError(f"{path}: the mask holds values that are no numbers; save it with 0 and 255")
    if values.dtype.kind == "f" and (values != np.rint(values)).any() and len(np.unique(values)) > 2:
        raise UserError(f"{path}: the mask holds fractions, of no fixed white; save it with 0 and 255")
    lowest, highest = values.min(), values.max()
    full = 255 if highest <= 255 and not mask.lossy else mask.full  # eight bits may be kept in more
    half = (full + 1) // 2
    if lowest < 0:
        raise UserError(f"{path}: the mask holds values below 0; save it with 0 and 255")
    if mask.lossy:
        if 0 < highest < half:
            raise UserError(
                f"{path}: the mask is coded with loss, and its brightest value is {highest:g}; save it as PNG, with"
                " 0 and 255"
            )
        return np.asarray(2 * values.astype(np.int32) > highest)  # colours are less bright than white
    if mask.cut and highest < half:
        raise UserError(
            f"{path}: the mask has 16 bits of colour, and small values are lost where they are cut to eight; save it as"
            " grey PNG, with 0 and 255"
        )
    if 0 < lowest < highest:
        raise UserError(f"{path}: no pixel of the mask is 0 (black), which is normal; save it with 0 and 255")
    if highest >= half and not coloured and _has_soft_edges(values, full):
        warn_once(
            f"{path.parent}: has masks with soft edges, or made from JPEG, such as {path.name}; what is at least half"
            " bright counts as anomalous"
        )
        return np.asarray(values >= half)
    return np.asarray(values > 0)


def _has_soft_edges(values: np.ndarray, full: int) -> bool:
    """Tells whether many grey values lie between a mask's black and white; numbered regions are no soft edges."""
    used = Image.fromarray(values).histogram() if values.dtype == np.uint8 else np.unique(values)
    if np.count_nonzero(used) <= _SOFT_VALUES:
        return False
    return bool(2 * (values >= 0.9 * full).sum() >= (values >= full / 2).sum())


def _brightness(mask: Picture, path: Path) -> tuple[np.ndarray, bool]:
    """Returns the highest colour value of each pixel [H, W], and whether it comes from a palette with colours."""
    image = mask.image
    if image.mode in ("CMYK", "YCbCr"):  # whose channels are no brightness
        image = image.convert("RGB")
    if not (image.mode == "P" or image.has_transparency_data):
        values = np.asarray(image)
        if values.ndim == 2:
            return values, False
        brightest, bright = values.max(axis=2), values >= 128
        if brightest.min() >= (128 if mask.lossy else 1) and (bright != bright[0, 0]).any():
            raise UserError(
                f"{path}: the mask has colours and no black for what is normal; save it with 0 and 255"
            )
        return brightest, False
    coloured = np.asarray(image.convert("RGBA"))
    brightest, opacity = coloured[..., :3].max(axis=2), coloured[..., 3]
    if (
        image.mode == "P"
        and len(np.unique(np.asarray(image))) > 1
        and (brightest.min() > 0 or not brightest.any())
    ):
        raise UserError(
            f"{path}: the mask's palette has no black for what is normal, or nothing else; save it with 0 and 255"
        )
    if opacity.min() < 255 and ((brightest > 0) != ((brightest > 0) & (opacity > 0))).any():
        raise UserError(
            f"{path}: the mask's colours mark other pixels than its transparency; save it without transparency, with"
            " 0 and 255"
        )
    if opacity.min() < opacity.max() and not brightest.any():
        raise UserError(f"{path}: the mask marks by transparency; save it without, with 0 and 255")
    return brightest, image.mode == "P" and bool((brightest != coloured[..., :3].min(axis=2)).any())


def resized_marks(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resizes marked pixels: a new pixel is marked where any share of it is.

    Args:
        pixels: bool [H, W].
        height: Height of the result.
        width: Its width.

    Returns:
        bool [height, width].

    Example:
        >>> resized_marks(np.array([[True, False, False, False]]), 1, 2).tolist()
        [[True, False]]
    """
    marked = np.zeros((height, width), bool)
    spans = [np.flatnonzero(pixels.any(axis)) for axis in (1, 0)]
    if not len(spans[0]):
        return marked
    # Only rows and columns with marks are resized, for most masks mark little. Along each axis, running sums tell
    # whether a new pixel covers a marked one.
    (top, bottom), (left, right) = ((span[0], span[-1] + 1) for span in spans)
    inside = pixels[top:bottom, left:right]
    new_places = []
    for axis, (start, size) in enumerate(((top, height), (left, width))):
        length = pixels.shape[axis]
        touched = np.arange(start * size // length, -(-(start + inside.shape[axis]) * size // length))
        new_places.append(touched)
        first = np.clip(touched * length // size - start, 0, inside.shape[axis])
        end = np.clip(-(-(touched + 1) * length // size) - start, 0, inside.shape[axis])
        sums = np.cumsum(inside, axis=axis, dtype=np.int32)
        sums = np.concatenate([np.zeros_like(sums.take([0], axis)), sums], axis)
        inside = sums.take(end, axis) > sums.take(first, axis)
    marked[np.ix_(*new_places)] = inside
    return marked


class MaskFacts(NamedTuple):
    """What is counted of a mask.

    Attributes:
        share: Share of its image that it marks.
        inverted: Whether it marks most of its image, and all corners, but not everything: it may be inverted.
        unsure: As in `Marks`.
        kept: Number of marked pixels at the size of the transform.
        regions: Number of connected regions that it marks, where the image is made smaller; else 0.
        small: Number of those regions that are smaller than one pixel of the transform's size.
    """

    share: float
    inverted: bool
    unsure: bool
    kept: int
    regions: int
    small: int


def measure(marks: Marks, kept: int, pixels: int) -> MaskFacts:
    """Computes the facts of a mask.

    Args:
        marks: What it marks in its file.
        kept: Number of marked pixels at the size of the transform.
        pixels: Number of all pixels at that size.
    """
    share = float(marks.pixels.mean())
    corners = marks.pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
    area_ratio = marks.pixels.size / pixels  # pixels of the file in one pixel of the transform
    areas = _areas(marks.pixels) if share and area_ratio > 1 else np.empty(0)
    inverted = _LARGE_SHARE < share < 1 and bool(corners.all())
    return MaskFacts(share, inverted, marks.unsure, kept, len(areas), int((areas < area_ratio).sum()))


def mask_lines(masks: Mapping[Path, MaskFacts], shape: tuple[int, int]) -> list[str]:
    """Returns a line for each thing that may be wrong with the masks of a set.

    Args:
        masks: Facts of the mask of each anomalous image, by its file or folder.
        shape: Height and width of the transform in pixels.

    Raises:
        UserError: No mask marks anything, or each marks everything.
    """
    number = len(masks)
    empty = [path for path, facts in masks.items() if not facts.share]
    full = [path for path, facts in masks.items() if facts.share == 1]
    inverted = [path for path, facts in masks.items() if facts.inverted]
    unsure = [path for path, facts in masks.items() if facts.unsure]
    gone = [path for path, facts in masks.items() if facts.share and not facts.kept]
    if number > 1 and len(empty) == number:
        raise UserError(
            f"{empty[0]}: none of the {number} masks marks a pixel; save them with 255 where defects are"
        )
    if number > 1 and len(full) == number:
        raise UserError(
            f"{full[0]}: each of the {number} masks marks its whole image; save them with 0 where it is normal"
        )

    lines = []

    def tell(paths: Sequence[Path], words: str) -> None:
        lines.append(f"{len(paths)} of {number} masks, such as {paths[0]}, {words}")

    if empty:
        tell(empty, "mark no pixel; their images still count as anomalous")
    if inverted:
        tell(inverted, "mark most of their image and all its corners; are they inverted?")
    if full:
        tell(full, "mark their whole image")
    if unsure:
        tell(unsure, "are not turned as EXIF turns their images; they count as drawn on the turned images")
    if gone:
        tell(
            gone,
            "mark nothing in what image.fit=crop keeps; their images still count as anomalous;"
            " image.fit=squeeze keeps the whole image",
        )
    if small := sum(facts.small for facts in masks.values()):
        regions, (height, width) = sum(facts.regions for facts in masks.values()), shape
        lines.append(
            f"{small} of {regions} defects are smaller than a pixel of {width}x{height}: the masks keep them, the"
            " images hardly show them; raise image.size, or cut images into tiles (image.tile)"
        )
    return lines


def _areas(pixels: np.ndarray) -> np.ndarray:
    """Computes the areas of the connected regions in pixels, int64."""
    rows, columns = (np.flatnonzero(pixels.any(axis)) for axis in (1, 0))
    inside = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    labels, _ = ndimage.label(inside, np.ones((3, 3)))
    return np.bincount(labels.ravel())[1:]


def find_masks(
    folder: Path, images: Sequence[Path], left_out: LeftOut, root: Path | None = None
) -> list[Path | None]:
    """Finds the mask of every image: ``<image>_mask`` or the image's own name, with any suffix of images.

    Args:
        folder: Folder of the masks.
        images: The images.
        left_out: Collects masks that belong to no image.
        root: Folder that images are relative to: masks of nested images lie in folders of the same names; None where
            all lie in one folder.

    Returns:
        Their masks, in order.

    Raises:
        UserError: An image has none or several, or two images share one.
    """
    files = find_images(folder, left_out, masks=True) if folder.is_dir() else []
    by_stem = grouped((path.relative_to(folder).with_suffix(""), path) for path in files)
    masks: list[Path | None] = []
    owners: dict[Path, Path] = {}
    for image in images:
        subfolder = image.relative_to(root).parent if root else Path()
        names = dict.fromkeys((f"{image.name}_mask", image.name, f"{image.stem}_mask", image.stem))
        fits = [mask for name in names for mask in by_stem.get(subfolder / name, ())]
        if len(fits) > 1:
            raise UserError(
                f"{image}: has {len(fits)} masks, {fits[0]} and {fits[1].name}; keep one, or join them in one"
            )
        if fits and (other := owners.setdefault(fits[0], image)) != image:
            raise UserError(
                f"{fits[0]}: is the mask of two images, {other.name} and {image.name}; name masks after whole file"
                f" names, such as {image.name}_mask.png, or rename an image"
            )
        masks.append(fits[0] if fits else None)
    strays = [path for paths in by_stem.values() for path in paths if path not in owners]
    if missing := [path for path, mask in zip(images, masks, strict=True) if mask is None]:
        subfolder = missing[0].relative_to(root).parent if root else Path()
        advice = "add them, or remove the folder of masks"
        if strays:
            advice = f"correct the names of the masks: {strays[0].relative_to(folder)} fits no image"
        raise UserError(
            f"{missing[0]}: no mask {folder / subfolder / missing[0].stem}_mask.png"
            f" ({len(missing)} of {len(images)} missing); {advice}"
        )
    left_out.add("masks of no image", strays)
    return masks
