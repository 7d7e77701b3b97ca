"""What commands make of the process that they run in."""

import io
import sys

import pytest

from lit_fedad.cli import main as cli
from lit_fedad.report.console import Display


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
