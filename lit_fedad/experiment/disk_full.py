"""A full disk, told in one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lit_fedad.core.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SQLITE = "database or disk is full"


@contextmanager
def disk_full_in_one_line(folder: Path) -> Iterator[None]:
    """Turns the errors of a full disk in a block into one line.

    Raises:
        UserError: If an error of the block, or the cause of one, is a full disk or a used-up quota.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        raise UserError(
            f"{folder}: no space is left on the disk, of this folder or of the cache; make room, and the same command"
            " continues after the last complete round"
        ) from error


def is_disk_full(error: BaseException | None) -> bool:
    """Tells whether an error, or one that it came from, is a full disk."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in _FULL) or _SQLITE in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
