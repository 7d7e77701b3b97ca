"""What a coordinator's operator reads of a run that ended early, and what is renewed while it goes on."""

import errno
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Context, RecordDict

from lit_fedad.core.errors import UserError
from lit_fedad.flower import coordinator, server_app
from lit_fedad.flower.coordinator import ERROR
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.report.console import Display

CAUSE = "checkpoints/round_2: cannot be written (No space left on device)"


@pytest.fixture
def folder(tmp_path):
    return FederationFolder.create(
        tmp_path / "fed", host="127.0.0.1", port=9443, link=9442, sites=["north"], overrides=["method=fedavg"]
    )


@pytest.fixture
def ended(folder, monkeypatch):
    """Runs the app of a federation whose run ends by an error."""

    def run(error=None):
        def fail(*given, **more):
            raise error or UserError(CAUSE)

        monkeypatch.setattr(server_app, "coordinate", fail)
        server_app.main(None, Context(0, 0, {}, RecordDict(), {"folder": str(folder.path)}))

    return run


def test_the_cause_of_an_early_end_is_left_for_the_command_that_started_the_run(folder, ended, capsys):
    ended()
    assert (folder.path / ERROR).read_text() == CAUSE
    assert CAUSE not in capsys.readouterr().err


def test_a_cause_that_cannot_be_written_is_printed(folder, ended, capsys):
    (folder.path / ERROR).mkdir()
    ended()
    assert f"error: {CAUSE}" in " ".join(capsys.readouterr().err.split())


def test_a_failing_superlink_ends_the_run_in_one_line(folder, ended):
    """The SuperLink's database lies on the disk that is full."""
    answer = httpx.Response(500, request=httpx.Request("POST", "https://127.0.0.1:9442/v1/x"))
    with pytest.raises(httpx.HTTPStatusError) as failed:
        answer.raise_for_status()
    ended(failed.value)
    (line,) = (folder.path / ERROR).read_text().splitlines()
    assert "SuperLink failed (Server error '500 Internal Server Error'" in line
    assert str(folder.path / "superlink.log") in line


def test_a_superlink_that_cannot_be_remembered_is_ended(folder, monkeypatch):
    """Otherwise it would keep its port, and nothing would say which coordinator started it."""
    ended = []

    def fail(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    superlink = SimpleNamespace(pid=1, terminate=lambda: ended.append("told"), wait=ended.append)
    monkeypatch.setattr(coordinator.subprocess, "Popen", lambda *given, **more: superlink)
    monkeypatch.setattr(coordinator, "remember", fail)
    with pytest.raises(OSError, match="No space left"), coordinator._superlink(folder, Display(quiet=True)):
        pass
    assert ended == ["told", 20]


@pytest.mark.parametrize(("left", "said"), [(CAUSE, CAUSE), ("", "the run ended early")])
def test_the_command_says_the_cause_or_names_the_log(folder, monkeypatch, left, said):
    """A file that a full disk cut off at its beginning names no cause."""

    @contextmanager
    def nothing(*given):
        yield None

    class Run:
        def __init__(self, *given, **more):
            (folder.path / ERROR).write_text(left)

        def __enter__(self):
            return self

        def __exit__(self, *ended):
            pass

    for name in ("_superlink", "_open_port"):
        monkeypatch.setattr(coordinator, name, nothing)
    for name in ("_register", "_follow"):
        monkeypatch.setattr(coordinator, name, lambda *given: None)
    monkeypatch.setattr(coordinator.subprocess, "Popen", Run)
    monkeypatch.setattr(FederationFolder, "public_keys", lambda folder: {})
    with pytest.raises(UserError, match=f"^{said.partition('(')[0]}"):
        coordinator.start(folder, Display(quiet=True))


def test_a_damaged_list_of_registered_keys_is_no_obstacle(folder):
    """At worst a key is registered again, which changes nothing."""
    (folder.path / "registered").write_bytes(b"\xff\xfe\nSHA256:x\n")
    coordinator._register(folder, Display(quiet=True))


def test_a_renewed_certificate_is_loaded_whatever_else_fails(folder, monkeypatch, capsys):
    """It may be looked at while it is written, and a key of a site may be damaged."""
    outcomes, looks = [OSError("half a certificate"), None], iter([None, None, None, 0])

    def load(certificate, key):
        if (failure := outcomes.pop(0)) is not None:
            raise failure

    def damaged(*given):
        raise UserError("keys/north.pub: holds no public key")

    def renew(seconds):
        os.utime(folder.path / "server.pem", (1, 1))

    monkeypatch.setattr(coordinator, "_register", damaged)
    monkeypatch.setattr(coordinator.time, "sleep", renew)
    proxy = SimpleNamespace(config=SimpleNamespace(ssl=SimpleNamespace(load_cert_chain=load)))
    coordinator._follow(folder, SimpleNamespace(poll=lambda: next(looks)), proxy, Display())
    assert outcomes == []
    said = capsys.readouterr()
    assert said.out == "the open port has the renewed certificate\n"
    assert "half a certificate" in said.err
    assert "keys/north.pub: holds no public key" in said.err
