import itertools

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import PolyCollection
from PIL import Image

from lit_fedad.core.files import atomic
from lit_fedad.report.figures import curves_figure, partition_figure, save_figure, stages_figure
from lit_fedad.report.style import blank_figure

PRODUCTS = ["bottle", "screw", "tile", "brain"]
COUNTS = np.array([[10, 0, 30, 5], [1, 2, 3, 4], [80, 0, 0, 0], [7, 7, 7, 7], [0, 0, 19, 1]])


def legend_texts(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def inside(figure, artist):
    """Whether the artist lies on the page, to within a pixel."""
    box, page = artist.get_window_extent(), figure.bbox
    return box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1


def wedge_area(wedge):
    return np.deg2rad(wedge.theta2 - wedge.theta1) / 2 * wedge.r**2


def test_the_area_of_every_slice_is_proportional_to_its_count():
    figure = partition_figure(COUNTS, PRODUCTS)
    assert len(figure.axes) == 5
    per_image = [
        wedge_area(wedge) / count
        for axes, row in zip(figure.axes, COUNTS, strict=True)
        for wedge, count in zip(axes.patches, row[row > 0], strict=True)
    ]
    np.testing.assert_allclose(per_image, np.pi / COUNTS.sum(axis=1).max(), rtol=1e-5)


def test_all_pies_are_printed_at_one_scale():
    figure = partition_figure(COUNTS, PRODUCTS)
    figure.canvas.draw()
    units = [np.diff(axes.transData.transform([(0, 0), (1, 1)]), axis=0)[0] for axes in figure.axes]
    np.testing.assert_allclose(units, np.broadcast_to(units[0][0], (5, 2)), rtol=1e-6)


def test_a_product_has_one_colour_on_all_clients_and_in_the_legend():
    figure = partition_figure(COUNTS, PRODUCTS)
    in_legend = [patch.get_facecolor() for patch in figure.legends[0].get_patches()]
    for axes, row in zip(figure.axes, COUNTS, strict=True):
        assert [wedge.get_facecolor() for wedge in axes.patches] == [
            in_legend[p] for p in np.flatnonzero(row)
        ]
    assert legend_texts(figure) == PRODUCTS


def test_sizes_stand_beneath_and_an_empty_client_has_no_pie():
    figure = partition_figure(np.array([[1200, 34], [0, 0], [0, 1]]), ["a", "b"])
    texts = [axes.texts[-1].get_text() for axes in figure.axes]
    assert texts == ["client 0\n1,234 images", "client 1\n0 images", "client 2\n1 image"]
    assert [len(axes.patches) for axes in figure.axes] == [2, 0, 1]


def test_fourteen_products_look_different_from_each_other():
    figure = partition_figure(np.ones((5, 14), dtype=int), [f"product {i}" for i in range(14)])
    looks = {(patch.get_facecolor(), patch.get_hatch()) for patch in figure.legends[0].get_patches()}
    assert len(looks) == 14


def test_twelve_clients_are_pies_and_thirteen_are_bars():
    assert len(partition_figure(np.ones((12, 2)), ["a", "b"]).axes) == 12
    assert len(partition_figure(np.ones((13, 2)), ["a", "b"]).axes) == 1


def test_bars_stack_without_gaps_to_the_size_of_the_client():
    counts = np.random.default_rng(0).integers(0, 4, size=(20, 14))
    (axes,) = partition_figure(counts, [f"p{i}" for i in range(14)]).axes
    for client, row in enumerate(counts):
        spans = sorted(
            (bar.get_y(), bar.get_y() + bar.get_height())
            for bar in axes.patches
            if bar.get_x() < client < bar.get_x() + bar.get_width()
        )
        assert [high - low for low, high in spans] == [count for count in row if count]
        ends = [0, *(high for _, high in spans)]
        assert [low for low, _ in spans] == ends[:-1]
        assert ends[-1] == row.sum()


@pytest.mark.slow
@pytest.mark.parametrize(("clients", "products"), [(1, 1), (12, 14), (30, 14)])
def test_nothing_of_a_partition_is_cut_off(clients, products):
    figure = partition_figure(
        np.ones((clients, products), dtype=int), ["a product with a long name"] * products
    )
    figure.canvas.draw()
    texts = [text for axes in figure.axes for text in axes.texts]
    assert all(inside(figure, artist) for artist in [*figure.legends, *texts])


def test_products_that_would_look_alike_are_counted_instead_of_named():
    names = [f"product {number}" for number in range(29)]
    assert legend_texts(partition_figure(np.ones((1, 28), dtype=int), names[:28])) == names[:28]
    figure = partition_figure(np.ones((1, 29), dtype=int), names)
    assert not figure.legends
    assert figure.get_supxlabel() == "29 products or classes"


STAGES = [
    np.array([[3, 0, 5, 0], [0, 2, 0, 1]]),
    np.array([[0, 4, 0, 0]]),
    np.array([[1, 1, 1, 1], [0, 0, 6, 0]]),
]


def looks(patches):
    return [(patch.get_facecolor(), patch.get_hatch()) for patch in patches]


def rows(axes):
    """The spans (start, end, look) of every bar of a panel of tasks, by client and from left to right."""
    spans = {}
    for patch, look in zip(axes.patches, looks(axes.patches), strict=True):
        for corners in patch.get_path().to_polygons():
            (left, top), (right, bottom) = corners.min(axis=0), corners.max(axis=0)
            assert bottom - top == pytest.approx(0.85)
            spans.setdefault(round((top + bottom) / 2), []).append((left, right, look))
    return {client: sorted(own, key=lambda span: span[0]) for client, own in sorted(spans.items())}


def test_each_task_of_a_client_is_one_stack_of_its_classes():
    figure = stages_figure(STAGES, PRODUCTS)
    panels = figure.axes
    assert [axes.get_title() for axes in panels] == ["task 1", "task 2"]
    legend = looks(figure.legends[0].get_patches())
    assert legend_texts(figure) == PRODUCTS
    drawn = [rows(axes) for axes in panels]
    assert drawn[0] == {
        0: [(0, 3, legend[0]), (3, 8, legend[2])],
        1: [(0, 4, legend[1])],
        2: [(0, 1, legend[0]), (1, 2, legend[1]), (2, 3, legend[2]), (3, 4, legend[3])],
    }
    assert drawn[1] == {0: [(0, 2, legend[1]), (2, 3, legend[3])], 2: [(0, 6, legend[2])]}


def test_many_tasks_are_drawn_in_rows_that_do_not_overlap():
    figure = stages_figure([np.full((40, 1), 999)] * 3, ["some class"])
    figure.canvas.draw()
    assert [axes.get_subplotspec().rowspan.start for axes in figure.axes] == [i // 5 for i in range(40)]
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_all_tasks_are_drawn_at_one_scale_with_client_0_on_top():
    figure = stages_figure(STAGES, PRODUCTS)
    panels = figure.axes
    for axes in panels:
        assert axes.get_xlim() == panels[0].get_xlim()
        assert axes.get_xlim()[1] > 8
        assert axes.get_ylim() == pytest.approx((2.6, -0.6))
    figure.canvas.draw()
    np.testing.assert_allclose([axes.bbox.width for axes in panels], panels[0].bbox.width)


def test_more_than_twenty_classes_are_counted_instead_of_named():
    names = [f"class {i}" for i in range(21)]
    assert legend_texts(stages_figure([np.ones((1, 20), dtype=int)], names[:20])) == names[:20]
    figure = stages_figure([np.ones((1, 21), dtype=int)], names)
    assert not figure.legends
    assert figure.axes[0].get_xlabel() == "images of 21 classes"


@pytest.mark.parametrize(("clients", "tasks", "classes"), [(3, 3, 20), (100, 1, 30)])
@pytest.mark.slow
def test_nothing_of_the_tasks_is_cut_off(clients, tasks, classes):
    figure = stages_figure([np.full((tasks, classes), 999)] * clients, ["some class"] * classes)
    figure.canvas.draw()
    artists = [*figure.legends, *(axes.title for axes in figure.axes)]
    assert all(inside(figure, artist) for artist in artists)


def curves(figure):
    (axes,) = figure.axes
    return {line.get_label(): np.column_stack(line.get_data()).tolist() for line in axes.lines}


def test_each_client_has_its_curve_and_the_mean_leaves_out_who_was_absent_or_undefined():
    history = {7: [(0, 0.5), (1, 0.7), (2, 0.9)], 2: [(0, 0.7), (2, float("nan"))], 4: [(0, 0.6), (1, 0.8)]}
    lines = curves(curves_figure(history, "I-AUROC"))
    assert list(lines) == ["client 2", "client 4", "client 7", "mean over clients"]
    assert lines["client 7"] == [[0, 0.5], [1, 0.7], [2, 0.9]]
    np.testing.assert_allclose(lines["mean over clients"], [[0, 0.6], [1, 0.75], [2, 0.9]])


def test_the_mean_stands_out():
    (axes,) = curves_figure({0: [(1, 0.1)], 1: [(1, 0.2)]}, "loss").axes
    *clients, mean = axes.lines
    assert all(mean.get_linewidth() > line.get_linewidth() for line in clients)
    assert axes.get_ylabel() == "loss"
    assert axes.get_xlabel() == "round"


def test_a_single_client_has_no_mean():
    assert list(curves(curves_figure({0: [(1, 0.1), (2, 0.2)]}, "loss"))) == ["client 0"]


def test_eight_clients_are_told_apart():
    (axes,) = curves_figure({client: [(0, client), (1, client)] for client in range(8)}, "y").axes
    *clients, _ = axes.lines
    assert len({(line.get_color(), line.get_linestyle()) for line in clients}) == 8


def test_many_clients_become_grey_lines_a_band_and_a_mean():
    values = np.random.default_rng(1).random((30, 4))
    history = {client: list(enumerate(row)) for client, row in enumerate(values)}
    figure = curves_figure(history, "PRO")
    (axes,) = figure.axes
    *clients, mean = axes.lines
    assert len(clients) == 30
    assert len({line.get_color() for line in clients}) == 1
    np.testing.assert_allclose(mean.get_ydata(), values.mean(axis=0))
    (band,) = [artist for artist in axes.collections if isinstance(artist, PolyCollection)]
    vertices = band.get_paths()[0].vertices
    for number in range(4):
        heights = vertices[vertices[:, 0] == number, 1]
        assert heights.min() == pytest.approx(values[:, number].min())
        assert heights.max() == pytest.approx(values[:, number].max())
    assert legend_texts(figure) == ["one client", "lowest to highest", "mean over clients"]


@pytest.mark.parametrize("rounds", [1, 200])
def test_rounds_are_whole_numbers(rounds):
    figure = curves_figure({0: [(number, 0.5) for number in range(rounds)]}, "y")
    figure.canvas.draw()
    ticks = figure.axes[0].get_xticks()
    assert len(ticks) <= 10
    assert all(float(tick).is_integer() for tick in ticks)


def test_a_figure_is_saved_as_the_same_png_each_time(tmp_path):
    paths = [tmp_path / "new" / "a.png", tmp_path / "b.png"]
    for path in paths:
        assert save_figure(blank_figure(2.0, 1.5), path) == path
    assert Image.open(paths[0]).size == (400, 300)
    assert Image.open(paths[0]).format == "PNG"
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic(path) as part:
        part.write_bytes(b"half") / 0  # fails after the write
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_pyplot_and_its_global_state_stay_untouched(tmp_path):
    before, already = dict(matplotlib.rcParams), pyplot.get_fignums()
    figures = [
        partition_figure(COUNTS, PRODUCTS),
        stages_figure(STAGES, PRODUCTS),
        curves_figure({0: [(0, 1.0)]}, "y"),
    ]
    for figure in figures:
        save_figure(figure, tmp_path / "a.png")
    assert pyplot.get_fignums() == already
    assert dict(matplotlib.rcParams) == before
