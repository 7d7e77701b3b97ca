import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.contour import ContourSet

from lit_fedad.experiment.figures.predictions import representations_figure

RED, BLACK = "#d55e00", "#000000"
OWNERS = np.repeat([0, 1, 4, -1], 15)
CENTRES = np.repeat([[-30.0, 10.0], [5.0, -20.0], [25.0, 30.0], [0.0, 0.0]], 15, axis=0)
LATTICE = np.stack(np.meshgrid([-4.0, -2.0, 0.0, 2.0, 4.0], [-3.0, 0.0, 3.0]), axis=-1).reshape(15, 2)
PLACES = CENTRES + np.tile(LATTICE, (4, 1))
GLOBAL = OWNERS < 0
GLOBAL[[3, 20, 50]] ^= True  # two false detections and a missing one
LOCAL = OWNERS != 1


def points(axes, colour=None):
    """Places of all scattered points of a colour, in order."""
    chosen = [
        c.get_offsets()
        for c in axes.collections
        if not isinstance(c, ContourSet)
        and len(c.get_offsets())
        and (colour is None or to_hex(c.get_facecolor()[0]) == colour)
    ]
    return np.concatenate(chosen) if chosen else np.empty((0, 2))


def same(found, expected):
    order = [np.lexsort(np.asarray(array).T) for array in (found, expected)]
    np.testing.assert_allclose(found[order[0]], expected[order[1]])


def test_four_panels_with_the_counts_of_errors():
    figure = representations_figure(PLACES, OWNERS, GLOBAL, LOCAL, local_client=1)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0].startswith("(a)")
    assert titles[1].startswith("(b)")
    assert titles[2] == "(c) global densities\n2 of 45 false, 1 of 15 missing"
    assert titles[3] == "(d) densities of client 1\n30 of 45 false, 0 of 15 missing"


def test_without_local_decisions_there_are_three_panels():
    figure = representations_figure(PLACES, OWNERS, GLOBAL)
    assert len(figure.axes) == 3


def test_clients_have_their_own_look_and_anomalies_are_red():
    axes = representations_figure(PLACES, OWNERS, GLOBAL).axes[0]
    same(points(axes), PLACES)
    same(points(axes, RED), PLACES[OWNERS < 0])
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "client 0",
        "client 1",
        "client 4",
        "anomaly",
    ]


def test_false_detections_are_red_and_missing_ones_black():
    axes = representations_figure(PLACES, OWNERS, GLOBAL).axes[2]
    same(points(axes), PLACES)
    same(points(axes, RED), PLACES[[3, 20]])
    same(points(axes, BLACK), PLACES[[50]])


def test_contours_lie_around_the_images_of_their_client():
    axes = representations_figure(PLACES, OWNERS, GLOBAL).axes[1]
    lines = [c for c in axes.collections if isinstance(c, ContourSet) and not c.filled]
    assert len(lines) == 3
    for client, contour in zip((0, 1, 4), lines, strict=True):
        own = PLACES[client == OWNERS]
        vertices = [path.vertices for path in contour.get_paths()]
        for line in vertices:  # as symmetrical as the lattice of places
            np.testing.assert_allclose((line.max(axis=0) + line.min(axis=0)) / 2, own.mean(axis=0), atol=1e-6)
        widths = np.array([np.ptp(line, axis=0) for line in vertices])
        assert (np.diff(widths, axis=0) < 0).all()  # the higher the density, the narrower
        assert (widths[0] > np.ptp(own, axis=0)).all()
        assert (widths[-1] < np.ptp(own, axis=0)).all()


@pytest.mark.slow
def test_a_client_of_two_images_has_no_density():
    owners = OWNERS.copy()
    owners[:2] = 7
    axes = representations_figure(PLACES, owners, GLOBAL).axes[1]
    assert sum(isinstance(c, ContourSet) and not c.filled for c in axes.collections) == 3


def test_normal_images_alone_can_be_drawn():
    figure = representations_figure(PLACES, np.abs(OWNERS), GLOBAL)
    assert figure.axes[2].get_title().endswith("16 of 60 false, 0 of 0 missing")
    assert "anomaly" not in [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_all_panels_are_square_and_hold_every_image():
    figure = representations_figure(PLACES, OWNERS, GLOBAL, LOCAL)
    for axes in figure.axes:
        (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
        assert right - left == pytest.approx(high - low, rel=1e-5)
        assert ((left, low) < PLACES).all()
        assert ((right, high) > PLACES).all()


@pytest.mark.slow
def test_ten_clients_can_be_told_apart_on_one_page():
    figure = representations_figure(PLACES, np.arange(60) % 11 - 1, GLOBAL, LOCAL)
    legend = figure.axes[0].get_legend()
    assert len({(line.get_color(), line.get_marker()) for line in legend.get_lines()}) == 11
    for artist in (legend, *figure.legends, *(axes.title for axes in figure.axes)):
        box = artist.get_window_extent()
        assert min(box.x0, box.y0) >= -1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y1 <= figure.bbox.y1 + 1
