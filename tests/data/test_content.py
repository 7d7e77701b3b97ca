"""Identity by content: a file is read once, and noticed when it is another."""

import hashlib
import os

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.data import content


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(content, "_TICK_NS", 0)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    return paths


def test_files_are_read_once(files, tmp_path, monkeypatch):
    memo = tmp_path / "cache" / "hashes.json"
    expected = {path: hashlib.sha256(path.read_bytes()).digest() for path in files}
    assert content.content_hashes(files, memo) == expected
    monkeypatch.setattr(content, "_hash", None)
    assert content.content_hashes([*files, files[0]], memo) == expected


def test_progress_counts_the_files_that_are_read(files, tmp_path):
    seen = []
    content.content_hashes(files[:1], tmp_path / "hashes.json")
    content.content_hashes(files, tmp_path / "hashes.json", lambda *numbers: seen.append(numbers))
    assert seen == [(1, 2), (2, 2)]


def test_an_interruption_keeps_the_hashes_so_far(files, tmp_path, monkeypatch):
    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        content.content_hashes(files, tmp_path / "hashes.json", interrupt)
    monkeypatch.setattr(content, "_hash", None)
    assert len(content.content_hashes(files[:2], tmp_path / "hashes.json")) == 2


@pytest.mark.parametrize("swap", [lambda a, b: a.write_bytes(b.read_bytes()), lambda a, b: b.replace(a)])
def test_a_swapped_file_of_the_same_size_and_time_is_noticed(files, tmp_path, swap):
    memo = tmp_path / "hashes.json"
    before = content.content_hashes(files, memo)
    times = files[0].stat()
    swap(files[0], files[1])
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert content.content_hashes(files[:1], memo)[files[0]] == before[files[1]]


def test_a_file_that_is_gone_is_one_line_and_a_folder_that_cannot_be_written_none(files, tmp_path):
    with pytest.raises(
        UserError, match=r"none\.png cannot be read: .*; put it back there .* data\.root=DIR$"
    ):
        content.content_hashes([tmp_path / "none.png"], None)
    assert content.content_hashes(files, files[0] / "hashes.json")
