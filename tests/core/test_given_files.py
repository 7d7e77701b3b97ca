"""Files that people put in their places by hand."""

import os

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import LARGEST_TEXT, given_bytes


def test_a_link_is_followed_to_a_file_and_to_nothing_without_end(tmp_path):
    (tmp_path / "mounted").write_bytes(b"key")
    (tmp_path / "key").symlink_to("mounted")
    assert given_bytes(tmp_path / "key") == b"key"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(UserError, match=f"{name}: is no regular file"):
            given_bytes(tmp_path / name)
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(LARGEST_TEXT + 1)
    with pytest.raises(UserError, match="hole: has .* bytes, more than any file of its kind"):
        given_bytes(tmp_path / "hole")
