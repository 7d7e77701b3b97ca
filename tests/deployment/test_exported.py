"""Where exported detectors of a run are found, and what a later export leaves of an earlier one."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("onnx")
from helpers.tiny_detector import tiny_detector

from lit_fedad.core.errors import UserError
from lit_fedad.deployment.exported import find_exported, read_sheet, write_sheet

FACTS = SimpleNamespace(
    result={"method": "fedavg", "data": "motifs", "partition": {"products": ["rings"]}},
    rules={},
    client=0,
    title="client 0",
    classifies=True,
    files=[SimpleNamespace(files=("detector.pt2",))],
)


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
    tiny_detector(tmp_path / "run" / "export" / "client_1")
    with pytest.raises(UserError, match="give client=N, one of 1, north"):
        find_exported("run")


@pytest.fixture
def folder(tmp_path):
    """A detector in ONNX that was exported before, and its file for PyTorch, just exported."""
    folder = tiny_detector(tmp_path / "tiny")
    (folder / "detector.pt2").write_bytes(b"new")
    return folder


def test_files_of_the_same_detector_stay_unless_they_were_changed(folder):
    same = replace(read_sheet(folder), name="fedavg, motifs, client 0", alpha=None, threshold=None)
    same = replace(same, colour=None, classes=("rings",))
    (folder / "detector.json").write_text(json.dumps({"format": 1, **asdict(same)}))
    assert write_sheet(folder, FACTS).sha256.keys() == {*same.sha256, "detector.pt2"}
    (folder / "detector.onnx").write_bytes(b"another")
    assert write_sheet(folder, FACTS).sha256.keys() == {"detector.pt2", "preprocessing.json"}
    assert (folder / "detector.onnx").exists()


def test_files_of_another_detector_are_removed_and_no_others(folder):
    onnx = folder / "detector.onnx"
    with pytest.warns(UserWarning, match=r"detector\.onnx: was of another detector, and is removed$"):
        sheet = write_sheet(folder, FACTS)
    assert not onnx.exists()
    assert read_sheet(folder) == sheet
    assert sheet.sha256.keys() == {"detector.pt2", "preprocessing.json"}
    onnx.write_bytes(b"of somebody else")
    write_sheet(folder, FACTS)
    assert onnx.exists()
