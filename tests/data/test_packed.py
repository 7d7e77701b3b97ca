"""Packed sets in their three forms, and every way in which a file can be wrong."""

import io
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.images import encoded
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.labelled import LabelledDataset, LabelledSet
from lit_fedad.data.packed import packed
from lit_fedad.data.semantic import join
from lit_fedad.data.strategies import Dirichlet

ROOT = os.environ.get("LIT_FEDAD_DATA")


def pixels(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.fixture
def plain(tmp_path):
    """Writes ``train.npz`` and ``test.npz`` of plain colour images; None takes a key out."""

    def write(train=None, test=None):
        parts = {"train": (6, [0, 1, 2, 0, 1, 2], train), "test": (3, [2, 1, 0], test)}
        for part, (count, labels, changes) in parts.items():
            keys = {"images": pixels(count, 5, 4, 3), "labels": np.array(labels), **(changes or {})}
            np.savez(tmp_path / f"{part}.npz", **{k: v for k, v in keys.items() if v is not None})
        return tmp_path

    return write


def refused(match: str, *args, **kwargs) -> None:
    with refusal(match) as caught:
        packed(*args, **kwargs)
    assert ".npz" in str(caught.value)


def test_plain_colour_arrays(plain):
    root = plain()
    images = packed(root, "train.npz", "test.npz")
    assert images.name == "train"
    assert images.classes == ("0", "1", "2")
    assert np.array_equal(images.train_images.numpy(), pixels(6, 5, 4, 3).transpose(0, 3, 1, 2))
    assert images.test_labels.tolist() == [2, 1, 0]
    assert images.test_labels.dtype == torch.int64


def test_grey_becomes_three_equal_channels(plain):
    grey = pixels(6, 5, 4)
    images = packed(plain({"images": grey}), "train.npz", "test.npz")
    assert images.train_images.shape == (6, 3, 5, 4)
    for channel in range(3):
        assert np.array_equal(images.train_images[:, channel].numpy(), grey)
    batch = LabelledDataset(images.train_images, images.train_labels).__getitems__([4])
    assert np.allclose(batch["image"][0, 2].numpy(), grey[4] / 127.5 - 1)


def test_grey_keeps_one_channel_where_one_is_asked_for(plain, tmp_path):
    grey, test = pixels(6, 5, 4), pixels(3, 5, 4)
    images = packed(plain({"images": grey}, {"images": test}), "train.npz", "test.npz", channels=1)
    assert np.array_equal(images.train_images[:, 0].numpy(), grey)
    assert images.test_images.shape == (3, 1, 5, 4)
    assert (images.mean, images.std) == ((0.5,), (0.5,))
    np.savez(tmp_path / "jpeg.npz", **encoded(grey), labels=np.zeros(6, int))
    images = packed(tmp_path, "jpeg.npz", "test.npz", channels=1)
    assert np.array_equal(images.train_images[:, 0].numpy(), grey)


def test_colours_are_refused_where_one_channel_is_asked_for(plain, tmp_path):
    message = "coloured, and one channel is asked for; give image.channels=3"
    refused(f"train.npz: images of key 'images' are {message}", plain(), "train.npz", "test.npz", channels=1)
    files = [encoded(pixels(1, 5, 4)), encoded(pixels(1, 5, 4, 3))]
    both = np.concatenate([file["jpeg"] for file in files])
    offsets = np.array([0, files[0]["offsets"][1], len(both)])
    np.savez(tmp_path / "a.npz", jpeg=both, offsets=offsets, labels=np.zeros(2, int))
    refused(f"a.npz: image 1 of key 'jpeg' is {message}", tmp_path, "a.npz", "a.npz", channels=1)


def test_classes_may_be_named_from_outside(plain):
    root = plain()
    assert packed(root, "train.npz", "test.npz", classes=["a", "b", "c", "d"]).classes == ("a", "b", "c", "d")
    refused("labels hold 2, but the 2 classes are", root, "train.npz", "test.npz", classes=["a", "b"])
    named = plain({"classes": np.array(["x", "y", "z"])})
    assert packed(named, "train.npz", "test.npz", classes=["a", "b", "c"]).classes == ("x", "y", "z")


def test_a_label_of_no_class_makes_no_name_for_each_number_below_it(plain):
    root = plain({"labels": np.array([0, 1, 2, 0, 1, 10**9])})
    refused("labels without 'classes' go up to 1000000000", root, "train.npz", "test.npz")
    refused("labels hold 1000000000, but the 3 classes", root, "train.npz", "test.npz", classes=list("abc"))


def test_labels_that_begin_at_zero_or_have_names_are_not_told_of(plain, recwarn):
    packed(plain(), "train.npz", "test.npz")
    root = plain({"labels": np.ones(6, np.int64)}, {"labels": np.array([2, 1, 1])})
    assert packed(root, "train.npz", "test.npz", classes=["a", "b", "c"]).classes == ("a", "b", "c")
    assert not len(recwarn)


def test_labels_that_do_not_begin_at_zero_are_told(plain):
    root = plain({"labels": np.array([1, 2, 3, 1, 2, 3])}, {"labels": np.array([3, 2, 1])})
    with pytest.warns(
        UserWarning, match=r"train\.npz: no image has label 0, .*; if yours begin with 1, subtract 1"
    ):
        packed(root, "train.npz", "test.npz")


def test_encoded_images(tmp_path):
    colour, grey = pixels(5, 8, 7, 3), pixels(3, 8, 7)
    labels = np.array([1, 0, 1, 1, 0], np.int16)
    np.savez(tmp_path / "a.npz", **encoded(colour), labels=labels, classes=np.array(["cat", "dog"]))
    np.savez(tmp_path / "b.npz", **encoded(grey), labels=labels[:3])
    images = packed(tmp_path, "a.npz", "b.npz", name="pets")
    assert images.name == "pets"
    assert images.classes == ("cat", "dog")
    assert np.array_equal(images.train_images.numpy(), colour.transpose(0, 3, 1, 2))
    assert np.array_equal(images.test_images[:, 1].numpy(), grey)
    assert images.train_labels.tolist() == labels.tolist()


@pytest.mark.parametrize("channels", [1, 3])
def test_encoded_images_of_sixteen_bits_are_scaled_to_eight(tmp_path, channels):
    deep = np.array([[[0, 257, 32896, 65535]]], np.uint16)
    np.savez(tmp_path / "a.npz", **encoded(deep), labels=np.zeros(1, int))
    images = packed(tmp_path, "a.npz", "a.npz", channels=channels)
    assert images.train_images[0].tolist() == [[[0, 1, 128, 255]]] * channels


def test_encoded_images_are_turned_and_lie_on_white_as_files_do(tmp_path):
    clear = np.zeros((1, 2, 3, 4), np.uint8)
    np.savez(tmp_path / "clear.npz", **encoded(np.concatenate([clear, clear + 255])), labels=np.zeros(2, int))
    refused("image 0 of key 'jpeg' cannot be decoded", tmp_path, "clear.npz", "clear.npz")
    clear[0, 0, 0, 3] = 255
    exif = Image.Exif()
    exif[274] = 6
    np.savez(tmp_path / "turned.npz", **encoded(clear, exif=exif), labels=np.zeros(1, int))
    image = packed(tmp_path, "turned.npz", "turned.npz").train_images[0, 0]
    assert image.tolist() == [[255, 0], [255, 255], [255, 255]]


def test_jpeg_bytes_come_out_as_pillow_decodes_them(tmp_path):
    smooth = np.linspace(0, 255, 16 * 16 * 3).reshape(1, 16, 16, 3).astype(np.uint8)
    part = encoded(smooth, "JPEG", quality=95)
    np.savez(tmp_path / "a.npz", **part, labels=np.zeros(1, int))
    images = packed(tmp_path, "a.npz", "a.npz")
    expected = np.array(Image.open(io.BytesIO(part["jpeg"].tobytes())))
    assert np.array_equal(images.train_images[0].permute(1, 2, 0).numpy(), expected)
    assert np.abs(expected.astype(int) - smooth[0]).mean() < 8


def test_medmnist_keys(tmp_path):
    np.savez(
        tmp_path / "med.npz",
        train_images=pixels(4, 6, 6),
        train_labels=np.array([[0], [1], [1], [0]], np.uint8),
        val_images=pixels(9, 6, 6),
        test_images=pixels(2, 6, 6, seed=1),
        test_labels=np.array([[1], [1]], np.uint8),
    )
    images = packed(tmp_path, "med.npz")
    assert images.train_labels.tolist() == [0, 1, 1, 0]
    assert images.test_labels.tolist() == [1, 1]
    assert np.array_equal(images.test_images[:, 0].numpy(), pixels(2, 6, 6, seed=1))
    assert images.classes == ("0", "1")


def test_subset_and_configuration(plain):
    root = plain()
    overrides = (f"data.root={root}", "data.train=train.npz", "data.test=test.npz")
    config = compose(["data=packed", *overrides, "data.train_per_class=1", "data.seed=4"])
    images = build(config["data"])
    assert sorted(images.train_labels.tolist()) == [0, 1, 2]
    expected = packed(root, "train.npz", "test.npz").subset(train_per_class=1, seed=4)
    assert torch.equal(images.train_images, expected.train_images)
    assert (list(images.mean), list(images.std)) == ([0.5] * 3, [0.5] * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "test.npz: no key 'images' or 'jpeg', only labels; leave test out"),
        ({"labels": None}, "test.npz: no key 'labels', only images"),
        ({"labels": np.array([0, 1])}, "'labels' is int64 [2]; give one whole number for each of 3 images"),
        ({"labels": np.zeros((3, 14), int)}, "'labels' is int64 [3, 14]"),
        ({"labels": np.array([0.0, 1.0, 2.0])}, "'labels' is float64 [3]"),
        ({"labels": np.array([0, -1, 2])}, "test.npz: labels hold -1, but the 3 classes are 0 to 2"),
        ({"labels": np.array([0, 1, "x"], object)}, "test.npz: key 'labels' is damaged"),
        ({"images": pixels(3, 5, 4, 3).astype(float)}, "'images' is float64 [3, 5, 4, 3]; give uint8"),
        ({"images": pixels(3, 5, 4, 2)}, "'images' is uint8 [3, 5, 4, 2]; give uint8"),
        ({"images": pixels(3, 5)}, "'images' is uint8 [3, 5]; give uint8"),
        ({"images": pixels(0, 5, 4, 3), "labels": np.zeros(0, int)}, "'images' is uint8 [0, 5, 4, 3]"),
        ({"images": pixels(3, 5, 5, 3)}, "test.npz: test images are 5x5 pixels, training images 4x5"),
        ({"classes": np.array("cat")}, "'classes' is <U3 []; give a list of names"),
        ({"classes": np.array(["a", "b"])}, "labels hold 2, but the 2 classes are 0 to 1"),
    ],
)  # fmt: skip
def test_wrong_plain_keys_are_named(plain, changes, message):
    refused(re.escape(message), plain(test=changes), "train.npz", "test.npz")


