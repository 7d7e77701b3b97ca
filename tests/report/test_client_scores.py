"""Histograms of clients' scores beside their thresholds."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lit_fedad.report.decision_figures import ClientScores, client_scores_figure
from lit_fedad.report.figures import save_figure

RANDOM = np.random.default_rng(2)
SCORES = ClientScores(
    calibration=np.array([1.0, 2.0, 4.0]),
    counts=np.array([3, 6, 1]),
    normal=RANDOM.normal(2, 1, 40),
    anomalous=RANDOM.normal(5, 1, 160),
    threshold=4.25,
)


def heights(patch, places):
    corners = patch.get_xy()
    return [corners[np.searchsorted(corners[:61, 0], x), 1] for x in places]


def test_each_kind_is_a_share_of_its_own_images():
    figure = client_scores_figure({3: SCORES})
    (axes,) = figure.axes
    everything = np.concatenate([SCORES.calibration, SCORES.normal, SCORES.anomalous])
    edges = np.linspace(everything.min(), everything.max(), 31)
    middle = (edges[:-1] + edges[1:]) / 2
    filled = [patch for patch in axes.patches if patch.get_fill()]
    for patch, values in zip(filled, (SCORES.normal, SCORES.anomalous), strict=True):
        expected = np.histogram(values, edges)[0] / len(values)
        np.testing.assert_allclose(heights(patch, middle), expected, atol=1e-12)
    outline = next(patch for patch in axes.patches if patch.get_label() == "calibration")
    expected = np.histogram(SCORES.calibration, edges, weights=SCORES.counts)[0] / 10
    assert sorted(h for h in heights(outline, middle) if h) == pytest.approx(sorted(e for e in expected if e))
    (line,) = axes.lines
    assert line.get_xdata() == [4.25, 4.25]
    assert axes.get_title() == "client 3 (10 images)\nthreshold 4.25"
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(names) == ["anomalous test", "calibration", "normal test", "threshold"]


@pytest.mark.parametrize("number", [1, 5])
def test_one_panel_a_client_within_the_page(number, tmp_path):
    figure = client_scores_figure(dict.fromkeys(range(number), SCORES))
    assert len(figure.axes) == number
    assert figure.get_figwidth() <= 7.16
    save_figure(figure, tmp_path / "a.png")
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1


@pytest.mark.parametrize("number", [1, 2, 12])
def test_titles_lie_beside_each_other_and_on_the_page(number, tmp_path):
    scores = replace(SCORES, calibration=np.zeros(1), counts=np.array([1234]), threshold=0.000123)
    figure = client_scores_figure({100 + client: scores for client in range(number)})
    save_figure(figure, tmp_path / "a.png")
    titles = [axes.title.get_window_extent() for axes in figure.axes]
    assert min(title.x0 for title in titles) >= 0
    assert max(title.x1 for title in titles) <= figure.bbox.x1
    assert not any(one.overlaps(other) for one, other in pairwise(titles))


def test_what_has_no_end_is_said_and_not_drawn(tmp_path):
    odd = ClientScores(
        calibration=np.zeros(0),
        counts=np.zeros(0, int),
        normal=np.array([1.0, np.nan, np.inf]),
        anomalous=np.zeros(0),
        threshold=np.inf,
    )
    figure = client_scores_figure({0: odd})
    assert figure.axes[0].get_title() == "client 0 (0 images)\nno threshold\n(2 scores not finite)"
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size


@pytest.mark.parametrize("ends", [(1.0, 1.0 + 2**-23), (1e8, 1e8 + 8), (-3e38, 3e38)])
def test_single_precision_has_room_for_the_bins_of_any_scores(ends):
    scores = np.array(ends, dtype=np.float32)
    figure = client_scores_figure({0: ClientScores(scores, np.array([1, 1]), scores, scores, 1.0)})
    outline = next(patch for patch in figure.axes[0].patches if patch.get_label() == "calibration")
    assert sorted(set(outline.get_xy()[:, 1])) == [0, 0.5]
