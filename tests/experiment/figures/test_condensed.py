"""The pictures of a run whose clients share images."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from PIL import Image

from lit_fedad.core.config import compose
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import LabelledDataset, LabelledSet
from lit_fedad.experiment.figures import condensed as knowledge_gallery
from lit_fedad.experiment.figures.condensed import draw_condensed
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.train import train

CLASSES = ("north", "east", "south")


def pictures(number, channels, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (number, channels, 8, 8), generator=draw, dtype=torch.uint8)


@pytest.fixture
def scene():
    """A federation of two clients whose features are the images, its data, and what the plane is drawn from."""

    def make(shared, channels, tests=60):
        labels = torch.arange(tests) % 3
        images = LabelledSet(
            "compass", CLASSES, pictures(4, channels, 0), torch.zeros(4, dtype=torch.int64),
            pictures(tests, channels, 1), labels, mean=(0.25,), std=(0.5,),
        )  # fmt: skip
        train, test = (
            LabelledDataset(*part, images.mean, images.std)
            for part in ((images.train_images, images.train_labels), (images.test_images, labels))
        )
        module = FederatedDataModule(train, test, [[0, 1], [2, 3]], eval_batch_size=7)
        asked = []

        def ask(round, question, clients):
            asked.append((round, clients))
            client = SimpleNamespace(task=lambda batch: batch["image"])
            return {clients[0]: question(client, clients[0])}

        server = SimpleNamespace(images_by_round=lambda: shared)
        federation = SimpleNamespace(server=server, ask=ask, rounds=2, clients=[0, 1])
        return federation, SimpleNamespace(images=images, module=module), asked

    return make


@pytest.fixture
def embedded(monkeypatch):
    """Features that were to be laid out, and what was drawn of them; two of them stand for the plane."""
    seen = {}
    plane = knowledge_gallery.knowledge_plane
    monkeypatch.setattr(knowledge_gallery, "tsne_layout", lambda z: seen.setdefault("features", z)[:, :2])
    monkeypatch.setattr(
        knowledge_gallery, "knowledge_plane", lambda *given: plane(*seen.setdefault("plane", given))
    )
    return seen


@pytest.mark.parametrize("channels", [1, 3])
def test_condensed_and_test_images_are_seen_as_in_training(scene, embedded, tmp_path, channels):
    """One round, and a class of which nobody sent an image."""
    shared = {3: (pictures(20, channels, 2), torch.tensor([0, 2] * 10))}
    federation, data, asked = scene(shared, channels)
    draw_condensed(federation, data, Fabric(accelerator="cpu"), tmp_path)
    assert asked == [(2, [0])]
    _, labels, condensed, classes = embedded["plane"]
    assert classes == CLASSES
    assert condensed.tolist() == [True] * 20 + [False] * 60
    np.testing.assert_array_equal(labels.bincount(), [10 + 20, 20, 10 + 20])
    expected = (shared[3][0].flatten(1) / 255 - 0.25) / 0.5
    torch.testing.assert_close(embedded["features"][:20], expected)
    expected = (data.images.test_images.flatten(1) / 255 - 0.25) / 0.5
    torch.testing.assert_close(embedded["features"][20:], expected)
    for name in ("knowledge", "knowledge_tsne"):
        assert np.asarray(Image.open(tmp_path / "figures" / f"{name}.png")).std() > 1


def test_no_more_images_than_a_plane_holds(scene, embedded, tmp_path):
    shared = {r: (pictures(200, 1, r), torch.arange(200) % 2) for r in (1, 2)}
    draw_condensed(*scene(shared, 1, tests=300)[:2], Fabric(accelerator="cpu"), tmp_path)
    condensed = embedded["plane"][2]
    assert (int(condensed.sum()), int((~condensed).sum())) == (80, 120)
    # From both rounds.
    first = (shared[1][0].flatten(1) / 255 - 0.25) / 0.5
    known = (embedded["features"][:80, None] - first).abs().amax(-1).amin(1) < 1e-5
    assert 30 <= int(known.sum()) <= 50


def test_where_nothing_was_shared_nothing_is_drawn(scene, tmp_path):
    federation, data, asked = scene({}, 1)
    draw_condensed(federation, data, Fabric(accelerator="cpu"), tmp_path)
    assert asked == []
    assert not (tmp_path / "figures").exists()


@pytest.mark.slow
def test_a_run_leaves_its_knowledge(tmp_path):
    overrides = [
        "method=fedvck", "tracking=off", "rounds=1", f"out={tmp_path / 'run'}", "data.train_per_class=20",
        "data.test_per_class=4", "data.size=16", "image.size=16", "partition.clients=2", "encoder.channels=4",
        "method.client.condensation.steps=1", "method.client.condensation.batch=4", "method.server.training.epochs=1",
    ]  # fmt: skip
    train(compose(overrides), quiet=True)
    figures = {path.stem for path in (RunFolder(tmp_path / "run").path / "figures").iterdir()}
    assert {"knowledge", "knowledge_tsne", "communication"} <= figures
