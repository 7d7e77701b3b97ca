"""A full disk is told in one line."""

import errno
import sqlite3

import pytest
import torch
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import disk_full_in_one_line
from lit_fedad.federation.checkpoint import write_state


class FullDisk:
    """A file on a disk without room."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        pass


def test_torch_says_that_the_disk_is_full(tmp_path, monkeypatch):
    opened = type(tmp_path).open
    monkeypatch.setattr(type(tmp_path), "open", lambda self, *mode: FullDisk(opened(self, *mode)))
    with refusal(f"^{tmp_path}: no space is left on the disk"):  # noqa: SIM117
        with disk_full_in_one_line(tmp_path):
            write_state({"x": torch.zeros(300_000)}, tmp_path / "state.pt")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError(errno.EFBIG, "File too large"),
        sqlite3.OperationalError("database or disk is full"),
    ],
)
def test_a_full_disk_behind_another_error_is_found(tmp_path, error):
    def fail():
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("something else") from cause

    with pytest.raises(UserError, match="no space is left"), disk_full_in_one_line(tmp_path):
        fail()


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "denied"), RuntimeError("a bug"), KeyboardInterrupt()]
)
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(type(error)), disk_full_in_one_line(tmp_path):
        raise error
