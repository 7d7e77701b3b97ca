"""Identity of files by content: what is called the same image is the same bytes."""

import json
import os
import stat
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, check_regular, sha256
from lit_fedad.data.input_files import read_json

_MOST_KNOWN = 1_000_000
_TICK_NS = 50_000_000  # a file system's clock may stand still as long: a change within it would not show

_Seen = tuple[int, int, int, int]
"""Times of modification and of change, size and inode of a file."""


def content_hashes(paths: Iterable[Path], memo_file: Path | None) -> dict[Path, bytes]:
    """Computes SHA-256 of each file's bytes.

    A file is read once: where path, size, times and inode are those that the memo knows, so is the hash.

    Args:
        paths: The files.
        memo_file: File of what is known, shared by all runs; it is written anew where something is not. None for none.

    Raises:
        UserError: A file cannot be read.
    """
    memo = _read_memo(memo_file)
    hashes: dict[Path, bytes] = {}
    unknown: dict[Path, _Seen] = {}
    for path in dict.fromkeys(paths):
        file_state = _seen(path)
        before = memo.get(str(path.absolute()))
        if before is not None and before[0] == file_state:
            hashes[path] = before[1]
        else:
            unknown[path] = file_state
    if not unknown:
        return hashes
    now = time.time_ns()
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for (path, file_state), digest in zip(unknown.items(), pool.map(_hash, unknown), strict=True):
            hashes[path] = digest
            if not 0 <= now - file_state[1] < _TICK_NS:
                memo[str(path.absolute())] = (file_state, digest)
    _write_memo(memo_file, memo)
    return hashes


def _seen(path: Path) -> _Seen:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            check_regular(path)
    except OSError as error:
        raise UserError(f"image {path} cannot be read: {error.strerror}") from error
    # Copying tools set the time of modification back, nobody that of the last change.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _hash(path: Path) -> bytes:
    try:
        return bytes.fromhex(sha256(path))
    except OSError as error:
        raise UserError(f"image {path} cannot be read: {error.strerror}") from error


def _read_memo(file: Path | None) -> dict[str, tuple[_Seen, bytes]]:
    try:
        if file is None or not file.exists():
            return {}
        return {
            path: ((int(m), int(c), int(n), int(i)), digest)
            for path, (m, c, n, i, text) in read_json(file).items()
            if len(digest := bytes.fromhex(text)) == 32
        }
    except (OSError, UserError, ValueError, TypeError, AttributeError):
        warnings.warn(f"{file}: is damaged: images are hashed again", stacklevel=3)
        return {}


def _write_memo(file: Path | None, known: dict[str, tuple[_Seen, bytes]]) -> None:
    if file is None:
        return
    latest = list(known.items())[-_MOST_KNOWN:]
    content = json.dumps({path: (*seen, digest.hex()) for path, (seen, digest) in latest})
    with suppress(OSError), atomic(file) as part:  # a folder that cannot be written costs time, no result
        part.write_text(content)
