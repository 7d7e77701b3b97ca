"""Files that are complete or absent, files of a folder that may come from anybody, and a full disk."""

import errno
import hashlib
import os
import shutil
import stat
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from lit_fedad.core.errors import UserError


@contextmanager
def atomic(path: Path, durable: bool = False) -> Iterator[Path]:
    """Writes a file beside its place, and puts it there when the block ends without an error.

    Args:
        path: The file; missing folders are created.
        durable: Whether the file is on disk when the block has ended. Such a file has one writer at a time: what a
            killed one left is written over by the next.

    Yields:
        A path to write to, in the same folder.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = "" if durable else f".{os.getpid()}"
    partial = path.with_name(f".{path.name}{writer}.partial")
    partial.unlink(missing_ok=True)  # in a folder from elsewhere a link may lie there
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def absent(path: Path) -> list[Path]:
    """Lists a file and the folders that it lies in, as far as they do not exist, the file first."""
    return [part for part in (path, *path.parents) if not part.exists()]


@contextmanager
def undone(made: Iterable[Path], unless: Path | None) -> Iterator[None]:
    """Removes what a block made where it fails, unless a file exists by then.

    Args:
        made: Files and folders, inner ones first; a folder in which others write stays, and those above it.
        unless: That file; None for no such exception.
    """
    try:
        yield
    except BaseException:
        if unless is None or not unless.exists():
            with suppress(OSError):
                for path in made:
                    path.rmdir() if path.is_dir() else path.unlink()
        raise


def write_secret(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read.

    Raises:
        OSError: If it cannot be written.
    """
    with atomic(path, durable=True) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)


def appended(path: Path) -> TextIO:
    """Opens a file of text to write at its end, and no file that a link in its place leads to.

    Raises:
        OSError: If it is a link, or cannot be written.
    """
    return open(
        path,
        "a",
        newline="",
        encoding="utf-8",
        errors="surrogateescape",
        opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666),
    )


def sync(path: Path) -> None:
    """Writes the content of a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def user_cache() -> Path:
    """Returns the folder of what is kept for other runs.

    ``LIT_FEDAD_CACHE``, or else ``lit_fedad`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    own, of_user = os.environ.get("LIT_FEDAD_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own or f"{of_user}/lit_fedad").expanduser()


def link(source: Path, target: Path) -> None:
    """Gives a file a second name; on a file system without hard links it is copied.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def sha256(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LARGEST_TEXT = 1 << 28
"""Most bytes of a file of text, such as settings or results."""


def check_regular(path: Path) -> None:
    """Refuses pipes, sockets and devices, whose reading may never end.

    Args:
        path: A file; links are followed.

    Raises:
        UserError: It is no regular file.
        OSError: It cannot be found.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path}: is no regular file (but a folder, pipe, socket or device); leave it out")


def given_path(key: str, path: object) -> Path:
    """Returns a path that somebody's Python code gives, below the home folder where it begins with ``~``.

    Raises:
        UserError: If it is none, empty or too long; `key` names it.
    """
    if not isinstance(path, str | os.PathLike) or path == "":
        raise UserError(f"{key}: give a path, not {repr(path) if path == '' else type(path).__name__}")
    try:
        given = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), told_too_long():
            given.lstat()
    except (ValueError, RuntimeError) as error:  # a zero byte, a user that there is none of
        raise UserError(f"{key}: is no path ({error})") from None
    return given


@contextmanager
def told_too_long() -> Iterator[None]:
    """Tells in one line of a path in a block that is too long for the file system.

    Raises:
        UserError: If there is one.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f"{str(error.filename)[:60]}... is too long for a path") from None


@contextmanager
def told_unwritable(place: Path | str, within: bool = False) -> Iterator[None]:
    """Tells in one line that a block cannot write.

    Args:
        place: What it writes.
        within: Whether the one file is named instead that could not be written, where the system tells which.

    Raises:
        UserError: If it cannot.
    """
    try:
        yield
    except OSError as error:
        failed = error.filename if within else None
        raise UserError(f"{failed or place}: cannot be written ({error.strerror})") from error


@contextmanager
def told_forbidden(path: Path) -> Iterator[None]:
    """Tells in one line that a file in a block may not be read, which says nothing of what it holds.

    Raises:
        UserError: If it may not: else it would be called damaged, and advised to be removed or made anew.
    """
    try:
        yield
    except PermissionError as error:
        raise UserError(
            f"{path}: this account may not read it ({error.strerror}); have its owner allow that, or give you a copy"
        ) from error


def given_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Reads a file that an operator put in its place, where a link may stand, as to a mounted key.

    Args:
        path: The file; links are followed.
        most: Most bytes that it may have.

    Raises:
        UserError: If it is no regular file, or longer, or this account may not read it.
        OSError: If it cannot be read for another reason.
    """
    with told_forbidden(path):
        check_regular(path)
        if (size := path.stat().st_size) > most:
            raise UserError(f"{path}: has {size} bytes, more than any file of its kind")
        return path.read_bytes()


def check_stored(path: Path) -> None:
    """Refuses what is no file of the folder itself: a link, pipe, socket, device or folder.

    Raises:
        UserError: If it is something else.
        OSError: If it cannot be found.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return
    kind = "a link" if stat.S_ISLNK(mode) else "a folder, pipe, socket or device"
    raise UserError(f"{path}: is {kind} and no file; put the file itself there")


def check_own(path: Path) -> Path:
    """Refuses a place that is taken by something other than a file of the folder itself; returns it.

    Raises:
        UserError: If it is taken by a link, pipe, socket, device or folder.
    """
    if os.path.lexists(path):
        check_stored(path)
    return path


def stored_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Reads a file of a folder that may come from anybody.

    Args:
        path: The file.
        most: Most bytes that it may have.

    Raises:
        UserError: If it is no file, or a longer one than any that a run writes, or this account may not read it.
        OSError: If it cannot be read for another reason.
    """
    check_stored(path)
    return given_bytes(path, most)


def stored_text(path: Path) -> str:
    """Reads a file of text as text; raises as `stored_bytes` does, and `UnicodeDecodeError`."""
    return stored_bytes(path).decode("utf-8")


_HEADER = 1 << 16  # bytes that describe one part of an archive, at most


def check_unpacked(path: Path) -> None:
    """Refuses an archive of torch that would become longer as it is read, or that is a small part of its file.

    Raises:
        ValueError: If it is one of these.
        zipfile.BadZipFile: If it is no archive.
    """
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
    size, unpacked = path.stat().st_size, sum(part.file_size for part in parts)
    if unpacked > size:
        raise ValueError("it is packed")
    if size > unpacked + _HEADER * (len(parts) + 1):  # a hole of any size would take hours to hash
        raise ValueError("it has bytes that are of no part of it")


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


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SQLITE = "database or disk is full"


@contextmanager
def disk_full_in_one_line(folder: Path) -> Iterator[None]:
    """Turns the errors of a full disk in a block into one line.

    Raises:
        UserError: If an error of the block, or the cause of one, is a full disk, a used-up quota or a file that may not
            grow.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"{folder}: no space is left on the disk, of this folder or of the cache, or no more is allowed (quota,"
            " ulimit -f); make room, and the same command continues after the last complete round"
        ) from error


def is_disk_full(error: BaseException | None) -> bool:
    """Tells whether an error, or one that it came from, is a full disk, or a limit of what may be written there."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or _SQLITE in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
