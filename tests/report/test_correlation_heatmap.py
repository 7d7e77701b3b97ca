import numpy as np
import torch
from PIL import Image

from lit_fedad.report.audit_figures import draw_correlation_heatmap

NAMES = ("raw", "shared", "noise")
R_SQUARED = np.array([[1, 0.36, 0.04], [0.36, 1, 0.09], [0.04, 0.09, 1]])
CORRECTED = np.array([[1, 0.25, -0.0001], [0.25, 1, -0.02], [-0.0001, -0.02, 1]])


def panels(tmp_path):
    figure = draw_correlation_heatmap(
        tmp_path / "a" / "b.png", NAMES, torch.tensor(R_SQUARED), np.sqrt(R_SQUARED), CORRECTED
    )
    return figure, figure.axes[:3]


def test_every_cell_carries_its_value(tmp_path):
    _, axes = panels(tmp_path)
    for panel, matrix in zip(axes, (R_SQUARED, np.sqrt(R_SQUARED), CORRECTED), strict=True):
        np.testing.assert_allclose(panel.images[0].get_array(), matrix)
        for text in panel.texts:
            column, row = text.get_position()
            assert text.get_text() == f"{matrix[row, column]:.3f}".replace("-0.000", "0.000")
        assert len(panel.texts) == 9


def test_panels_share_one_scale_and_name_rows_and_columns(tmp_path):
    _, axes = panels(tmp_path)
    assert {panel.images[0].get_clim() for panel in axes} == {(0, 1)}
    for panel in axes:
        assert [label.get_text() for label in panel.get_xticklabels()] == list(NAMES)
    assert [label.get_text() for label in axes[0].get_yticklabels()] == list(NAMES)
    assert axes[2].get_title() == "$R^2$, bias-corrected"


def test_values_stand_out_from_their_cells(tmp_path):
    _, axes = panels(tmp_path)
    for panel in axes:
        image = panel.images[0]
        for text in panel.texts:
            column, row = text.get_position()
            cell = image.cmap(image.norm(image.get_array()[row, column]))[:3]
            grey = np.dot(cell, (0.299, 0.587, 0.114))
            assert abs(grey - (text.get_color() == "white")) > 0.4


def test_the_file_is_the_figure(tmp_path):
    figure, _ = panels(tmp_path)
    picture = Image.open(tmp_path / "a" / "b.png")
    assert picture.size == tuple(int(side) for side in figure.bbox.size)
