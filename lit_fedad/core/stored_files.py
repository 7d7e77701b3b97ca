"""Files of a folder that may come from anybody: opened only where they are files, and lie in that folder."""

from __future__ import annotations

import stat
from pathlib import Path

from lit_fedad.core.errors import UserError

LARGEST_TEXT = 1 << 28
"""Most bytes of a file of text, such as settings or results."""


def check_stored(path: Path) -> None:
    """Refuses what is no file of the folder itself: a link, pipe, socket, device or folder.

    Raises:
        UserError: If it is something else.
        OSError: If it cannot be found.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return
    kinds = {
        stat.S_IFLNK: "a link",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    raise UserError(
        f"{path}: is {kinds.get(stat.S_IFMT(mode), 'a device')} and no file; put the file itself there"
    )


def stored_bytes(path: Path) -> bytes:
    """Reads a file of text.

    Raises:
        UserError: If it is no file, or a longer one than any that a run writes.
        OSError: If it cannot be read.
    """
    check_stored(path)
    if (size := path.stat().st_size) > LARGEST_TEXT:
        raise UserError(f"{path}: has {size} bytes, more than any file of its kind")
    return path.read_bytes()


def stored_text(path: Path) -> str:
    """Reads a file of text as text; raises as `stored_bytes` does, and `UnicodeDecodeError`."""
    return stored_bytes(path).decode("utf-8")


def within(folder: Path, name: str) -> Path:
    """Returns a file or folder that a folder's own list names, and that lies in it.

    Raises:
        UserError: If it lies elsewhere, or holds anything but files and folders.
        OSError: If it cannot be found.
    """
    path = folder / name
    home = folder.resolve()
    if Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(home):
        raise UserError(f"{folder}: names {name}, which is not in it")
    for part in [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]:
        if part.is_symlink() or not part.is_dir():
            check_stored(part)
    return path
