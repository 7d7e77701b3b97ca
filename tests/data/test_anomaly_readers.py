"""Sets that serve as anomalies: SVHN, Places365, folders of images, and packed files of test images alone."""

import hashlib

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from PIL import Image
from scipy.io import savemat
from torchvision.datasets import SVHN, Places365

from lit_fedad.data.class_sets import class_set, places365
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.packed import packed
from lit_fedad.data.public import image_folder
from lit_fedad.data.semantic import join


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """SVHN's two files with a few images, whose checksums torchvision accepts."""
    rng = np.random.default_rng(0)
    written = {}
    for split, labels in (("train", [1, 10, 2, 10]), ("test", [9, 10])):
        file = tmp_path / f"{split}_32x32.mat"
        written[split] = rng.integers(0, 256, (32, 32, 3, len(labels)), np.uint8)
        savemat(file, {"X": written[split], "y": np.array(labels, np.uint8)[:, None]})
        address = SVHN.split_list[split][0]
        monkeypatch.setitem(SVHN.split_list, split, [address, file.name, md5(file)])
    return tmp_path, written


def test_svhn_is_read(digits):
    root, written = digits
    images = class_set(root, "svhn")
    assert images.classes == tuple("0123456789")
    assert images.train_labels.tolist() == [1, 0, 2, 0]  # its files call the digit 0 ten
    assert images.test_labels.tolist() == [9, 0]
    for number in range(4):
        assert np.array_equal(
            images.train_images[number].permute(1, 2, 0).numpy(), written["train"][..., number]
        )
    assert sorted(class_set(root, "svhn", train_per_class=1).train_labels.tolist()) == [0, 1, 2]


def test_svhn_missing_or_damaged(digits, tmp_path):
    refused("none/train_32x32.mat: is missing or damaged; unpack http", class_set, tmp_path / "none", "svhn")
    with (digits[0] / "test_32x32.mat").open("ab") as file:
        file.write(b"x")
    refused("test_32x32.mat: is missing or damaged", class_set, digits[0], "svhn")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Places365's lists and pictures of one colour: six for validation, four for training."""
    lists = {
        "categories_places365.txt": "/b/beach 0\n/a/attic 1\n",
        "places365_val.txt": "".join(f"Places365_val_{i}.png {i % 2}\n" for i in range(6)),
        "places365_train_standard.txt": "".join(f"/a/attic/{i}.png 1\n" for i in range(4)),
    }
    sums = {}
    for name, content in lists.items():
        (tmp_path / name).write_text(content)
        sums[name] = md5(tmp_path / name)
    pictures = [tmp_path / f"val_256/Places365_val_{i}.png" for i in range(6)]
    pictures += [tmp_path / f"data_256_standard/a/attic/{i}.png" for i in range(4)]
    for i, path in enumerate(pictures):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (256, 256), (20 * i, 0, 255)).save(path)
    name = "categories_places365.txt"
    monkeypatch.setattr(Places365, "_CATEGORIES_META", (name, sums[name]))
    for split, name in (("val", "places365_val.txt"), ("train-standard", "places365_train_standard.txt")):
        monkeypatch.setitem(Places365._FILE_LIST_META, split, (name, sums[name]))
    return tmp_path


def test_places365_is_read_at_a_smaller_size(places):
    images = places365(places, size=8)
    assert images.classes == ("/b/beach", "/a/attic")  # by number, not by name
    assert images.test_labels.tolist() == [0, 1] * 3
    assert images.train_labels.tolist() == [1] * 4
    assert images.test_images[:, :, 4, 4].tolist() == [[20 * i, 0, 255] for i in range(6)]
    assert images.train_images[:, 0].flatten(1).unique(dim=1).flatten().tolist() == [120, 140, 160, 180]
    assert images.train_images.shape == (4, 3, 8, 8)


