"""Finds the configuration files of the user's own packages, which ``LIT_FEDAD_PACKAGES`` names."""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from lit_fedad.core.errors import UserError

PACKAGES = "LIT_FEDAD_PACKAGES"


def own_packages() -> list[str]:
    """Lists the packages that the user trusts."""
    return [name.strip() for name in os.environ.get(PACKAGES, "").split(",") if name.strip()]


def own_folders() -> list[Path]:
    """Lists the folders ``conf`` within these packages.

    Raises:
        UserError: If Python does not find a package.
    """
    folders = []
    for name in own_packages():
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):  # of a package within another, which is missing
            spec = None
        if spec is None:
            raise UserError(f"{PACKAGES}={name}: Python finds no such package; add its folder to PYTHONPATH")
        folders += [Path(place).resolve() / "conf" for place in spec.submodule_search_locations or ()]
    return [folder for folder in folders if folder.is_dir()]


def by_name(group: str, folders: Iterable[Path]) -> dict[str, Path]:
    """Returns the files of a configuration group by name, in alphabetical order.

    Args:
        group: The group.
        folders: Folders that have, or lack, a folder of the group.

    Raises:
        UserError: If two files have one name.
    """
    files: dict[str, Path] = {}
    for path in (path for folder in folders for path in (folder / group).glob("*.yaml")):
        if path.stem in files:
            raise UserError(f"{path}: {files[path.stem]} has the same name; rename your file")
        files[path.stem] = path
    return dict(sorted(files.items()))


def searched() -> list[str]:
    """Returns the override by which Hydra also searches these folders; none where there is no such folder."""
    places = ",".join(f"'{folder.as_uri()}'" for folder in own_folders())
    return [f"hydra.searchpath=[{places}]"] if places else []
