"""What a site's operator does beside starting it: its making, the log, old states, and what was offered."""

import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from lit_fedad.cli.main import main
from lit_fedad.cli.sites import clean, log, review, start
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.claim import locked
from lit_fedad.flower import site_folder
from lit_fedad.flower.site_folder import SiteFolder
from lit_fedad.report.console import Display


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ca.crt").write_text("certificate")
    given = {"name": "north", "address": "localhost:9443", "data": ["data=folders", "data.root=x"]}
    return SiteFolder.create(tmp_path / "site", tmp_path / "ca.crt", **given)[0]


def test_the_log_is_shown_unless_it_was_changed(folder, capsys):
    for number in range(3):
        folder.log.append(
            by="localhost:9443", run=f"run{number}", round=1, asked="play", verdict="answered", told="sums: x"
        )
    log(str(folder.path), last=2)
    shown = capsys.readouterr().out
    assert "run0" not in shown
    assert "run2" in shown
    assert "3 entries, each with the hash of the one before" in " ".join(shown.split())
    folder.log.file.write_text(folder.log.file.read_text().replace("run1", "run9"))
    with pytest.raises(UserError, match="line 2: does not follow"):
        log(str(folder.path))


def test_old_states_are_listed_and_removed(folder, capsys):
    for run in ("a" * 16, "b" * 16):
        (folder.path / "states" / run).mkdir(parents=True)
        (folder.path / "states" / run / f"{7:012d}.pt").write_bytes(b"")
    clean(str(folder.path))
    assert "state after step 7 (of the coordinator's requests in this run)" in " ".join(
        capsys.readouterr().out.split()
    )
    with locked(folder.path), pytest.raises(UserError, match="another lit-fedad command"):  # the site runs
        clean(str(folder.path), ("a" * 16,))
    clean(str(folder.path), ("a" * 16,))
    assert list(folder.runs()) == ["b" * 16]
    with pytest.raises(UserError, match="the site has no states of it"):
        clean(str(folder.path), ("../../keys",))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_site_ends_cleanly_by_either_signal(folder, monkeypatch, number):
    monkeypatch.setattr(site_folder, "start", lambda *_: signal.raise_signal(number))
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended:
            start(str(folder.path))
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert ended.value.code == 0


def test_what_happens_to_the_connection_has_a_time(folder, monkeypatch, capsys):
    monkeypatch.setattr(site_folder, "bound_memory", lambda: None)
    monkeypatch.setattr(
        site_folder, "answer_requests", lambda *given: given[-1]("localhost:9443: answers again")
    )
    site_folder.start(folder, Display())
    said = capsys.readouterr().out.strip()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ localhost:9443: answers again", said)


def test_nothing_to_review_is_one_line(folder):
    with pytest.raises(UserError, match=r"offer.json: holds no offer; take offer.json"):
        review(str(folder.path))


def test_a_folder_that_a_full_disk_left_half_made_is_made_by_the_same_command(tmp_path, monkeypatch):
    written = Path.write_text

    def full(path, text, **given):
        written(path, "" if "site.yaml" in path.name else text, **given)
        if "site.yaml" in path.name:
            raise OSError(28, "No space left on device", str(path))

    words = ["site", "init", f"out={tmp_path / 'site'}", "name=north", "address=a:1", f"ca={tmp_path / 'ca'}"]
    (tmp_path / "ca").write_bytes(b"certificate")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert main([*words, "data=folders", "data.root=x"]) == 2
    assert main([*words, "data=folders", "data.root=x"]) == 0
