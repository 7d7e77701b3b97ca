import numpy as np
import pytest
from matplotlib.contour import ContourSet
from PIL import Image
from skimage.color import rgb2lab
from sklearn.metrics import roc_auc_score

from lit_fedad.report.heatmaps import Case, heatmap_sheet, pick_cases, robust_range
from lit_fedad.report.overlay import heat, overlay, save_heatmap


def case(seed=0, scale=1.0, mask="square", size=(16, 24), caption="bottle"):
    masks = {"none": None, "empty": np.zeros(size, np.uint8), "square": np.zeros(size, np.uint8)}
    masks["square"][4:9, 5:12] = 255
    draw = np.random.default_rng(seed)
    image = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
    return Case(image, masks[mask], scale * draw.random(size), caption)


def cells(figure):
    """The axes of the cells; the last axes is the colour bar."""
    return figure.axes[:-1]


def heads(figure):
    return [axes.get_title() for axes in cells(figure) if axes.get_title()]


def test_one_row_a_case_with_four_columns_and_a_colour_bar():
    cases = [case(seed=i, caption=f"case {i}") for i in range(3)]
    figure = heatmap_sheet(cases, "the title")
    assert heads(figure) == ["image", "mask", "anomaly map", "overlay"]
    assert len(cells(figure)) == 12
    assert figure.texts[0].get_text() == "the title"
    np.testing.assert_array_equal(cells(figure)[4].images[0].get_array(), cases[1].image)
    np.testing.assert_array_equal(cells(figure)[5].images[0].get_array(), cases[1].mask > 0)
    np.testing.assert_array_equal(cells(figure)[6].images[0].get_array(), cases[1].anomaly_map)
    assert [axes.texts[0].get_text() for axes in cells(figure)[::4]] == ["case 0", "case 1", "case 2"]


def test_all_maps_and_overlays_share_the_scale_of_the_colour_bar():
    cases = [case(0, 1.0), case(1, 10.0), case(2, 0.1)]
    figure = heatmap_sheet(cases, "")
    low, high = np.percentile(np.stack([c.anomaly_map for c in cases]), [2, 99.5])
    for row in range(3):
        assert cells(figure)[4 * row + 2].images[0].get_clim() == pytest.approx((low, high))
        shown = cells(figure)[4 * row + 3].images[0].get_array()
        np.testing.assert_array_equal(shown, overlay(cases[row].image, cases[row].anomaly_map, low, high))
    figure.canvas.draw()
    assert figure.axes[-1].get_ylim() == pytest.approx((low, high))
    assert figure.axes[-1].get_ylabel() == "anomaly score"


def test_without_any_mask_the_mask_column_is_left_out():
    figure = heatmap_sheet([case(mask="none"), case(mask="none")], "")
    assert heads(figure) == ["image", "anomaly map", "overlay"]
    assert len(cells(figure)) == 6
    narrow, wide = figure.get_figwidth(), heatmap_sheet([case()], "").get_figwidth()
    assert narrow < wide


def test_a_missing_mask_among_others_is_named():
    figure = heatmap_sheet([case(), case(mask="none")], "")
    assert [text.get_text() for text in cells(figure)[5].texts] == ["no mask"]
    assert not cells(figure)[5].images


def outlines(figure):
    return [[a for a in axes.collections if isinstance(a, ContourSet)] for axes in cells(figure)[3::4]]


def test_the_overlay_carries_the_outline_of_a_mask_that_has_one():
    one, none, empty = outlines(heatmap_sheet([case(), case(mask="none"), case(mask="empty")], ""))
    assert none == []
    assert empty == []
    vertices = np.concatenate([path.vertices for path in one[0].get_paths()])
    np.testing.assert_allclose(vertices.min(axis=0), [4.5, 3.5])  # half a pixel outside the square
    np.testing.assert_allclose(vertices.max(axis=0), [11.5, 8.5])


@pytest.mark.parametrize("size", [(16, 24), (32, 16)])
def test_cells_have_the_shape_of_the_images_and_lie_on_the_page_apart(size):
    figure = heatmap_sheet([case(size=size), case(size=size)], "title")
    boxes = [axes.get_position() for axes in figure.axes]
    width, height = figure.get_size_inches()
    for box in boxes[:-1]:
        assert box.height * height / (box.width * width) == pytest.approx(size[0] / size[1])
    assert all(0 <= box.x0 < box.x1 <= 1 and 0 <= box.y0 < box.y1 <= 1 for box in boxes)
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_overlay_mixes_grey_and_heat_by_the_score():
    image = np.array([[[255, 0, 0], [0, 255, 0], [10, 20, 30]]], dtype=np.uint8)
    shown = overlay(image, np.array([[1.0, 3.0, 2.0]]), vmin=1.0, vmax=3.0)
    grey = image.astype(float) @ [0.299, 0.587, 0.114]
    assert shown.dtype == np.uint8
    assert shown[0, 0].tolist() == [round(grey[0, 0])] * 3  # lowest score: the image alone
    for pixel, strength in ((1, 1.0), (2, 0.5)):
        expected = (1 - 0.8 * strength) * grey[0, pixel] + 0.8 * strength * heat(np.array(strength))
        np.testing.assert_allclose(shown[0, pixel], expected, atol=0.51)


