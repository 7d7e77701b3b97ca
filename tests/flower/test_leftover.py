"""What a killed coordinator left running is ended, and nothing else."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.flower import leftover
from lit_fedad.flower.leftover import MARK, end_leftover, remember

# The parent says its child's number, and waits.
PROGRAM = """
import subprocess, sys
child = subprocess.Popen(['sleep', '600'], start_new_session=sys.argv[1] == 'own')
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def session(request, tmp_path):
    """A process in a session of its own, with a child; its number and that of the child.

    A child in a session of its own is known by the folder in its environment, too.
    """
    where = getattr(request, "param", "same")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, where],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **({MARK: str(tmp_path)} if where == "own" else {})},
    )
    child = int(process.stdout.readline())
    yield process, child
    if psutil.pid_exists(child):
        os.kill(child, 9)
    process.kill()
    process.wait()


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("session", "headless"),
    [
        pytest.param("same", False, marks=pytest.mark.slow),
        pytest.param("same", True, marks=pytest.mark.slow),
        pytest.param("own", False, marks=pytest.mark.slow),
        ("own", True),
    ],
    indirect=["session"],
)
def test_a_session_ends_with_all_its_processes(tmp_path, session, headless):
    process, child = session
    remember(tmp_path, process.pid)
    if headless:
        process.kill()
        process.wait()
    assert end_leftover(tmp_path)
    assert not alive(process.pid)
    assert not alive(child)
    assert not end_leftover(tmp_path)


@pytest.mark.parametrize("session", ["own"], indirect=True)
def test_a_process_whose_number_was_never_written_down_is_known_by_its_mark(tmp_path, session):
    """Its coordinator was ended while it was started."""
    process, child = session
    assert end_leftover(tmp_path)
    assert not alive(process.pid)
    assert not alive(child)


def test_another_process_of_that_number_is_left_alone(tmp_path, session):
    process, child = session
    remember(tmp_path, process.pid)
    noted = json.loads((tmp_path / "superlink.json").read_text())
    (tmp_path / "superlink.json").write_text(json.dumps(noted | {"began": noted["began"] - 1}))
    assert not end_leftover(tmp_path)
    assert alive(process.pid)
    assert alive(child)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a clock of Linux")
def test_a_clock_that_is_set_hides_no_session(tmp_path, monkeypatch, session):
    """Setting the clock shifts the time at which the machine started."""
    process, child = session
    remember(tmp_path, process.pid)
    booted = psutil.boot_time() + 86_400.0
    monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: booted)
    assert end_leftover(tmp_path)
    assert not alive(child)


@pytest.mark.slow
def test_after_a_restart_of_the_machine_nothing_is_left(tmp_path, monkeypatch, session):
    """The number is that of a session whose first process has ended."""
    process, child = session
    remember(tmp_path, process.pid)
    process.kill()
    process.wait()
    monkeypatch.setattr(leftover, "boot_id", lambda: "another")
    assert not end_leftover(tmp_path)
    assert alive(child)


NUMBERS = ["x", 1 << 40, 0]  # the session 0 is that of others


@pytest.mark.parametrize(
    "content", ["{", "[]", *(json.dumps({"pid": pid, "began": 0, "booted": 0}) for pid in NUMBERS)]
)
def test_a_note_that_cannot_be_read_is_told(tmp_path, content):
    (tmp_path / "superlink.json").write_text(content)
    with pytest.raises(UserError, match="cannot be read; end Flower's SuperLink yourself"):
        end_leftover(tmp_path)
