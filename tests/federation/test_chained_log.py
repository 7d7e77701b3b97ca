"""A log that several processes write to, and that stays one chain."""

import fcntl
import json
import os
import subprocess
import sys

import pytest
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.federation import chained_log
from lit_fedad.federation.chained_log import ChainedLog

WRITE = """
import sys
from pathlib import Path
from lit_fedad.federation.chained_log import ChainedLog

for number in range(20):
    ChainedLog(Path(sys.argv[1])).append(number=number)
"""


def test_three_processes_write_one_chain(tmp_path):
    file = tmp_path / "approved.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(file)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(ChainedLog(file).entries()) == 60


def test_a_line_that_was_changed_in_place_is_noticed_at_the_next(tmp_path):
    """Also where the file keeps its length and the time of its last change."""
    log = ChainedLog(tmp_path / "log.jsonl")
    log.append(asked="play")
    found = log.file.stat()
    log.file.write_text(log.file.read_text().replace("play", "pray"))
    os.utime(log.file, ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(UserError, match="line 1: does not follow"):
        log.append(asked="play")


def test_a_line_follows_those_that_others_wrote_before_the_lock_was_free(tmp_path, monkeypatch):
    log = ChainedLog(tmp_path / "log.jsonl")
    log.append(by="north")

    def waits(file, operation):
        monkeypatch.undo()
        ChainedLog(log.file).append(by="east")
        fcntl.flock(file, operation)

    monkeypatch.setattr(chained_log.fcntl, "flock", waits)
    log.append(by="south")
    assert [line["by"] for line in ChainedLog(log.file).entries()] == ["north", "east", "south"]


def test_a_changed_line_with_a_hash_of_its_own_does_not_precede_the_next(tmp_path):
    log = ChainedLog(tmp_path / "log.jsonl")
    for images in (8, 9):
        log.append(images=images)
    first, second = map(json.loads, log.file.read_text().splitlines())
    first["images"] = 7
    first["hash"] = chained_log._hash(first)
    log.file.write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
    with refusal("line 2: does not follow from the line before"):
        ChainedLog(log.file).entries()


def test_a_link_to_nowhere_is_no_empty_log(tmp_path):
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "gone")
    with refusal("log.jsonl: is no regular file; restore it from a copy"):
        ChainedLog(tmp_path / "log.jsonl").entries()
