"""Atomic writing, safe reading of files in folders that may come from anybody, and one-line errors of file systems."""

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
def atomic(path: Path, durable: bool = False, alone: bool = False) -> Iterator[Path]:
    """Lets a block write a temporary file, and renames it to its final path if the block ends without an error.

    Args:
        path: The file; missing folders are created.
        durable: Whether the file is on disk when the block has ended. A durable file is always written `alone`.
        alone: Whether the file has one writer at a time: the next writer then overwrites the temporary file that a
            killed writer has left.

    Yields:
        The temporary path to write to, in the same folder.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = "" if durable or alone else f".{os.getpid()}"
    partial = path.with_name(f".{path.name}{writer}.partial")
    partial.unlink(missing_ok=True)  # a folder from somebody else may have a link with this name
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
    """Lists the file and its parent folders that do not exist, the file first."""
    return [part for part in (path, *path.parents) if not part.exists()]


@contextmanager
def removed_on_failure(made: Iterable[Path], unless: Path | None) -> Iterator[None]:
    """Removes files and folders that a block has created, if the block fails.

    Args:
        made: Files and folders to remove, inner ones first. A folder that is not empty stays, and so do its parents.
        unless: A file that keeps everything from being removed if it exists when the block fails; None for no such
            file.
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
        OSError: If the file cannot be written.
    """
    with atomic(path, durable=True) as partial:
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)


def open_to_append(path: Path) -> TextIO:
    """Opens a text file to append to it; links are not followed.

    Raises:
        OSError: If the path is a link, or the file cannot be written.
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
    """Waits until the content of a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def user_cache() -> Path:
    """Returns the cache folder, which runs share.

    It is ``LIT_FEDAD_CACHE``, or else ``lit_fedad`` in ``XDG_CACHE_HOME`` or ``~/.cache``.
    """
    own, user_cache_home = os.environ.get("LIT_FEDAD_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_home(own or f"{user_cache_home}/lit_fedad")


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Expands ``~`` at the beginning of a path; as in a shell, ``~x`` stays unless there is a user x."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def link(source: Path, target: Path) -> None:
    """Creates a hard link to a file; on a file system without hard links the file is copied.

    Raises:
        OSError: If the link cannot be written.
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
"""Largest size in bytes of a text file, such as settings or results."""


def check_regular(path: Path) -> None:
    """Refuses pipes, sockets and devices: reading them may never end.

    Args:
        path: A file; links are followed.

    Raises:
        UserError: If it is no regular file.
        OSError: If it cannot be found.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError(f"{path}: is no regular file (but a folder, pipe, socket or device); leave it out")


def given_path(key: str, path: object) -> Path:
    """Checks a path that a caller of the Python interface gives, and returns it with ``~`` expanded.

    Args:
        key: Name of the argument in errors.
        path: The path.

    Raises:
        UserError: If it is no path, empty or too long.
    """
    if not isinstance(path, str | os.PathLike) or path == "":
        raise UserError(f"{key}: give a path, not {repr(path) if path == '' else type(path).__name__}")
    try:
        expanded = Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), long_path_in_one_line():
            expanded.lstat()
    except (ValueError, RuntimeError) as error:  # a zero byte, or a user that does not exist
        raise UserError(f"{key}: is no path ({error})") from None
    return expanded


@contextmanager
def long_path_in_one_line() -> Iterator[None]:
    """Turns the error of a path that is too long for the file system into one line.

    Raises:
        UserError: If a path in the block is too long.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise UserError(f"{str(error.filename)[:60]}... is too long for a path") from None


@contextmanager
def unwritable_in_one_line(place: Path | str, within: bool = False) -> Iterator[None]:
    """Turns the error of a block that cannot write into one line.

    Args:
        place: The file or folder that the block writes.
        within: Whether the error names the single file that could not be written instead, if the system tells which.

    Raises:
        UserError: If the block cannot write.
    """
    try:
        yield
    except OSError as error:
        failed = error.filename if within else None
        raise UserError(f"{failed or place}: cannot be written ({error.strerror})") from error


