"""Image sets that are sorted into folders by label, such as Kermany's chest X-rays or Kaggle's brain tumours."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.image_files import LeftOut, find_images, folder_name, images_in
from lit_fedad.data.masks import find_masks
from lit_fedad.data.sample import ImageSet, Sample, defect_name
from lit_fedad.data.subset import resplit, split_normals


def folders(
    root: str | Path,
    train_normal: Sequence[str],
    test_normal: Sequence[str],
    test_anomalous: Sequence[str],
    name: str | None = None,
    split_seed: int | None = None,
    masks: str | None = None,
    train_share: float | None = None,
) -> ImageSet:
    """Reads a set whose folders say which images are normal.

    Args:
        root: The folder that the others are relative to.
        train_normal: Folders of normal training images.
        test_normal: Folders of normal test images.
        test_anomalous: Folders of anomalous test images; a defect is called after its folder.
        name: Name of the set and of its one product; by default the name of ``root``.
        split_seed: Seed of another split of the normal images (`resplit`); None keeps that of the folders.
        masks: Folder of masks, called as those of MVTec AD, with a folder for each of ``test_anomalous`` or without.
        train_share: Share of the normal images that is for training where ``test_normal`` is empty; None for all.

    Returns:
        The image set, folders in the order given, images by name.

    Raises:
        UserError: A folder is missing, holds no image, or is given both for training and for testing; or two images
            share a mask.
    """
    root = expand_home(root)
    for folder in train_normal:
        if folder in (*test_normal, *test_anomalous):
            raise UserError(f"{root / folder}: is given for training and for testing; use each folder once")
    product = name or folder_name(root)
    skipped = LeftOut()
    train = [Sample(path, product) for folder in train_normal for path in images_in(root / folder, skipped)]
    normal = [Sample(path, product) for folder in test_normal for path in images_in(root / folder, skipped)]
    anomalous = [
        Sample(path, product, defect_name(Path(folder).name), mask)
        for folder in test_anomalous
        for path, mask in _masked(root / folder, root / masks if masks is not None else None, skipped)
    ]
    images_of: dict[Path, Path] = {}
    for sample in anomalous:
        if sample.mask and (other := images_of.setdefault(sample.mask, sample.path)) != sample.path:
            raise UserError(
                f"{sample.mask}: is the mask of {other} and of {sample.path}; sort masks into a folder for each of"
                " data.test_anomalous, of the same names"
            )
    if masks is not None and test_anomalous:
        mask_files = find_images(root / masks, skipped, masks=True)
        skipped.add("masks of no anomalous image", [path for path in mask_files if path not in images_of])
    skipped.warn(root)
    images = ImageSet(product, tuple(train), (*normal, *anomalous))
    if not test_normal and train_share is not None:
        return split_normals(images, train_share, split_seed or 0)
    return resplit(images, split_seed)


def _masked(folder: Path, masks: Path | None, skipped: LeftOut) -> Iterator[tuple[Path, Path | None]]:
    """Yields the images of a defect, each with its mask, or with None where there are no masks."""
    images = images_in(folder, skipped)
    if masks is None:
        return zip(images, [None] * len(images), strict=True)
    mask_folder = nested if (nested := masks / folder.name).is_dir() else masks
    return zip(images, find_masks(mask_folder, images, LeftOut(), folder), strict=True)
