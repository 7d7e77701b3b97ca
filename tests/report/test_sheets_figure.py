"""Pictures side by side: each in its place, a missing one named."""

import numpy as np
from PIL import Image

from lit_fedad.report.table_figures import sheets_figure


def test_each_picture_stands_in_its_place(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(np.full((4, 8, 3), 7, np.uint8)).save(file)
    axes = sheets_figure(["one", "two"], ["Path"], {("two", "Path"): file}).axes
    assert [one.get_title() for one in axes] == ["one, Path", "two, Path"]
    assert [text.get_text() for text in axes[0].texts] == ["no run with pictures"]
    assert np.array_equal(axes[1].images[0].get_array(), np.full((4, 8, 3), 7))
