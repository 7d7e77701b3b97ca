"""Several image sets that lie below one folder, joined into one."""

from collections.abc import Callable, Mapping
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import expand_home
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.subset import limited


@limited
def mixture(
    root: str | Path,
    parts: Mapping[str, Callable[[Path], ImageSet]],
    name: str,
) -> ImageSet:
    """Reads image sets of several formats and joins them.

    Args:
        root: The folder that holds the parts (or links to them).
        parts: Folder below ``root`` -> function that reads it: in a configuration, a node with
            ``_partial_: true`` that leaves out its ``root``.
        name: Name of the joined set.

    Returns:
        All products, in the order of the parts. It has masks if every part has.

    Raises:
        UserError: Two parts hold a product of the same name, or a part cannot be read.
    """
    sets = {folder: read(expand_home(root) / folder) for folder, read in parts.items()}
    holders: dict[str, str] = {}
    for folder, images in sets.items():
        for product in images.categories:
            if product in holders:
                raise UserError(
                    f"{name}: product '{product}' is in both {holders[product]} and {folder};"
                    " leave it out of the products of one"
                )
            holders[product] = folder
    return ImageSet(
        name,
        tuple(sample for images in sets.values() for sample in images.train),
        tuple(sample for images in sets.values() for sample in images.test),
    )
