"""Pictures side by side: each in its place, a missing one named."""

import numpy as np
import pytest
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.report.run_figures import sheet
from lit_fedad.report.table_figures import sheets_figure


def test_each_picture_stands_in_its_place(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(np.full((4, 8, 3), 7, np.uint8)).save(file)
    axes = sheets_figure(["one", "two"], ["Path"], {("two", "Path"): file}).axes
    assert [one.get_title() for one in axes] == ["one, Path", "two, Path"]
    assert [text.get_text() for text in axes[0].texts] == ["no run with pictures"]
    assert np.array_equal(axes[1].images[0].get_array(), np.full((4, 8, 3), 7))


@pytest.mark.parametrize("damage", ["emptied", "cut", "written over", "a link"])
@pytest.mark.parametrize(
    "read", [sheet, lambda file: sheets_figure(["one"], ["Path"], {("one", "Path"): file})]
)
def test_a_picture_that_is_none_any_more_is_one_line(tmp_path, damage, read):
    file = tmp_path / "a.png"
    Image.effect_noise((64, 64), 9).save(file)
    if damage == "a link":
        file.rename(tmp_path / "b.png")
        file.symlink_to(tmp_path / "b.png")
    else:
        content = {"emptied": b"", "cut": file.read_bytes()[:500], "written over": b"hello"}
        file.write_bytes(content[damage])
    with refusal() as error:
        read(file)
    assert str(error.value).startswith(f"{file}: ")