def test_parts_must_name_the_same_classes(plain):
    root = plain({"classes": np.array(list("abc"))}, {"classes": np.array(list("abd"))})
    refused("test.npz: key 'classes' differs from that of .*train.npz", root, "train.npz", "test.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": None}, "a.npz: no key 'offsets', only jpeg, labels"),
        ({"offsets": np.array([0, 10**6, 10**6, 10**6])}, "key 'offsets' is no rising list of places in"),
        ({"offsets": np.array([0, 60, 30, 90])}, "key 'offsets' is no rising list"),
        ({"offsets": np.array([-5, 30, 60, 90])}, "key 'offsets' is no rising list"),
        ({"offsets": np.array([0.0, 30.0])}, "key 'offsets' is no rising list"),
        ({"offsets": np.array([0])}, "key 'offsets' is no rising list"),
        ({"jpeg": np.zeros(400, np.uint8)}, "a.npz: image 0 of key 'jpeg' cannot be decoded"),
        ({"jpeg": np.zeros(400)}, "key 'jpeg' is float64 [400]; give uint8 [bytes]"),
    ],
)
def test_wrong_encoded_keys_are_named(tmp_path, changes, message):
    keys = {**encoded(pixels(3, 5, 4, 3)), "labels": np.zeros(3, int), **changes}
    np.savez(tmp_path / "a.npz", **{k: v for k, v in keys.items() if v is not None})
    refused(re.escape(message), tmp_path, "a.npz", "a.npz")