@contextmanager
def forbidden_in_one_line(path: Path) -> Iterator[None]:
    """Turns the error of a file that this account may not read into one line.

    Without it the file would be reported as damaged, with the advice to remove it or write it again.

    Raises:
        UserError: If the account may not read the file.
    """
    try:
        yield
    except PermissionError as error:
        raise UserError(
            f"{path}: this account may not read it ({error.strerror}); have its owner allow that, or give you a copy"
        ) from error


def given_bytes(path: Path, max_bytes: int = LARGEST_TEXT) -> bytes:
    """Reads a file that an operator provides, which may be a link, for example to a mounted key.

    Args:
        path: The file; links are followed.
        max_bytes: Largest accepted size of the file in bytes.

    Raises:
        UserError: If it is no regular file, or larger, or this account may not read it.
        OSError: If it cannot be read for another reason.
    """
    with forbidden_in_one_line(path):
        check_regular(path)
        if (size := path.stat().st_size) > max_bytes:
            raise UserError(f"{path}: has {size} bytes, more than any file of its kind")
        return path.read_bytes()


def check_stored(path: Path) -> None:
    """Refuses a path that is no regular file, such as a link, pipe, socket, device or folder.

    Raises:
        UserError: If it is no regular file.
        OSError: If it cannot be found.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        return
    kind = "a link" if stat.S_ISLNK(mode) else "a folder, pipe, socket or device"
    raise UserError(f"{path}: is {kind} and no file; put the file itself there")


def check_own(path: Path) -> Path:
    """Refuses a path that exists and is no regular file; returns the path.

    Raises:
        UserError: If it is a link, pipe, socket, device or folder.
    """
    if os.path.lexists(path):
        check_stored(path)
    return path


def stored_bytes(path: Path, max_bytes: int = LARGEST_TEXT) -> bytes:
    """Reads a file in a folder that may come from anybody; links are refused.

    Args:
        path: The file.
        max_bytes: Largest accepted size of the file in bytes.

    Raises:
        UserError: If it is no regular file, or larger, or this account may not read it.
        OSError: If it cannot be read for another reason.
    """
    check_stored(path)
    return given_bytes(path, max_bytes)


def stored_text(path: Path) -> str:
    """Reads a text file; raises the errors of `stored_bytes`, and `UnicodeDecodeError`."""
    return stored_bytes(path).decode("utf-8")


_MAX_HEADER_BYTES = 1 << 16  # of one entry in a zip archive


def check_unpacked(path: Path) -> None:
    """Refuses a file of torch (a zip archive) with compressed entries, or with many bytes that belong to no entry.

    Raises:
        ValueError: If it is such a file.
        zipfile.BadZipFile: If it is no archive.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    size, unpacked = path.stat().st_size, sum(entry.file_size for entry in entries)
    if unpacked > size:
        raise ValueError("it is packed")
    # A large sparse file would take hours to hash.
    if size > unpacked + _MAX_HEADER_BYTES * (len(entries) + 1):
        raise ValueError("it has bytes that are of no part of it")


def within(folder: Path, name: str) -> Path:
    """Returns the path of a file or folder inside a folder, after checking that it really lies there.

    Args:
        folder: The folder.
        name: Name from a list that is stored in the folder, and not trusted.

    Raises:
        UserError: If the path lies elsewhere, or contains anything but regular files and folders.
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


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SQLITE_FULL = "database or disk is full"  # message of SQLite


@contextmanager
def disk_full_in_one_line(folder: Path) -> Iterator[None]:
    """Turns the errors of a full disk in a block into one line.

    Raises:
        UserError: If the block fails because of a full disk, an exhausted quota or a limit of the file size.
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
    """Returns whether an error or one of its causes is a full disk, an exhausted quota or a limit of the file size."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _DISK_FULL) or _SQLITE_FULL in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
