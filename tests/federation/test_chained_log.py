"""A log that several processes write to, and that stays one chain."""

import os
import subprocess
import sys

import pytest

from lit_fedad.core.errors import UserError
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