def test_one_truncated_image_is_named(tmp_path):
    keys = encoded(pixels(3, 32, 32, 3))
    keys["jpeg"] = keys["jpeg"].copy()
    keys["jpeg"][keys["offsets"][1] + 40 : keys["offsets"][2]] = 0
    np.savez(tmp_path / "a.npz", **keys, labels=np.zeros(3, int))
    refused("image 1 of key 'jpeg' cannot be decoded", tmp_path, "a.npz", "a.npz")


def test_encoded_images_of_two_sizes_are_refused(tmp_path):
    small, large = encoded(pixels(1, 5, 4, 3)), encoded(pixels(1, 6, 4, 3))
    jpeg = np.concatenate([small["jpeg"], large["jpeg"]])
    offsets = np.array([0, len(small["jpeg"]), len(jpeg)])
    np.savez(tmp_path / "a.npz", jpeg=jpeg, offsets=offsets, labels=np.zeros(2, int))
    refused("image 1 of key 'jpeg' is 4x6, the first 4x5", tmp_path, "a.npz", "a.npz")


def test_a_file_of_one_part_needs_a_test_file(plain):
    refused("no key 'train_images'.*only images, labels; name the test file", plain(), "train.npz")


def test_files_that_are_no_archives(tmp_path):
    refused("none.npz: no such file", tmp_path, "none.npz")
    for content in (b"", b"rubbish", b"PK\x03\x04 but no archive"):
        (tmp_path / "bad.npz").write_bytes(content)
        refused("bad.npz: is not a readable .npz file", tmp_path, "bad.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    refused("array.npz: holds a single array", tmp_path, "array.npz")


def test_flipped_bits_and_foreign_members_name_the_key(plain):
    root = plain()
    file = root / "test.npz"
    content = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        start = archive.getinfo("images.npy").header_offset
    content[start + 200] ^= 255
    file.write_bytes(content)
    refused("test.npz: key 'images' is damaged", root, "train.npz", "test.npz")
    cut = b"\x93NUMPY\x01\x00\x18\x00{'descr': '|u1', (\n      \n"  # a header that is no value of Python's
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", cut)
    refused("test.npz: key 'images' is damaged", root, "train.npz", "test.npz")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("images.npy", "no array")
    refused("test.npz: key 'images' is", root, "train.npz", "test.npz")


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
    refused("'labels' is int64 .2.; give one whole number for each of 5", root, None, "ood.npz")
    with refusal("neither train nor test names a file"):
        packed(root, None)
    np.savez(root / "ood.npz", labels=np.zeros(3, int))
    refused("ood.npz: no key 'images' or 'jpeg', only labels; pack", root, None, "ood.npz")
    alone()
    refused("ood.npz: no key 'labels'", root, "ood.npz", "ood.npz")  # classes to learn need labels


def test_a_test_only_set_joins(alone):
    root, expected = alone()
    normal = LabelledSet("n", ("a",), expected, torch.zeros(5).long(), expected, torch.zeros(5).long())
    images = join(normal, {"ood": packed(root, None, "ood.npz")}, "toy")
    assert (len(images.train), images.test_labels.tolist()) == (5, [0] * 5 + [1] * 5)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder")
def test_real_cifar10():
    images = packed(Path(ROOT), "cifar/cifar10_train_2000pc_jpeg.npz", "cifar/cifar10_test_jpeg.npz")
    assert images.train_images.shape == (20_000, 3, 32, 32)
    assert images.test_images.shape == (10_000, 3, 32, 32)
    assert images.train_labels.bincount().tolist() == [2_000] * 10
    assert images.test_labels.bincount().tolist() == [1_000] * 10
    assert images.categories[:2] == ["airplane", "automobile"]
    partition = Dirichlet(clients=10, alpha=0.1)(images, 0)
    assert sorted(i for indices in partition.clients for i in indices) == list(range(20_000))
    assert partition.counts(images).sum(axis=0).tolist() == [2_000] * 10


@pytest.mark.real_data
@pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder")
def test_real_medical_sets():
    pneumonia = packed(Path(ROOT), "medical/pneumoniamnist.npz")
    assert pneumonia.train_images.shape == (3_882, 3, 28, 28)
    assert pneumonia.test_labels.bincount().tolist() == [234, 390]  # 62.50 %: the constant prediction
    mednist = packed(Path(ROOT), "medical/mednist_32.npz", test_per_class=10)
    assert mednist.classes == ("AbdomenCT", "BreastMRI", "CXR", "ChestCT", "Hand", "HeadCT")
    assert mednist.test_labels.bincount().tolist() == [10] * 6
