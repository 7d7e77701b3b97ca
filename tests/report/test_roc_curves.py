import numpy as np

from lit_fedad.report.audit_figures import roc_figure

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
