"""Turns that take too long."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.federation.local_transport import deadline
from lit_fedad.federation.sampling import ClientSampler


def test_a_block_that_sleeps_is_interrupted():
    with (
        pytest.raises(UserError, match="took longer than federation.sampler.deadline=0.05 seconds"),
        deadline(0.05, "x"),
    ):
        time.sleep(60)


def test_a_block_in_time_is_left_alone_and_no_alarm_remains():
    with deadline(30, "x"):
        pass
    with deadline(None, "x"):
        pass
    time.sleep(0.01)


def test_outside_the_main_thread_it_is_refused():
    found = []

    def body():
        try:
            with deadline(1, "x"):
                found.append("ran")
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [
        "federation.sampler.deadline needs the alarms of a process's main thread; leave it null here"
    ]


def test_a_client_that_hangs_is_left_out(toy, monkeypatch):
    federation = toy(rounds=1, sampler=ClientSampler(on_failure="skip", deadline=0.3))
    send = federation.client.send

    def hangs(loader):
        if federation.client.context.client == 1:
            time.sleep(60)
        return send(loader)

    monkeypatch.setattr(federation.client, "send", hangs)
    report = federation.run()[0]
    assert report.participants == [0]
    assert report.failures == {1: "took longer than federation.sampler.deadline=0.3 seconds"}


@pytest.mark.slow
def test_a_process_that_cannot_be_interrupted_is_ended_in_one_line():
    code = """
        import signal, time
        from lit_fedad.federation import local_transport as deadline
        deadline.GRACE_S = 0.2
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        with deadline.deadline(0.1, "client 3"):
            time.sleep(120)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: client 3 hangs beyond federation.sampler.deadline=0.1 seconds"
    )


def test_a_deadline_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"federation.sampler.deadline=0 must be above 0"):
        ClientSampler(deadline=0)
