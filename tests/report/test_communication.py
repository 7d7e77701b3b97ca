import itertools

import numpy as np

from lit_fedad.report.figures import Point, communication_figure


def numbers(figure):
    """Texts at the points, from left to right."""
    return [int(text.get_text()) for text in figure.axes[0].texts[::-1]]


def test_the_line_goes_through_what_was_measured():
    figure = communication_figure([Point(1, 2_000_000, 0.25), Point(2, 4_000_000, 0.5)], "accuracy")
    (line,) = figure.axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[2, 0.25], [4, 0.5]])
    assert figure.axes[0].get_ylabel() == "accuracy"
    assert figure.axes[0].get_xscale() == "linear"
    assert numbers(figure) == [1, 2]


def test_a_wide_range_is_logarithmic_and_begins_with_what_was_sent():
    points = [Point(0, 0, 0.1), *(Point(r, 1_000_000 * r, 0.5) for r in range(1, 101))]
    figure = communication_figure(points, "accuracy")
    (line,) = figure.axes[0].lines
    assert figure.axes[0].get_xscale() == "log"
    assert line.get_xdata()[0] == 1


def test_numbers_of_rounds_never_lie_on_each_other():
    figure = communication_figure([Point(r, 1_000_000 * r, 0.5) for r in range(1, 101)], "accuracy")
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts[::-1]]
    shown = numbers(figure)
    assert (shown[0], shown[-1]) == (1, 100)
    assert len(shown) >= 6
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def test_a_single_round_is_a_point_with_its_number():
    figure = communication_figure([Point(5, 1234, 0.5)], "accuracy")
    assert numbers(figure) == [5]
    assert figure.axes[0].lines[0].get_marker() == "o"
