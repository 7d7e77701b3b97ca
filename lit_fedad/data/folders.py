"""Image sets that are sorted into folders by label, such as Kermany's chest X-rays or Kaggle's brain tumours."""

from collections.abc import Sequence
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import LeftOut, images_in
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import resplit


def folders(
    root: str | Path,
    train_normal: Sequence[str],
    test_normal: Sequence[str],
    test_anomalous: Sequence[str],
    name: str | None = None,
    split_seed: int | None = None,
) -> ImageSet:
    """Reads a set whose folders say which images are normal.

    Args:
        root: The folder that the others are relative to.
        train_normal: Folders of normal training images.
        test_normal: Folders of normal test images.
        test_anomalous: Folders of anomalous test images; a defect is called after its folder.
        name: Name of the set and of its one product; by default the name of ``root``.
        split_seed: Seed of another split of the normal images (`resplit`); None keeps that of the folders.

    Returns:
        The image set, folders in the order given, images by name. It has no masks.

    Raises:
        UserError: A folder is missing, holds no image, or is given both for training and for testing.
    """
    root = Path(root).expanduser()
    for folder in train_normal:
        if folder in (*test_normal, *test_anomalous):
            raise UserError(f"{root / folder}: is given for training and for testing; use each folder once")
    product = name or root.absolute().name
    left = LeftOut()
    train = [Sample(path, product) for folder in train_normal for path in images_in(root / folder, left)]
    normal = [Sample(path, product) for folder in test_normal for path in images_in(root / folder, left)]
    anomalous = [
        Sample(path, product, Path(folder).name)
        for folder in test_anomalous
        for path in images_in(root / folder, left)
    ]
    left.warn(root)
    return resplit(ImageSet(product, tuple(train), (*normal, *anomalous)), split_seed)
