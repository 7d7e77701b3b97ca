"""A later export of the same detector keeps the files of an earlier one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("onnx")
from helpers.tiny_detector import tiny_detector

from lit_fedad.deployment.exported import formats_of_before, read_sheet, write_sheet


def test_files_of_the_same_detector_stay_unless_they_were_changed(tmp_path):
    folder = tiny_detector(tmp_path / "tiny")
    sheet = read_sheet(folder)
    assert formats_of_before(folder, sheet) == sheet.sha256
    (folder / "detector.onnx").write_bytes(b"another")
    assert list(formats_of_before(folder, sheet)) == ["preprocessing.json"]


def test_files_of_another_detector_do_not(tmp_path):
    folder = tiny_detector(tmp_path / "tiny")
    assert formats_of_before(folder, replace(read_sheet(folder), threshold=0.25)) == {}
    assert formats_of_before(tmp_path / "none", read_sheet(folder)) == {}


def test_files_of_another_detector_are_removed_and_no_others(tmp_path):
    folder = tiny_detector(tmp_path / "tiny")
    (folder / "detector.pt2").write_bytes(b"new")
    facts = SimpleNamespace(
        result={"method": "fedavg", "data": "motifs", "partition": {"products": ["rings"]}},
        rules={},
        client=0,
        title="client 0",
        classifies=True,
        files=[SimpleNamespace(files=("detector.pt2",))],
    )
    onnx = folder / "detector.onnx"
    with pytest.warns(UserWarning, match=r"detector\.onnx: was of another detector, and is removed$"):
        write_sheet(folder, facts)
    assert not onnx.exists()
    assert read_sheet(folder).sha256.keys() == {"detector.pt2", "preprocessing.json"}
    onnx.write_bytes(b"of somebody else")
    write_sheet(folder, facts)
    assert onnx.exists()
