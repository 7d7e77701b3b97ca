import numpy as np
import pytest

from lit_fedad.report.roc_curves import roc_figure

CURVES = {
    0: (np.array([0, 0.5, 1]), np.array([0.25, 0.5, 1])),
    3: (np.array([0, 0.1, 1]), np.array([0, 0.75, 1])),
    4: (np.array([0, 0.2, 1]), np.array([0, 0.5, 1])),
}


def test_worst_client_is_named_and_drawn_last():
    figure = roc_figure(CURVES, {0: 0.5, 3: 0.8, 4: 0.6})
    *clients, diagonal = figure.axes[0].lines
    assert [line.get_linewidth() for line in clients] == [0.7, 0.7, 1.8]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["other clients", "worst: client 3, AUC 0.800", "guessing"]
    np.testing.assert_array_equal(clients[-1].get_ydata(), [np.nan, 0.75, 1])
    np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())


def test_axes_are_logarithmic_down_to_the_smallest_rate_above_zero():
    axes = roc_figure(CURVES, {0: 0.5, 3: 0.8, 4: 0.6}).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlim() == (0.1, 1)


def test_no_client_is_refused():
    with pytest.raises(ValueError, match="no client"):
        roc_figure({}, {})
