"""One command at a time in a run's folder."""

import subprocess
import sys

import pytest
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.experiment.claim import launches, locked

HOLD = """
import sys, time
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_command_is_refused_in_one_line(tmp_path):
    folder = tmp_path / "new" / "run"
    with locked(folder), refusal(f"^{folder}: another lit-fedad"), locked(folder):
        pass
    with locked(folder):
        pass


@pytest.mark.parametrize(
    ("patience", "said"), [(0.0, ""), (0.01, "waiting 0.01 s at most for another lit-fedad command")]
)
def test_a_command_that_waits_for_another_says_so(tmp_path, caplog, patience, said):
    with locked(tmp_path), refusal("another lit-fedad command"), locked(tmp_path, patience):
        pass
    assert [record.getMessage()[: len(said)] for record in caplog.records] == [said] * bool(said)


def test_an_error_releases_the_folder(tmp_path):
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


def test_the_lock_of_a_killed_process_does_not_block(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(UserError, match="another lit-fedad command"), locked(tmp_path):
                pass
        finally:
            other.kill()
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"), locked(tmp_path / "file" / "run"):
        pass


def test_only_the_first_of_several_commands_locks(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    one, two = {"fabric": {"num_nodes": 1}}, {"fabric": {"num_nodes": 2}}
    assert launches(one)
    assert launches(two)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not launches(two)
    # On one machine Fabric's processes do not run the command; a rank is that of a job's task.
    assert launches(one)
