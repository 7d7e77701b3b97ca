"""STL-10 as distributed: small binary files of the official form."""

import hashlib

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from torchvision.transforms.v2.functional import InterpolationMode, resize

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.class_sets import STL10_CLASSES, LabelledSTL10, class_set

LABELS = {"train": [3, 1, 10, 1], "test": [2, 3]}


def pixels(part: str) -> np.ndarray:
    count = len(LABELS[part])
    return np.random.default_rng(count).integers(0, 256, (count, 3, 96, 96), dtype=np.uint8)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Labels count from 1, images lie column by column; there is no file of unlabelled images."""
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    for part, labels in LABELS.items():
        contents = {"X": pixels(part).transpose(0, 1, 3, 2).tobytes(), "y": bytes(labels)}
        for kind, content in contents.items():
            (folder / f"{part}_{kind}.bin").write_bytes(content)
        listed = [
            [f"{part}_{kind}.bin", hashlib.md5(content).hexdigest()] for kind, content in contents.items()
        ]
        monkeypatch.setattr(LabelledSTL10, f"{part}_list", listed)
    return tmp_path


def test_files_are_read_and_scaled(root):
    images = build(compose(["data=stl10", f"data.root={root}"])["data"])
    assert (images.name, images.classes) == ("stl10", STL10_CLASSES)
    assert images.train_labels.tolist() == [2, 0, 9, 0]
    assert images.test_labels.tolist() == [1, 2]
    for part, scaled in (("train", images.train_images), ("test", images.test_images)):
        assert scaled.shape == (len(LABELS[part]), 3, 32, 32)
        expected = resize(
            torch.from_numpy(pixels(part)), [32, 32], InterpolationMode.BILINEAR, antialias=True
        )
        assert torch.equal(scaled, expected)
    assert (images.mean, images.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_subsets_at_the_original_size(root):
    images = class_set(root, "stl10", size=96, train_per_class=1)
    assert images.train_labels.tolist() in ([2, 0, 9], [2, 9, 0])
    assert np.array_equal(images.test_images.numpy(), pixels("test"))


@pytest.mark.parametrize("name", ["train_X", "test_X", "train_y"])
def test_missing_and_damaged_files_are_one_line(root, name):
    file = root / "stl10_binary" / f"{name}.bin"
    file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):
        with refusal("stl10_binary: is missing or damaged; unpack http"):
            class_set(root, "stl10")
        file.unlink(missing_ok=True)
