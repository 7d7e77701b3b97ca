"""Exported files are kept only if they compute what the live detector does."""

import math

import pytest
import torch

from lit_fedad.deployment.checked_files import difference, write_checked
from lit_fedad.errors import UserError


class Mean(torch.nn.Module):
    def forward(self, pixels):
        return {"image_score": pixels.mean((1, 2, 3))}


def test_a_file_that_computes_something_else_is_not_kept(tmp_path):
    pixels = torch.rand(2, 3, 4, 4)
    program = torch.export.export(Mean(), (pixels,))
    same = Mean()(pixels)
    for wrong in (1.001, math.nan):
        other = {"image_score": same["image_score"] * wrong}
        with pytest.raises(
            UserError, match=r"format=pt2: the exported detector differs from the live one by"
        ):
            write_checked(program, ["pt2"], tmp_path, [(pixels, same), (pixels, other)])
        assert not [*tmp_path.iterdir()]
    (file,) = write_checked(program, ["pt2"], tmp_path, [(pixels, same)])
    assert (file.name, file.difference) == ("detector.pt2", 0)
    assert file.size == (tmp_path / "detector.pt2").stat().st_size


def test_difference_is_a_share_of_the_largest_value():
    live = {"image_score": torch.tensor([10.0, 1.0]), "class": torch.tensor([1, 2])}
    assert difference(
        live, {"image_score": torch.tensor([10.0, 1.5]), "class": torch.tensor([9, 9])}
    ) == pytest.approx(0.05)
    assert math.isnan(difference(live, {"image_score": torch.tensor([math.nan, 1.0])}))
