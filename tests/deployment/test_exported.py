"""Where exported detectors of a run are found."""

from types import SimpleNamespace

import pytest

pytest.importorskip("onnx")
from helpers.tiny_detector import tiny_detector

from lit_fedad.core.errors import UserError
from lit_fedad.deployment.exported import find_exported


def test_a_client_that_there_is_none_of_is_not_another_one(tmp_path, monkeypatch):
    tiny_detector(tmp_path / "run" / "export" / "client_north")
    run = SimpleNamespace(path=tmp_path / "run", result=lambda: {"sites": {"north": {"client": 0}}})
    run.version = lambda number: run
    monkeypatch.setattr("lit_fedad.deployment.exported.RunFolder.find", lambda name: run)
    for known in (None, "north", 0):
        assert find_exported("run", known).name == "client_north"
    for unknown in ("nroth", "client_north", 1):
        with pytest.raises(
            UserError, match=f"no exported detector client={unknown}; first: lit-fedad export"
        ):
            find_exported("run", unknown)
