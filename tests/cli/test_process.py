"""Commands and the process that they run in: signals that end them, streams, the folder that they are called in."""

import functools
import io
import os
import signal
import sys
import time

import pytest
import torch
from helpers.tiny_detector import tiny_detector

from lit_fedad.cli import main as cli
from lit_fedad.deployment import predict as prediction
from lit_fedad.experiment import train as experiment
from lit_fedad.report.console import Display


@pytest.mark.parametrize(("command", "hint"), [("train", True), ("evaluate", False)])
def test_an_interruption_is_one_line_and_status_130(say, monkeypatch, command, hint):
    def interrupted(*_, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "train", interrupted)
    monkeypatch.setattr(prediction, "evaluate", functools.wraps(prediction.evaluate)(interrupted))
    status, _, err = say(command, *(["run=r"] if command == "evaluate" else []))
    assert status == 130
    assert err == ["error: interrupted" + ("; the same command continues" if hint else "")]


def test_a_reader_who_has_enough_ends_a_command_without_a_traceback(monkeypatch):
    moved = []
    monkeypatch.setattr(cli, "main", lambda: os.write(moved[0], b"a line"))
    monkeypatch.setattr(os, "dup2", lambda *_: moved.append("away"))
    reader, writer = os.pipe()
    os.close(reader)
    moved.append(writer)
    assert (cli.run(), moved) == (141, [writer, "away"])
    os.close(writer)


def test_an_interrupted_save_of_torch_ends_as_an_interruption_does(say, monkeypatch):
    """Its zip file cannot be closed in the middle of an entry, and that error takes the interruption's place."""

    class File(io.BytesIO):
        def write(self, data):
            if len(data) > 1000:
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr(experiment, "train", lambda *_: torch.save({"a": torch.zeros(10_000)}, File()))
    assert say("train")[::2] == (130, ["error: interrupted; the same command continues"])


@pytest.fixture
def hears_sigint():
    """A shell starts what runs in its background deaf to SIGINT, the tests too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_sigint")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_python_ignores_comes_again(say, monkeypatch, number):
    """Nothing raised in a finalizer stops what runs."""

    class Last:
        def __del__(self):
            os.kill(os.getpid(), number)

    def played(*_):
        one = Last()
        del one
        time.sleep(10)  # the signal ends it

    monkeypatch.setattr(experiment, "train", played)
    assert say("train")[0] == 128 + number


def test_termination_ends_as_an_interruption_does(say, monkeypatch):
    monkeypatch.setattr(experiment, "train", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert say("train")[::2] == (143, ["error: terminated; the same command continues"])
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("hears_sigint")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_the_end_of_a_served_detector_and_no_error(say, tmp_path, monkeypatch, number):
    pytest.importorskip("fastapi")
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **given: signal.raise_signal(number))
    status, _, err = say("serve", f"run={tiny_detector(tmp_path / 'tiny')}", "port=0")
    assert (status, err) == (0, [])


def test_a_current_folder_that_was_deleted_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["options"]) == 2
    assert capsys.readouterr().err == "error: the current folder does not exist any more: cd to another one\n"


def test_streams_that_the_caller_has_closed_lead_nowhere(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)

    def command():
        sys.stdout.write("a line")
        Display().warn(f"read {sys.stdin.read()!r}")
        return 0

    monkeypatch.setattr(cli, "main", command)
    assert cli.run() == 0


def test_a_display_leaves_a_reader_who_has_enough_to_the_command(monkeypatch):
    class Left(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Left())
    with pytest.raises(BrokenPipeError):
        Display().note("a line")
