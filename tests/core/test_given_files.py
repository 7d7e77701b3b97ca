"""Files that people put in their places by hand."""

import io
import os

import pytest
import torch
from helpers.refusals import refused

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import LARGEST_TEXT, given_bytes
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.checkpoint import read_state
from lit_fedad.sites.offer import Offer
from lit_fedad.sites.settings import KeyRegistry


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


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("server.pt", read_state),
        ("result.json", lambda path: RunFolder(path.parent).result()),
        ("offer.json", Offer.read),
        ("key_registry", lambda path: KeyRegistry.read(path.parent, "north")),
    ],
)
def test_a_file_of_another_account_is_not_called_damaged(tmp_path, monkeypatch, name, read):
    torch.save({}, tmp_path / name)

    def forbidden(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(io, "open", forbidden)
    told = refused("this account may not read it", read, tmp_path / name)
    assert not any(advice in told for advice in ("remove", "restore", "make it", "take offer.json"))
