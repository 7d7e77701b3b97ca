import numpy as np
import pytest

from lit_fedad.report.knowledge import class_colours, knowledge_plane

PLACES = np.random.default_rng(0).normal(size=(12, 2))
LABELS = np.arange(12) % 3
CONDENSED = np.arange(12) < 5


def test_colour_tells_the_class_and_mark_the_kind():
    figure = knowledge_plane(PLACES, LABELS, CONDENSED, ("a", "b", "c"))
    real, made = figure.axes[0].collections
    for points, chosen in ((real, ~CONDENSED), (made, CONDENSED)):
        np.testing.assert_allclose(points.get_offsets(), PLACES[chosen])
        np.testing.assert_allclose(points.get_facecolor()[:, :3], class_colours(3)[LABELS[chosen], :3])
    assert len(real.get_paths()[0]) != len(made.get_paths()[0])
    texts = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    assert texts == [["real test image (7)", "condensed image (5)"], ["a", "b", "c"]]


@pytest.mark.parametrize("number", [2, 7, 11, 20, 100])
def test_every_class_has_a_colour_of_its_own(number):
    colours = class_colours(number)
    assert colours.shape == (number, 4)
    assert len(np.unique(colours, axis=0)) == number


def test_many_classes_are_counted():
    figure = knowledge_plane(PLACES, LABELS, CONDENSED, [str(number) for number in range(21)])
    assert len(figure.legends) == 1
    assert figure.axes[0].get_xlabel() == "colours: 21 classes"


def test_long_names_stay_on_the_page():
    names = ["adipose", "debris", "cancer-associated stroma", "colorectal adenocarcinoma epithelium"]
    figure = knowledge_plane(PLACES, LABELS, CONDENSED, names)
    figure.draw_without_rendering()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1


def test_a_kind_without_images():
    figure = knowledge_plane(PLACES, LABELS, np.zeros(12, dtype=bool), ("a", "b", "c"))
    assert figure.legends[0].get_texts()[1].get_text() == "condensed image (0)"
