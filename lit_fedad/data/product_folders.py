"""Sets with one folder a product and fixed folders below it: MVTec AD 2, MVTec LOCO, BTAD and BMAD, as downloaded.

Which folders hold what stands in the set's configuration (``conf/data``). Where a set has two forms of a folder
(BMAD: ``good/img`` beside masks, ``good`` without), it lists both, and a product has one of them.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.image_files import LeftOut, entries, images_in, require_folder
from lit_fedad.data.masks import find_masks
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import choose_products, limited


@limited
def product_folders(
    root: str | Path,
    train: Sequence[str],
    normal: Sequence[str],
    anomalous: Mapping[str, Sequence[str]],
    masks: Mapping[str, str],
    name: str,
    saturation: str | None = None,
    products: Sequence[str] | None = None,
) -> ImageSet:
    """Reads a set whose products all have the same folders.

    Args:
        root: The folder of product folders.
        train: Forms of the folder of normal training images, below a product's folder.
        normal: Forms of the folder of normal test images.
        anomalous: Forms of the folder of anomalous test images, by defect; a product may lack some of the defects.
        masks: Folder of masks by defect, called ``<image>_mask`` or as the image; a product without it has no masks.
        name: Name of the set.
        saturation: File of a product that says from which area on a region counts as found (`read_saturations`); masks
            then are folders called as the image, with one file a region.
        products: Products such as ``can``; None takes every folder below ``root`` with training images.

    Returns:
        The image set, products as given or by name, images by name.

    Raises:
        UserError: A folder, a product, an image or a mask is missing.
    """
    root = expand_home(root)
    require_folder(root, "the folder that holds the products")
    names = sorted(path.name for path in entries(root) if any((path / form).is_dir() for form in train))
    if not names:
        raise UserError(
            f"{root}: no product folder with {' or '.join(train)} directly inside; check data.root"
        )
    train_samples: list[Sample] = []
    test_samples: list[Sample] = []
    skipped = LeftOut()
    for product in choose_products(products, names, root):
        folder = root / product
        train_samples += [Sample(path, product) for path in images_in(_first(folder, *train), skipped)]
        test_samples += [Sample(path, product) for path in images_in(_first(folder, *normal), skipped)]
        _first(folder, *chain.from_iterable(anomalous.values()))  # requires the folder of at least one defect
        for defect, forms in anomalous.items():
            if not any((folder / form).is_dir() for form in forms):
                continue
            defect_folder = _first(folder, *forms)
            paths = images_in(defect_folder, skipped)
            mask_folder = folder / masks[defect] if defect in masks else None
            if mask_folder is None or not mask_folder.is_dir():
                test_samples += [Sample(path, product, defect) for path in paths]
            elif saturation is None:
                masked = zip(paths, find_masks(mask_folder, paths, skipped, defect_folder), strict=True)
                test_samples += [Sample(path, product, defect, mask) for path, mask in masked]
            else:
                areas = _first(folder, saturation)
                test_samples += [
                    Sample(path, product, defect, _first(mask_folder, path.stem), areas) for path in paths
                ]
    skipped.warn(root)
    return ImageSet(name, tuple(train_samples), tuple(test_samples))


def _first(folder: Path, *forms: str) -> Path:
    """Returns the first of these files or folders that exists; refuses a product without any."""
    for form in forms:
        if (folder / form).exists():
            return folder / form
    raise UserError(f"{folder}: no {' or '.join(forms)}; unpack the download again")
