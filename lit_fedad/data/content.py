"""Hashes of image files: two files are the same image where their bytes are equal."""

import json
import stat
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import atomic, check_regular, sha256
from lit_fedad.core.threads import file_threads
from lit_fedad.data.input_files import read_json

_MAX_ENTRIES = 1_000_000  # files in a memo
_TICK_NS = 50_000_000  # a file system's clock may stand still so long: a second change would not show

_FileState = tuple[int, int, int, int]
"""Modification time and change time of a file in nanoseconds, its size in bytes, and its inode."""


def content_hashes(
    paths: Iterable[Path],
    memo_file: Path | None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Path, bytes]:
    """Computes SHA-256 of each file's bytes.

    A file is read once: where its path, size, times and inode are those in the memo, its hash comes from there.

    Args:
        paths: The files.
        memo_file: JSON file of known hashes, shared by all runs; new hashes are added to it. None to keep none.
        progress: Called with the number of files read and of all files to read.

    Raises:
        UserError: A file cannot be read.
    """
    memo = _read_memo(memo_file)
    hashes: dict[Path, bytes] = {}
    unknown: dict[Path, _FileState] = {}
    for path in dict.fromkeys(paths):
        file_state = _file_state(path)
        entry = memo.get(str(path.absolute()))
        if entry is not None and entry[0] == file_state:
            hashes[path] = entry[1]
        else:
            unknown[path] = file_state
    if not unknown:
        return hashes
    now = time.time_ns()
    try:
        with file_threads() as pool:
            digests = zip(unknown.items(), pool.map(_hash, unknown), strict=True)
            for done, ((path, file_state), digest) in enumerate(digests, 1):
                hashes[path] = digest
                if not 0 <= now - file_state[1] < _TICK_NS:
                    memo[str(path.absolute())] = (file_state, digest)
                progress(done, len(unknown))
    finally:  # an interruption loses nothing that was computed
        _write_memo(memo_file, memo)
    return hashes


def _file_state(path: Path) -> _FileState:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            check_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    # Copying tools may set back the modification time, but none can set back the change time.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _hash(path: Path) -> bytes:
    try:
        return bytes.fromhex(sha256(path))
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    advice = "put it back there (images of an update stay where they were), or give data.root=DIR"
    return UserError(f"image {path} cannot be read: {error.strerror}; {advice}")


def _read_memo(file: Path | None) -> dict[str, tuple[_FileState, bytes]]:
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


def _write_memo(file: Path | None, memo: dict[str, tuple[_FileState, bytes]]) -> None:
    if file is None:
        return
    latest = list(memo.items())[-_MAX_ENTRIES:]
    content = json.dumps({path: (*file_state, digest.hex()) for path, (file_state, digest) in latest})
    with suppress(OSError), atomic(file) as partial:  # a folder that cannot be written costs time, no result
        partial.write_text(content)
