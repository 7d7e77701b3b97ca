"""Figures over several runs show each run's points."""

import pytest

from lit_fedad.report.run_figures import lines_figure, svg


def drawn(axes):
    return [list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines]


@pytest.mark.parametrize(
    ("largest", "whole", "scale"),
    [(19.0, False, "linear"), (20.0, False, "log"), (20.0, True, "linear")],
)
def test_a_wide_axis_is_logarithmic_and_leaves_out_what_it_cannot_show(largest, whole, scale):
    curves = [(0.0, 0.1), (1.0, 0.2), (largest, 0.3)]
    (axes,) = lines_figure({"a": [curves]}, "x", "y", whole).axes
    assert axes.get_xscale() == scale
    assert drawn(axes) == [curves[1:] if scale == "log" else curves]


def test_runs_of_a_group_look_alike_and_have_one_name():
    groups = {"a": [[(1, 0.1), (2, 0.2)], [(1, 0.3)]], "b": [[(2, 0.4)]]}
    figure = lines_figure(groups, "x", "y", whole=True)
    (axes,), (legend,) = figure.axes, figure.legends
    assert drawn(axes) == [*groups["a"], *groups["b"]]
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]
    first, second, other = (line.get_color() for line in axes.lines)
    assert first == second != other
    assert svg(figure) == svg(figure)


def test_twenty_four_groups_are_told_apart():
    groups = {f"method {number}": [[(1, 0.1), (2, 0.2)]] for number in range(24)}
    (axes,) = lines_figure(groups, "x", "y", whole=True).axes
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in axes.lines}) == 24
