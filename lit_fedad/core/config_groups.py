"""Finds the packaged configuration, its groups and their files."""

import functools
from pathlib import Path

from lit_fedad.core.own_files import by_name, own_folders


def conf_folder() -> Path:
    """Returns the folder of the packaged configuration; in a checkout, the one at the top of the repository."""
    package = Path(__file__).parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def config_groups() -> list[str]:
    """Lists the configuration groups, also those within groups: ``federation``, ``federation/robust``."""
    return list(_groups(conf_folder()))


@functools.cache
def _groups(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_dir()))


def files_of(group: str) -> dict[str, Path]:
    """Returns a configuration group's files by name, with those of the user's own packages."""
    return by_name(group, (conf_folder(), *own_folders()))


def choices(group: str) -> list[str]:
    """Lists the names of a configuration group's files."""
    return list(files_of(group))
