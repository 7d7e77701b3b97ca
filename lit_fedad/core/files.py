"""Files that are complete or absent."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    try:
        yield partial
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_secret(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read.

    Raises:
        OSError: If it cannot be written.
    """
    with atomic(path, durable=True) as partial:
        partial.unlink(missing_ok=True)
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(content)


def sync(path: Path) -> None:
    """Writes the content of a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256(path: Path) -> str:
    """Computes the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