def test_the_colours_of_scores_rise_in_lightness_in_even_steps():
    colours = heat(np.linspace(0, 1, 65))
    steps = np.diff(rgb2lab(colours[None] / 255)[0, :, 0])
    assert steps.min() > 0.6 * steps.mean()
    assert steps.max() < 1.4 * steps.mean()


def test_overlay_clips_and_leaves_undefined_scores_transparent():
    image = np.full((1, 4, 3), 90, dtype=np.uint8)
    low, high, top, undefined = overlay(image, np.array([[-5.0, 99.0, 1.0, np.nan]]), 0.0, 1.0)[0].tolist()
    assert low == undefined == [90, 90, 90]
    assert high == top != low


def test_overlay_of_a_flat_map_is_the_image():
    image = np.full((2, 2, 3), 90, dtype=np.uint8)
    np.testing.assert_array_equal(overlay(image, np.ones((2, 2)), 1.0, 1.0), image)


def test_a_saved_heatmap_is_the_overlay_pixel_for_pixel(tmp_path):
    one = case()
    path = save_heatmap(tmp_path / "maps" / "000.png", one.image, one.anomaly_map, 0.2, 0.9, "p = 0.0123")
    found, expected = np.asarray(Image.open(path)), overlay(one.image, one.anomaly_map, 0.2, 0.9)
    height, width, _ = expected.shape
    np.testing.assert_array_equal(found[:height], expected)
    assert found.shape[1] == width
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("side", [32, 512])
def test_the_caption_lies_within_the_strip_below(side, tmp_path):
    image, flat = np.zeros((side, side, 3), np.uint8), np.zeros((side, side))
    path = save_heatmap(tmp_path / "a.png", image, flat, 1.0, 2.0, "p = 0.00123")
    strip = np.asarray(Image.open(path).convert("L"))[side:]
    assert strip.min() < 128  # ink, and none at the borders
    assert {*strip[0], *strip[-1], *strip[:, 0], *strip[:, -1]} == {255}


def test_a_few_extreme_or_undefined_pixels_do_not_move_the_range():
    maps = [np.random.default_rng(seed).random((50, 50)) for seed in range(4)]
    clean = robust_range(maps)
    maps[0][0, :3] = [1e6, np.inf, np.nan]
    assert robust_range(maps) == pytest.approx(clean, abs=2e-3)
    assert robust_range([np.full((2, 2), np.nan)]) == (0.0, 1.0)


def own_auroc(index, scores, labels):
    """AUROC of one image against all images of the other class, by scikit-learn."""
    chosen = [index, *np.flatnonzero(labels != labels[index])]
    return roc_auc_score(labels[chosen], scores[chosen])


def test_cases_are_picked_by_their_part_of_the_auroc():
    labels = np.repeat([0, 1], [25, 35])
    scores = np.round(np.random.default_rng(0).normal(labels * 1.0, 1.0), 1)  # rounded: with ties
    parts = np.array([own_auroc(index, scores, labels) for index in range(60)])
    picked = pick_cases(scores, labels, best=30, worst=30)
    assert sorted(picked) == list(range(60))
    assert np.all(np.diff(parts[picked[:30]]) <= 1e-12)
    assert np.all(np.diff(parts[picked[30:]]) >= -1e-12)
    assert parts[picked[:30]].min() >= parts[picked[30:]].max() - 1e-12


def test_equal_ranks_are_told_apart_by_the_distance():
    scores, labels = [0.0, 0.1, 0.2, 0.8, 1.5, 0.9], [0, 0, 0, 1, 1, 1]
    # All are ordered correctly; the medians of the classes are 0.1 and 0.9.
    assert pick_cases(scores, labels, best=2, worst=2) == [4, 0, 2, 3]


@pytest.mark.parametrize("seed", range(20))
def test_images_are_ordered_by_rank_then_distance_then_number(seed):
    draw = np.random.default_rng(seed)
    scores, labels = draw.integers(0, 4, 9) / 4, draw.permutation([0, 1] * 4 + [seed % 2])  # with ties

    def key(index):
        sign = 1 if labels[index] else -1
        gaps = sign * (scores[index] - scores[labels != labels[index]])
        return (-((gaps > 0) + 0.5 * (gaps == 0)).mean(), -np.median(gaps), index)

    assert pick_cases(scores, labels, best=9, worst=0) == sorted(range(9), key=key)


def test_the_worst_are_those_on_the_wrong_side():
    scores, labels = [0.1, 0.2, 0.95, 0.3, 0.05, 0.9], [0, 0, 0, 1, 1, 1]
    assert pick_cases(scores, labels, best=0, worst=2) == [2, 4]


def test_no_case_is_picked_twice_nor_without_a_score():
    assert pick_cases([0.1, np.nan, 0.2, 0.9], [0, 0, 0, 1], best=1, worst=5) == [0, 2, 3]
    assert pick_cases([], [], best=2, worst=2) == []


def test_with_one_class_the_score_decides():
    assert pick_cases([0.3, 0.1, 0.2], [0, 0, 0], best=1, worst=1) == [1, 0]
    assert pick_cases([0.3, 0.1, 0.2], [1, 1, 1], best=1, worst=1) == [0, 1]
