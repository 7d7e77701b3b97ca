"""Files of a report, written as a whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Writes a file atomically: no reader ever finds it half written.

    Args:
        path: The file; missing folders are created.

    Yields:
        A path beside it to write to, which replaces `path` when the block ends without an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
