"""Figures over several runs show each run's points, and the lowest client by its name."""

import pytest

from lit_fedad.report.run_figures import lines_figure, spread_figure


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


def test_the_lowest_client_of_a_run_is_named_where_they_differ():
    (axes,) = spread_figure(
        {"run": {"north": 0.5, "south": 0.25, "x": 0.75}, "even": {"a": 1, "b": 1}}, "m"
    ).axes
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("south", (0.25, 0))]
    dots, mean, worst, even, its_mean = drawn(axes)
    assert dots == [(0.5, 0), (0.25, 0), (0.75, 0)]
    assert (mean, worst) == ([(0.5, 0)], [(0.25, 0)])
    assert (even, its_mean) == ([(1, 1), (1, 1)], [(1, 1)])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["run", "even"]
