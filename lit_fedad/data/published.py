"""Public sets that are told by files and folders of their own: read without these, they would be read wrong."""

from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.data.input_files import read_json

_SETS = {
    "split_csv/1cls.csv": ("visa", "VisA with its split files"),
    "*/train/_annotations.coco.json": ("vision", "sets of VISION, with COCO annotations"),
    "train/*_GT.png": ("kolektor_sdd2", "KolektorSDD2, whose masks say which images are normal"),
    "realiad_jsons/realiad_jsons/*.json": ("real_iad", "Real-IAD with its split files"),
    "data.json": ("medianomaly", "a set of MedIAnomaly with its split"),
}
"""What lies in the folder of a set: the configuration that reads it, and what was seen."""

_PRODUCTS = {
    "defects_config.json": ("MVTec LOCO AD", "mvtec_loco", "of its products"),
    "test_public/ground_truth": ("MVTec AD 2", "mvtec_ad2", "of its products"),
    "test/Ungood/label": ("BMAD, with masks", "bmad", "of its sets"),
    "Data/Images/Normal": ("VisA", "visa", "with split_csv in it"),
    "NG/*/S[0-9][0-9][0-9][0-9]": ("Real-IAD", "real_iad", "of its images and split files"),
}
"""What lies in the folder of a product: the set, the configuration that reads it, and its ``data.root``."""


def published(root: Path) -> tuple[str, str] | None:
    """Tells a public set by what lies in its folder.

    Args:
        root: The folder.

    Returns:
        The configuration that reads it, and what was seen; None where it is none of these sets.

    Raises:
        UserError: It is a set, or a product of one, that another command reads; the line says which.
    """
    for mark, found in _SETS.items():
        if any(map(_is_mark, root.glob(mark))):
            return found
    for mark, (title, name, folder) in _PRODUCTS.items():
        if any(next(root.glob(f"{level}{mark}"), None) for level in ("", "*/", "*/*/", "*/*/*/")):
            raise UserError(
                f"{root}: is {title}, in a layout of its own; give data={name}, and the folder {folder} as data.root"
            )
    return None


def _is_mark(path: Path) -> bool:
    """Whether a file is the mark of a set; ``data.json`` may be anything."""
    if path.name != "data.json":
        return True
    try:
        content = read_json(path)
        return isinstance(content["train"]["0"], list) and {"0", "1"} <= content["test"].keys()
    except (KeyError, TypeError, AttributeError, UserError):
        return False
