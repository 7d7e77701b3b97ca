"""Finds the files of the user's own packages, which ``LIT_FEDAD_PACKAGES`` names."""

import hashlib
import importlib.util
import os
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
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
    places = [place for name in own_packages() for place in _found(name).submodule_search_locations or ()]
    return [folder for place in places if (folder := Path(place).resolve() / "conf").is_dir()]


def code_of(targets: Iterable[str]) -> dict[str, str]:
    """Computes the SHA-256 of every Python file of the own packages that targets belong to, by path in the package.

    Args:
        targets: Dotted names, such as ``my_package.losses.Focal``; those of other packages do not matter.

    Raises:
        UserError: If Python does not find a package.
    """
    starts = tuple(targets)
    used = [name for name in own_packages() if any(target.startswith(f"{name}.") for target in starts)]
    digests = {}
    for name in used:
        spec = _found(name)
        files = {
            f"{name}/{file.relative_to(place).as_posix()}": file
            for place in spec.submodule_search_locations or ()
            for file in Path(place).rglob("*.py")
        }
        for path, file in (files or {name: Path(str(spec.origin))}).items():  # a module is one file
            digests[path] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def _found(name: str) -> ModuleSpec:
    """Finds a package without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # of a package within another, which is missing
        spec = None
    if spec is None:
        raise UserError(f"{PACKAGES}={name}: Python finds no such package; add its folder to PYTHONPATH")
    return spec


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
