"""Figures of drift and of promised rates show the numbers that they were given."""

import math

import numpy as np
import pytest

from lit_fedad.metrics.drift import Step
from lit_fedad.report.decision_figures import calibration_figure, drift_figure


def lines(axes):
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def test_drift_is_drawn_over_the_images_beside_the_limit_of_an_alarm():
    steps = [(0.01, 0.0, 0.0), (0.02, 1.0, 10.0), (0.98, 2.0, 1000.0), (0.51, 1.5, 1.0)]
    figure = drift_figure([Step(*step, alarm=step[2] > 100) for step in steps], 100)
    share, over = figure.axes
    heights = [bar.get_height() for bar in share.patches]
    assert {place: int(height) for place, height in enumerate(heights) if height} == {0: 2, 10: 1, 19: 1}
    assert len(heights) == 20
    assert lines(share)["expected without drift"][1] == [0.2, 0.2]
    drawn = lines(over)
    assert drawn["test martingale"] == ([1, 2, 3, 4], [0.0, 1.0, 2.0, 1.5])
    # Of 0 none is drawn.
    assert drawn["Shiryaev-Roberts statistic"] == ([1, 2, 3, 4], pytest.approx([-1, 1, 3, 0]))
    assert drawn["alarm: at most one in 100 images without drift"][1] == [2, 2]
    assert drawn["alarms"][0] == [3, 3]
    assert over.get_xlim() == (0, 4)


def test_several_alarms_have_one_name():
    _, over = drift_figure([Step(0.1, 0.0, 1.0, alarm) for alarm in (True, False, True)], 10).axes
    (legend,) = [over.get_legend()]
    assert [text.get_text() for text in legend.get_texts()].count("alarms") == 1
    assert [line.get_xdata()[0] for line in over.lines[-2:]] == [1, 3]


def test_rates_of_own_and_foreign_products_stand_beside_the_promise():
    promised, nothing = [0.01, 0.1], [math.nan, math.nan]
    seen = {"own": [0.02, 0.08], "foreign": [0.5, 0.6]}
    intervals = {"own": [(0.0, 0.05), (0.04, 0.2)], "foreign": [(0.4, 0.6), (0.5, 0.7)]}
    missed = {"own": [0.4, 0.3], "foreign": [0.2, 0.1]}
    alarms, misses = calibration_figure(promised, seen, intervals, missed).axes
    drawn = lines(alarms)
    assert drawn["own products"] == (promised, [0.02, 0.08])
    assert drawn["other products"] == (promised, [0.5, 0.6])
    assert drawn["promised"][0] == drawn["promised"][1]
    assert (min(drawn["promised"][0]), max(drawn["promised"][0])) == pytest.approx((0.01, 0.1))
    assert [list(line.get_ydata()) for line in misses.lines] == [[0.4, 0.3], [0.2, 0.1]]
    band = alarms.collections[0].get_datalim(alarms.transData)
    assert np.ravel([band.y0, band.y1]) == pytest.approx([0.0, 0.2])
    alarms, misses = calibration_figure(promised, seen | {"foreign": nothing}, intervals, missed).axes
    assert lines(alarms).keys() == {"promised", "own products"}
    assert len(misses.lines) == 1
