"""MedMNIST's official files, in small: names, channels, classes, and how a missing one is fetched."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.refusals import refused

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.data.packed import MEDMNIST_CLASSES, medmnist
from lit_fedad.experiment.build import build_images

ROOT = os.environ.get("LIT_FEDAD_DATA")
GREY = sorted({*MEDMNIST_CLASSES} - {"pathmnist"})


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture
def written(tmp_path):
    """Writes a set's file: two images a class for training, one for testing."""

    def write(name: str, side: int = 28, classes: int | None = None) -> Path:
        count = len(MEDMNIST_CLASSES[name]) if classes is None else classes
        shape = (side, side, 3) if name == "pathmnist" else (side, side)
        arrays = {}
        for part, each in (("train", 2), ("val", 1), ("test", 1)):
            arrays[f"{part}_images"] = pixels(each * count, *shape)
            arrays[f"{part}_labels"] = np.repeat(np.arange(count, dtype=np.uint8), each)[:, None]
        np.savez(tmp_path / f"{name}{'' if side == 28 else f'_{side}'}.npz", **arrays)
        return tmp_path

    return write


@pytest.mark.parametrize("name", GREY)
def test_grey_sets_keep_one_channel(written, name):
    config = compose([f"data={name}", f"data.root={written(name)}"])
    images = build(config["data"])
    assert config["image"]["channels"] == 1
    assert (images.name, images.classes) == (name, MEDMNIST_CLASSES[name])
    assert images.train_images.shape == (2 * len(images.classes), 1, 28, 28)
    assert np.array_equal(images.test_images[:, 0].numpy(), pixels(len(images.classes), 28, 28))
    batch = LabelledDataset(images.test_images, images.test_labels, images.mean, images.std).__getitems__([0])
    assert np.allclose(batch["image"][0, 0].numpy(), images.test_images[0, 0].numpy() / 127.5 - 1)


def test_a_task_may_ask_for_colours(written):
    root = written("octmnist")
    images = build(compose(["data=octmnist", f"data.root={root}", "image.channels=3"])["data"])
    assert images.train_images.shape == (8, 3, 28, 28)
    assert (images.mean, images.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert torch.equal(images.train_images[:, 0], images.train_images[:, 2])


def test_path_is_coloured(written):
    config = compose(["data=pathmnist", f"data.root={written('pathmnist')}"])
    images = build(config["data"])
    assert config["image"]["channels"] == 3
    assert images.test_labels.tolist() == list(range(9))
    assert np.array_equal(images.test_images.permute(0, 2, 3, 1).numpy(), pixels(9, 28, 28, 3))
    refused("pathmnist.npz: images of key 'train_images' are coloured.*image.channels=3", medmnist,
            config["data"]["root"], "pathmnist", channels=1)  # fmt: skip


def test_other_sizes_lie_in_other_files(written):
    root = written("organcmnist", side=64)
    images = medmnist(root, "organcmnist", size=64, channels=1)
    assert images.test_images.shape == (11, 1, 64, 64)
    missing = re.escape(f"{root / 'organcmnist.npz'}: no such file; get it from https://medmnist.com")
    refused(missing, medmnist, root, "organcmnist")


def test_subsets_and_labels(written):
    root = written("organsmnist")
    images = medmnist(root, "organsmnist", train_per_class=1, seed=3)
    whole = medmnist(root, "organsmnist").subset(train_per_class=1, seed=3)
    assert images.train_labels.tolist() == list(range(11))
    assert torch.equal(images.train_images, whole.train_images)
    refused(
        "labels hold 2, but the 2 classes are 0 to 1",
        medmnist,
        written("pneumoniamnist", classes=3),
        "pneumoniamnist",
    )


def test_a_missing_file_is_fetched_by_the_sets_own_package(written, tmp_path, monkeypatch):
    calls = []

    def reader(**arguments):
        calls.append(arguments)
        written("octmnist", side=64)

    info = {"octmnist": {"python_class": "OCT"}}
    monkeypatch.setitem(sys.modules, "medmnist", SimpleNamespace(INFO=info, OCT=reader))
    for _ in range(2):  # the second time it is there
        images = medmnist(tmp_path, "octmnist", size=64, channels=1, download=True)
    assert images.classes == MEDMNIST_CLASSES["octmnist"]
    assert calls == [{"split": "test", "download": True, "size": 64, "root": str(tmp_path)}]


def test_fetching_fails_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "medmnist", None)  # as if it were not installed
    refused(
        r"octmnist.npz: fetching it takes a package, pip install 'lit-fedad\[medmnist\]'",
        medmnist,
        tmp_path,
        "octmnist",
        download=True,
    )

    def offline(**arguments):
        raise RuntimeError("Something went wrong\nwhen downloading!")

    info = {"octmnist": {"python_class": "OCT"}}
    monkeypatch.setitem(sys.modules, "medmnist", SimpleNamespace(INFO=info, OCT=offline))
    refused("octmnist.npz: cannot be fetched; get it from", medmnist, tmp_path, "octmnist", download=True)


def test_names_and_sizes_are_checked(tmp_path):
    for overrides in (["data.name=chestmnist"], ["data.size=32"]):
        with pytest.raises(UserError, match="must be one of"):
            build(compose(["data=pathmnist", f"data.root={tmp_path}", *overrides])["data"])


@pytest.mark.real_data
@pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder")
def test_real_grey_sets_keep_one_channel():
    root, overrides = Path(ROOT) / "medical", ["method=fedavg", "task=classifier_convnet", "image.size=28"]
    pneumonia = build_images(compose([*overrides, "data=pneumoniamnist", f"data.root={root}"]))
    assert pneumonia.train_images.shape == (3_882, 1, 28, 28)
    assert pneumonia.classes == ("normal", "pneumonia")
    assert pneumonia.test_labels.bincount().tolist() == [234, 390]
    packed = [f"data.root={root}", "data.train=mednist_32.npz", "image.channels=1"]
    mednist = build_images(compose([*overrides, "data=packed", *packed]))
    assert mednist.train_images.shape == (6_000, 1, 32, 32)
    assert (mednist.mean, mednist.std) == ((0.5,), (0.5,))
