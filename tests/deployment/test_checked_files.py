"""Exported files are kept only if they compute what the live detector does."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.deployment import formats
from lit_fedad.deployment.export import Compared, difference, on_images, write_checked
from lit_fedad.deployment.formats import FORMATS, Format


class Mean(torch.nn.Module):
    def forward(self, pixels):
        return {"image_score": pixels.mean((1, 2, 3))}


def test_a_file_that_computes_something_else_is_not_kept(tmp_path):
    pixels = torch.rand(2, 3, 4, 4)
    program = torch.export.export(Mean(), (pixels,))
    same = Mean()(pixels)
    for wrong in (1.001, math.nan):
        other = {"image_score": same["image_score"] * wrong}
        batches = [Compared(pixels, same, False), Compared(pixels, other, False)]
        with pytest.raises(
            UserError, match=r"format=pt2: the exported detector differs from the live one by"
        ):
            write_checked(program, ["pt2"], tmp_path, batches)
        assert not [*tmp_path.iterdir()]
    (file,) = write_checked(program, ["pt2"], tmp_path, [Compared(pixels, same, False)])
    assert (file.files, file.difference) == (("detector.pt2",), 0)
    assert file.size == (tmp_path / "detector.pt2").stat().st_size
    assert file.on_images is None
    assert [path.name for path in tmp_path.iterdir()] == ["detector.pt2"]


def coarse(program, path):
    """Writes a detector whose scores are the true ones, rounded to steps of 0.3."""
    path.write_text("0.3")
    path.with_suffix(".bin").write_text("weights")


def load_coarse(path):
    step = float(path.read_text())

    def run(pixels):
        score = (pixels.mean((1, 2, 3)) / step).round() * step
        return {"image_score": score, "decision": score > 0.5}

    return run


def test_a_coarse_format_is_kept_and_its_changes_are_counted(tmp_path, monkeypatch):
    """Scores 0.49, 0.9 and 0.2 become 0.6, 0.9 and 0.3: one of two images is decided otherwise."""
    files = ("detector.coarse", "detector.bin")
    monkeypatch.setitem(FORMATS, "coarse", Format(files, coarse, load_coarse, exact=False))

    def batch(values, real):
        score = torch.tensor(values)
        live = {"image_score": score, "decision": score > 0.5}
        return Compared(score[:, None, None, None].expand(-1, 3, 4, 4), live, real)

    program = torch.export.export(Mean(), (torch.rand(2, 3, 4, 4),))
    batches = [batch([0.2], False), batch([0.49, 0.9], True)]
    (file,) = write_checked(program, ["coarse"], tmp_path, batches)
    assert file.files == files
    assert (file.on_images.images, file.on_images.changed) == (2, 1)
    assert file.on_images.largest == pytest.approx(0.11 / 0.49, rel=1e-4)
    assert file.on_images.median == pytest.approx(0, abs=1e-4)
    assert file.difference == pytest.approx(0.1 / 0.2, rel=1e-4)
    assert file.size == sum((tmp_path / name).stat().st_size for name in files)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_coarse_format_without_numbers_is_not_kept(tmp_path, monkeypatch, wrong):
    def load(path):
        return lambda pixels: {"image_score": torch.full((len(pixels),), wrong)}

    monkeypatch.setitem(FORMATS, "coarse", Format(("a.xml", "a.bin"), coarse, load, exact=False))
    program = torch.export.export(Mean(), (torch.rand(2, 3, 4, 4),))
    batches = [Compared(torch.rand(2, 3, 4, 4), {"image_score": torch.tensor([0.4, 0.5])}, True)]
    with pytest.raises(UserError, match="format=coarse: .* it is not kept"):
        write_checked(program, ["coarse"], tmp_path, batches)
    assert list(tmp_path.iterdir()) == []


def test_of_classifiers_classes_are_counted():
    one, other = torch.tensor([[0.6, 0.4], [0.1, 0.9]]), torch.tensor([[0.4, 0.6], [0.1, 0.9]])
    pair = tuple({"probabilities": p, "class": p.argmax(1)} for p in (one, other))
    found = on_images([pair])
    assert (found.images, found.changed) == (2, 1)
    assert found.largest == pytest.approx(0.2 / 0.6)


def test_difference_is_a_share_of_the_largest_value():
    live = {"image_score": torch.tensor([10.0, 1.0]), "class": torch.tensor([1, 2])}
    assert difference(
        live, {"image_score": torch.tensor([10.0, 1.5]), "class": torch.tensor([9, 9])}
    ) == pytest.approx(0.05)
    assert math.isnan(difference(live, {"image_score": torch.tensor([math.nan, 1.0])}))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_no_process(tmp_path):
    """That of PyTorch's own writer would abort it, without a line."""
    (tmp_path / "detector.pt2").symlink_to("/dev/full")
    program = torch.export.export(Mean(), (torch.rand(2, 3, 4, 4),))
    with pytest.raises(OSError, match="No space left"):
        FORMATS["pt2"].save(program, tmp_path / "detector.pt2")


def test_an_error_of_openvinos_writer_is_one_of_the_disk(tmp_path, monkeypatch):
    def full(*_, **given):
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(save_model=full))
    with pytest.raises(OSError, match="iostream error") as caught:
        formats._write_openvino(None, tmp_path / "detector.xml")
    assert caught.value.filename == str(tmp_path / "detector.xml")
