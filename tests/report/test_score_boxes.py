import numpy as np
import pytest
from matplotlib.colors import to_hex

from lit_fedad.experiment.figures.capacities import score_boxes_figure

RED = "#C1121F".lower()


def scores(clients, models=("averaged", "local"), gap=2.0):
    draw = np.random.default_rng(0)
    return {
        model: [(draw.normal(size=40), gap + draw.normal(size=25)) for _ in range(clients)]
        for model in models
    }


def draw(given):
    return score_boxes_figure(given, range(max(map(len, given.values()))))


def shown(figure):
    return [axes for axes in figure.axes if axes.get_visible()]


def medians(axes):
    """Heights of the solid red lines, in the order of the boxes."""
    lines = [line for line in axes.lines if to_hex(line.get_color()) == RED and line.get_linestyle() == "-"]
    return [line.get_ydata()[0] for line in lines]


def gaps(axes):
    lines = [line for line in axes.lines if line.get_linestyle() == ":"]
    return [tuple(line.get_ydata()) for line in lines]


def scaled_medians(pair):
    low, high = np.percentile(np.concatenate(pair), [2, 98])
    return [(np.median(values) - low) / (high - low) for values in pair]


@pytest.mark.slow
def test_one_panel_a_client_and_two_boxes_a_model():
    figure = draw(scores(3, ("averaged", "distilled", "local")))
    assert [axes.get_title() for axes in shown(figure)] == ["client 0", "client 1", "client 2"]
    for axes in shown(figure):
        assert len(axes.patches) == 6
        assert [t.get_text() for t in axes.get_xticklabels()] == ["averaged", "distilled", "local"]


def test_medians_and_their_gap_are_shares_of_the_robust_range_of_the_model_on_the_client():
    given = scores(2)
    for client, axes in enumerate(shown(draw(given))):
        expected = [scaled_medians(pairs[client]) for pairs in given.values()]
        np.testing.assert_allclose(medians(axes), np.ravel(expected))
        np.testing.assert_allclose(gaps(axes), expected)
        assert [t.get_text() for t in axes.texts] == [f"{high - low:+.2f}" for low, high in expected]


def test_anomalies_below_normal_images_have_a_negative_gap():
    (axes,) = shown(draw(scores(1, ("inverted",), gap=-3.0)))
    assert axes.texts[0].get_text().startswith("-")


@pytest.mark.parametrize(("clients", "in_last_row"), [(1, 1), (11, 4)])
def test_all_clients_are_shown_and_the_last_row_is_full(clients, in_last_row):
    figure = draw(scores(clients, ("averaged",)))
    axes = shown(figure)
    assert [panel.get_title() for panel in axes] == [f"client {client}" for client in range(clients)]
    last = min(panel.get_position().y0 for panel in axes)
    assert sum(panel.get_position().y0 == pytest.approx(last) for panel in axes) == in_last_row


def test_scores_that_are_missing_or_not_finite_are_left_out():
    normal = np.array([0.0, 1.0, 2.0, np.nan, np.inf])
    given = {"averaged": [(normal, np.array([]))], "local": [(np.array([]), [])]}
    (axes,) = shown(draw(given))
    assert medians(axes)[0] == pytest.approx(0.5)
    assert not gaps(axes)
    assert not axes.texts


def test_scores_that_are_all_equal_have_no_gap():
    (axes,) = shown(draw({"collapsed": [(np.ones(5), np.ones(5))]}))
    assert axes.texts[0].get_text() == "+0.00"


def test_the_values_of_the_gaps_stand_above_the_whiskers():
    figure = draw(scores(4))
    for axes in shown(figure):
        highest = max(np.max(line.get_ydata()) for line in axes.lines if len(line.get_ydata()))
        for text in axes.texts:
            assert axes.transData.inverted().transform(text.get_window_extent().p0)[1] > highest
