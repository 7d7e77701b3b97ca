"""Folders in the layout of MVTec AD, one product type or a mixture of several.

A product folder holds ``train/good``, ``test/<good|defect>`` and, where there are masks,
``ground_truth/<defect>/<stem>_mask.png`` (or ``<stem>.png``).
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.core.text import shell_word
from lit_fedad.data.image_files import LeftOut, entries, folder_name, images_in, require_folder
from lit_fedad.data.layout_names import MASK_NAMES, NORMAL, bare, masked_name
from lit_fedad.data.masks import find_masks
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import limited, require_known, resplit


@limited
def mvtec_mixture(
    root: str | Path,
    products: Sequence[str | int] | None = None,
    name: str | None = None,
    split_seed: int | None = None,
) -> ImageSet:
    """Reads one or several product folders into one image set.

    Nothing is decoded here: an image that cannot be read is reported when it is transformed.

    Args:
        root: A product folder, or a folder that contains product folders.
        products: Product folders relative to ``root``, such as ``mvtec/bottle``; None takes ``root`` itself
            or every product folder directly inside it. A product is called after its folder; where two
            folders share a name, after their whole relative paths (``a/bottle`` becomes ``a_bottle``).
        name: Name of the image set; by default the name of the product or, for several, of ``root``.
        split_seed: Seed of another split of the normal images (`resplit`); None keeps that of the folders.

    Returns:
        The image set, ordered by product as given, then by defect and file name.

    Raises:
        UserError: A folder, a product, an image or a mask is missing, or a limit is below 1.
    """
    root = expand_home(root)
    require_folder(root, "the folder that holds the product folders")

    skipped = LeftOut()
    train: list[Sample] = []
    test: list[Sample] = []
    folders = _product_folders(root, products)
    for product, folder in folders.items():
        train += _train_samples(folder, product, skipped)
        test += _test_samples(folder, product, skipped)
    skipped.warn(root)
    default_name = next(iter(folders)) if len(folders) == 1 else folder_name(root)
    return resplit(ImageSet(name or default_name, tuple(train), tuple(test)), split_seed)


def _product_folders(root: Path, products: Sequence[str | int] | None) -> dict[str, Path]:
    """Finds the folder of each product by its name, in the order given, or else sorted."""
    if products is None:
        if (root / "train").is_dir() or (root / "test").is_dir():
            return {folder_name(root): root}
        products = [path.name for path in entries(root) if (path / "train").is_dir()]
        if not products:
            nested = _known_products(root)
            hint = (
                f"name them in products, for example {nested[0]}"
                if nested
                else f"data=auto takes other layouts: lit-fedad data init {shell_word(str(root))}"
            )
            raise UserError(f"{root}: no product folder with train/good directly inside; {hint}")
    relative = [Path(str(product)) for product in ([products] if isinstance(products, str) else products)]
    if not relative:
        raise UserError("products: the list is empty; name at least one product folder, or leave it out")
    for path in relative:
        if not (root / path).is_dir():
            product = path.as_posix()
            require_known(product, _known_products(root), f"{root}: no product folder '{product}'")

    sharing = Counter(path.name for path in relative)
    names = [path.name if sharing[path.name] == 1 else "_".join(path.parts) for path in relative]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UserError(f"products: {repeated[0]} is listed twice; remove one, or rename one of the folders")
    return {name: root / path for name, path in zip(names, relative, strict=True)}


def products_below(root: Path) -> list[Path]:
    """Lists the product folders at most three levels below ``root``."""
    folders = chain.from_iterable(root.glob(f"{level}train/good") for level in ("*/", "*/*/", "*/*/*/"))
    return sorted(path.parents[1] for path in folders if path.is_dir())


def _known_products(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in products_below(root))


def _train_samples(folder: Path, product: str, skipped: LeftOut) -> list[Sample]:
    good = folder / "train" / "good"
    if not good.is_dir():
        raise UserError(f"{folder}: no train/good; put the normal training images there (MVTec layout)")
    skipped.add("outside of train/good", [path for path in entries(folder / "train") if path != good])
    return [Sample(path, product) for path in images_in(good, skipped)]


def _test_samples(folder: Path, product: str, skipped: LeftOut) -> list[Sample]:
    listed = entries(folder / "test")
    defects = [path for path in listed if path.is_dir()]
    if not defects:
        raise UserError(
            f"{folder}: no folder test/good or test/<defect>; put the test images there (MVTec layout),"
            " or give data=auto, which keeps a share of train/good for tests"
        )
    skipped.add("beside the folders of test", [path for path in listed if path not in defects])
    for path in defects:
        if path.name != "good" and bare(path.name) in NORMAL:
            raise UserError(f"{path}: normal test images lie in a folder called good; rename it")
        masked_defect = masked_name(path.name)
        if path.name.casefold() in MASK_NAMES or masked_defect in [one.name for one in defects]:
            expected = folder / "ground_truth" / (masked_defect or "")
            raise UserError(f"{path}: masks lie beside the folder test; move it to {expected}")
    mask_root = folder / "ground_truth"
    samples = []
    for defect in defects:
        images = images_in(defect, skipped)
        if mask_root.is_dir() and defect.name != "good":
            masks = find_masks(mask_root / defect.name, images, skipped, defect)
        else:
            masks = [None] * len(images)
        samples += [
            Sample(path, product, defect.name, mask) for path, mask in zip(images, masks, strict=True)
        ]
    names = {path.name for path in defects}
    parts = ("train", "test", "ground_truth")
    ignored = [path for path in entries(folder) if path.is_dir() and path.name not in parts]
    skipped.add("beside train and test", ignored)
    skipped.add("masks of no image", [path for path in entries(mask_root) if path.name not in names])
    return samples
