import numpy as np

from lit_fedad.report.audit_figures import Shown, inversion_sheet

GENERATOR = np.random.default_rng(0)


def test_every_image_stands_in_its_place_above_its_caption():
    rows = [[Shown(GENERATOR.random((8, 12, 3)), f"{row} {column}") for column in "ab"] for row in range(3)]
    figure = inversion_sheet(rows, ["left", "right"], "the title")
    figure.canvas.draw()
    assert [axes.get_xlabel() for axes in figure.axes] == ["0 a", "0 b", "1 a", "1 b", "2 a", "2 b"]
    assert [axes.get_title() for axes in figure.axes] == ["left", "right", "", "", "", ""]
    assert figure.get_suptitle() == "the title"
    for axes, shown in zip(figure.axes, (shown for row in rows for shown in row), strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), shown.image)


def test_grey_values_are_not_stretched():
    """A flat image stays as grey as it is, whatever lies in the others."""
    figure = inversion_sheet([[Shown(np.full((4, 4), 0.25), ""), Shown(np.ones((4, 4)), "")]], ["", ""], "")
    assert [axes.images[0].get_clim() for axes in figure.axes] == [(0, 1), (0, 1)]
    assert {axes.images[0].get_cmap().name for axes in figure.axes} == {"gray"}
