"""Figures of attacks against the numbers that they are drawn from."""

import numpy as np
import torch

from lit_fedad.report.audit_figures import Shown, correlation_figure, inversion_sheet, roc_figure

CURVES = {
    "uploads": (np.array([0, 0.1, 1]), np.array([0, 0.75, 1])),
    "broadcasts": (np.array([0, 0.5, 1]), np.array([0.25, 0.5, 1])),
}
AUC = {"uploads": 0.8, "broadcasts": 0.5}


def test_curves_are_named_with_their_areas():
    figure = roc_figure(CURVES, AUC)
    *curves, diagonal = figure.axes[0].lines
    assert len(curves) == 2
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["uploads, AUC 0.800", "broadcasts, AUC 0.500", "guessing"]
    np.testing.assert_array_equal(curves[0].get_ydata(), [np.nan, 0.75, 1])
    np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())


def test_axes_are_logarithmic_down_to_the_smallest_rate_above_zero():
    axes = roc_figure(CURVES, AUC).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlim() == (0.1, 1)


NAMES = ("raw", "shared", "noise")
R_SQUARED = np.array([[1, 0.36, 0.04], [0.36, 1, 0.09], [0.04, 0.09, 1]])
CORRECTED = np.array([[1, 0.25, -0.0001], [0.25, 1, -0.02], [-0.0001, -0.02, 1]])


def panels():
    return correlation_figure(NAMES, torch.tensor(R_SQUARED), np.sqrt(R_SQUARED), CORRECTED).axes[:3]


def test_every_cell_carries_its_value():
    axes = panels()
    for panel, matrix in zip(axes, (R_SQUARED, np.sqrt(R_SQUARED), CORRECTED), strict=True):
        np.testing.assert_allclose(panel.images[0].get_array(), matrix)
        for text in panel.texts:
            column, row = text.get_position()
            assert text.get_text() == f"{matrix[row, column]:.3f}".replace("-0.000", "0.000")
        assert len(panel.texts) == 9


def test_panels_share_one_scale_and_name_rows_and_columns():
    axes = panels()
    assert {panel.images[0].get_clim() for panel in axes} == {(0, 1)}
    for panel in axes:
        assert [label.get_text() for label in panel.get_xticklabels()] == list(NAMES)
    assert [label.get_text() for label in axes[0].get_yticklabels()] == list(NAMES)
    assert axes[2].get_title() == "$R^2$, bias-corrected"


def test_values_stand_out_from_their_cells():
    axes = panels()
    for panel in axes:
        image = panel.images[0]
        for text in panel.texts:
            column, row = text.get_position()
            cell = image.cmap(image.norm(image.get_array()[row, column]))[:3]
            grey = np.dot(cell, (0.299, 0.587, 0.114))
            assert abs(grey - (text.get_color() == "white")) > 0.4


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
