"""The picture of images that clients of a run share."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from lit_fedad.core.config import compose
from lit_fedad.experiment.figures.condensed import CondensedImages, evenly, knowledge_sheet
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.train import train

SIDE = 14  # hence gaps of one pixel
CLASSES = ("north", "east", "south")


def part(labels, values, channels=1):
    """Images of one value each, of 0 .. 1 in 256 levels, with their labels."""
    values = np.rint(255 * np.asarray(values)).astype(np.uint8)
    return np.broadcast_to(values[:, None, None, None], (len(values), channels, SIDE, SIDE)), np.asarray(
        labels
    )


def sheet(figure):
    return figure.axes[0].images[0].get_array()


def labels_of(figure):
    axes = figure.axes[0]
    return [t.get_text() for t in axes.get_yticklabels()], [t.get_text() for t in axes.get_xticklabels()]


def test_grey_images_lie_in_the_row_of_their_class_and_the_column_of_their_round():
    shared = {2: part([0, 1, 1], [0.1, 0.2, 0.3]), 1: part([2, 0], [0.4, 0.5])}
    figure = knowledge_sheet(shared, CLASSES)
    assert labels_of(figure) == (["north", "east", "south"], ["round 1", "round 2"])
    # Two rounds have four places each: 4 * 14 pixels, three gaps between them, and three more between rounds.
    found = sheet(figure)
    assert found.shape == (3 * SIDE + 2, 2 * (4 * SIDE + 3) + 3, 3)
    rows = [row * (SIDE + 1) + 7 for row in range(3)]
    columns = [start + place * (SIDE + 1) + 7 for start in (0, 4 * SIDE + 6) for place in range(4)]
    expected = [
        [0.5] + [0.93] * 3 + [0.1] + [0.93] * 3,
        [0.93] * 4 + [0.2, 0.3, 0.93, 0.93],
        [0.4] + [0.93] * 7,
    ]
    for channel in range(3):
        np.testing.assert_allclose(found[np.ix_(rows, columns)][..., channel], expected, atol=1 / 500)


def test_colours_stay_as_they_are():
    images = np.zeros((1, 3, SIDE, SIDE), dtype=np.uint8)
    images[:, 1] = 153
    found = sheet(knowledge_sheet({1: (images, np.array([1]))}, CLASSES))
    np.testing.assert_allclose(found[SIDE + 5, 5], [0, 0.6, 0])


@pytest.mark.parametrize("tall", [SIDE // 2, 2 * SIDE])
def test_images_that_are_not_square_keep_their_shape(tall):
    images = np.full((2, 1, tall, SIDE), 51, dtype=np.uint8)
    found = sheet(knowledge_sheet({1: (images, np.array([0, 1]))}, CLASSES))
    assert found.shape == (3 * tall + 2, 4 * SIDE + 3, 3)
    np.testing.assert_allclose(found[: 2 * tall + 1, :SIDE][[0, tall - 1, tall + 1, 2 * tall]], 0.2)


def test_images_are_chosen_over_all_clients():
    shared = {1: part([0] * 100, np.linspace(0, 1, 100))}
    found = sheet(knowledge_sheet(shared, CLASSES))
    np.testing.assert_allclose(
        found[7, [7 + place * (SIDE + 1) for place in range(4)], 0], [0, 1 / 3, 2 / 3, 1], atol=1 / 500
    )


def test_of_many_rounds_and_classes_some_are_shown():
    shared = {round: part([0], [0.5]) for round in range(1, 101)}
    classes, rounds = labels_of(knowledge_sheet(shared, [f"class {number}" for number in range(100)]))
    assert len(classes) == 20
    assert (classes[0], classes[-1]) == ("class 0", "class 99")
    assert len(rounds) == 8
    assert (rounds[0], rounds[-1]) == ("round 1", "round 100")


def test_long_names_stay_on_the_page():
    figure = knowledge_sheet({1: part([0], [0.5])}, ["choroidal neovascularization", "drusen"])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in (*axes.get_yticklabels(), *axes.get_xticklabels())]
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.y1 for box in boxes) <= figure.bbox.y1


@pytest.mark.parametrize(
    ("count", "most", "chosen"), [(0, 4, []), (1, 4, [0]), (3, 8, [0, 1, 2]), (9, 3, [0, 4, 8])]
)
def test_evenly(count, most, chosen):
    assert evenly(count, most) == chosen


def run_of(folder, shared, first=True):
    """What the callback is handed after the last round."""
    server = SimpleNamespace(images_by_round=lambda: shared)
    return SimpleNamespace(
        config={"evaluation": {"pictures": 1}},
        fabric=SimpleNamespace(is_global_zero=first),
        federation=SimpleNamespace(server=server),
        local=SimpleNamespace(images=SimpleNamespace(categories=list(CLASSES))),
        folder=RunFolder(folder),
    )


def test_the_first_process_draws_what_was_shared(tmp_path):
    images, labels = torch.randint(256, (20, 1, 8, 8), dtype=torch.uint8), torch.tensor([0, 2] * 10)
    for first, shared in ((True, {}), (False, {3: (images, labels)})):
        CondensedImages().on_rounds_end(run_of(tmp_path, shared, first))
    assert not (tmp_path / "figures").exists()
    CondensedImages().on_rounds_end(run_of(tmp_path, {3: (images, labels)}))
    assert np.asarray(Image.open(tmp_path / "figures" / "knowledge.png")).std() > 1


@pytest.mark.slow
def test_a_run_leaves_its_knowledge(tmp_path):
    overrides = [
        "method=fedvck", "tracking=off", "rounds=1", f"out={tmp_path / 'run'}", "data.train_per_class=20",
        "data.test_per_class=4", "data.size=16", "image.size=16", "partition.clients=2", "encoder.channels=4",
        "method.client.condensation.steps=1", "method.client.condensation.batch=4", "method.server.training.epochs=1",
    ]  # fmt: skip
    train(compose(overrides), quiet=True)
    figures = {path.stem for path in (RunFolder(tmp_path / "run").path / "figures").iterdir()}
    assert {"knowledge", "communication"} <= figures