def test_places365_reads_only_what_is_drawn(places):
    drawn = places365(places, size=8, train_images=0, test_images=2, seed=5)
    assert len(drawn.train_images) == 0
    kept = {value // 20 for value in drawn.test_images[:, 0, 0, 0].tolist()}
    assert len(kept) == 2
    for i in set(range(6)) - kept:
        (places / f"val_256/Places365_val_{i}.png").unlink()
    assert torch.equal(
        places365(places, size=8, train_images=0, test_images=2, seed=5).test_images, drawn.test_images
    )
    refused("Places365_val_.*no such image file", places365, places, size=8)


def test_places365_without_its_training_part_is_only_tested_on(places):
    for path in sorted((places / "data_256_standard").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (places / "data_256_standard").rmdir()
    (places / "places365_train_standard.txt").unlink()
    images = places365(places, size=8)
    assert (len(images.train_images), len(images.train_labels), len(images.test_images)) == (0, 0, 6)


def test_places365_missing_or_damaged(places, tmp_path):
    refused(
        "categories_places365.txt or places365_val.txt is missing.*val_256.tar", places365, tmp_path / "x"
    )
    (places / "places365_train_standard.txt").write_text("changed")
    refused("places365_train_standard.txt is missing or damaged", places365, places)


def test_an_image_folder_is_a_class_of_its_own(tmp_path):
    for i, name in enumerate(("seen/a.png", "seen/b.png", "unseen/deep/c.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 20), (0, 90 * i, 0)).save(tmp_path / name)
    images = image_folder(tmp_path, test="unseen", train="seen", size=4, name="own")
    assert (images.name, images.classes) == ("own", ("own",))
    assert images.train_images[:, 1, 0, 0].tolist() == [0, 90]
    assert images.test_images[:, :, 0, 0].tolist() == [[0, 180, 0]]
    assert len(image_folder(tmp_path, test="unseen", train="seen", size=4, train_images=1).train) == 1
    assert len(image_folder(tmp_path, test="unseen").train) == 0
    assert image_folder(tmp_path, test="unseen").classes == (tmp_path.name,)
    refused("unseen: is given for training and for testing", image_folder, tmp_path, "unseen", "unseen")
    refused("none: no such folder", image_folder, tmp_path, "none")
    refused("test_images=-1: give 0 or more", image_folder, tmp_path, "unseen", test_images=-1)


@pytest.fixture
def alone(tmp_path):
    """A packed file of five test images; keyword arguments add keys."""

    def write(**keys):
        images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), np.uint8)
        np.savez(tmp_path / "ood.npz", images=images, **keys)
        return tmp_path, torch.from_numpy(images).permute(0, 3, 1, 2)

    return write


@pytest.mark.parametrize(
    ("keys", "classes", "labels"),
    [
        ({}, ("ood",), [0] * 5),
        ({"labels": np.array([0, 2, 1, 1, 0])}, ("0", "1", "2"), [0, 2, 1, 1, 0]),
        ({"labels": np.zeros(5, int), "classes": np.array(["cat", "dog"])}, ("cat", "dog"), [0] * 5),
    ],
)
def test_a_packed_file_may_be_for_testing_alone(alone, keys, classes, labels):
    root, expected = alone(**keys)
    images = packed(root, None, "ood.npz")
    assert (images.name, images.classes) == ("ood", classes)
    assert torch.equal(images.test_images, expected)
    assert images.test_labels.tolist() == labels
    assert (len(images.train_images), images.train) == (0, ())
    assert len(packed(root, None, "ood.npz", train_per_class=3, test_per_class=1).test) == len(set(labels))


def test_what_a_test_only_file_cannot_be(alone):
    root, _ = alone(labels=np.array([0, 1]))
    refused("'labels' is int64 .2.; give one whole number for each of 5", packed, root, None, "ood.npz")
    refused("neither train nor test names a file", packed, root, None)
    np.savez(root / "ood.npz", labels=np.zeros(3, int))
    refused("ood.npz: no key 'images' or 'jpeg', only labels; pack", packed, root, None, "ood.npz")
    alone()
    refused("ood.npz: no key 'labels'", packed, root, "ood.npz", "ood.npz")  # classes to learn need labels


def test_a_test_only_set_joins(alone):
    root, expected = alone()
    normal = LabelledSet("n", ("a",), expected, torch.zeros(5).long(), expected, torch.zeros(5).long())
    images = join(normal, {"ood": packed(root, None, "ood.npz")}, "toy")
    assert (len(images.train), images.test_labels.tolist()) == (5, [0] * 5 + [1] * 5)
