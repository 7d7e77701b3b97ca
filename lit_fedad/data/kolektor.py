"""KolektorSDD2, as downloaded: images of one surface, and beside each its mask, ``<number>_GT.png``.

Whether an image shows a defect is what its mask says, so that masks are decoded here. Source: Bozic, Tabernik and
Skocaj, "Mixed supervision for surface-defect detection", Computers in Industry 129, 2021.
"""

import warnings
from pathlib import Path

from PIL import Image

from lit_fedad.data.folders import images_in
from lit_fedad.data.input_files import check_pixels, check_regular
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import subset
from lit_fedad.errors import UserError

_MASK = "_GT"
_PRODUCT = "surface"


def kolektor_sdd2(
    root: str | Path,
    name: str = "kolektor_sdd2",
    train_per_product: int | None = None,
    test_per_product: int | None = None,
    seed: int = 0,
) -> ImageSet:
    """Reads KolektorSDD2; training images with a defect are left out.

    Args:
        root: The unpacked folder, with ``train`` and ``test``.
        name: Name of the image set.
        train_per_product: As in `subset`.
        test_per_product: As in `subset`.
        seed: As in `subset`.

    Returns:
        The image set with one product, images by name.

    Raises:
        UserError: A folder or a mask is missing, or a mask cannot be read.
    """
    root = Path(root).expanduser()
    train, test = _samples(root / "train"), _samples(root / "test")
    normal = [sample for sample in train if not sample.label]
    if len(normal) < len(train):
        warnings.warn(
            f"{root}: {len(train) - len(normal)} of {len(train)} training images show a defect and are left out",
            stacklevel=2,
        )
    whole = ImageSet(name, tuple(normal), tuple(test))
    return subset(whole, train_per_product, test_per_product, seed)


def _samples(folder: Path) -> list[Sample]:
    files = images_in(folder)
    masks = {path.stem.removesuffix(_MASK): path for path in files if path.stem.endswith(_MASK)}
    images = [path for path in files if not path.stem.endswith(_MASK)]
    missing = [path for path in images if path.stem not in masks]
    if missing:
        raise UserError(
            f"{missing[0]}: no mask {missing[0].stem}{_MASK}.png beside it ({len(missing)} of {len(images)} missing);"
            " unpack the download again"
        )
    return [
        Sample(path, _PRODUCT, "defect", masks[path.stem])
        if _marks(masks[path.stem])
        else Sample(path, _PRODUCT)
        for path in images
    ]


def _marks(mask: Path) -> bool:
    """Whether a mask marks any pixel."""
    try:
        check_regular(mask)
        with Image.open(mask) as opened:
            check_pixels(*opened.size)
            return opened.convert("L").getbbox() is not None
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{mask}: cannot be read as an image ({' '.join(str(error).split())})") from error
