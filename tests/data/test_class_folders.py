"""Class sets of image files as distributed: small trees of the official forms of ImageNette and Tiny ImageNet."""

import re
import shutil

import numpy as np
import pytest
import torch
from helpers.refusals import refusal, refused
from PIL import Image

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.class_sets import IMAGENETTE, SOURCES, class_set
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.data.strategies import Dirichlet
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.datasets import image_transform


@pytest.fixture
def imagenette(tmp_path):
    """Image i of class k has the level 20 k + i; two for training, one for testing, none of them square."""
    folder = tmp_path / "imagenette2-160"
    for k, wnid in enumerate(IMAGENETTE):
        for i, split in enumerate(("train", "train", "val")):
            path = folder / split / wnid / f"{wnid}_{i}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            shape = (70, 90) if i == 1 else (70, 90, 3)  # some photographs are grey
            Image.fromarray(np.full(shape, 20 * k + i, np.uint8)).save(path, quality=95)
    (folder / "noisy_imagenette.csv").touch()
    (tmp_path / "imagenette2-160.tgz").touch()
    return folder


def test_imagenette_is_read(imagenette):
    images = build(compose(["data=imagenette", f"data.root={imagenette.parent}"])["data"])
    assert (images.name, images.classes[:2]) == ("imagenette", ("tench", "English springer"))
    assert images.train_images.shape == (20, 3, 64, 64)
    assert images.train_labels.tolist() == [k for k in range(10) for _ in range(2)]
    levels = [20 * k + i for k in range(10) for i in range(2)]
    assert np.abs(images.train_images.float().mean((1, 2, 3)).numpy() - levels).max() < 1
    assert images.test_labels.tolist() == list(range(10))
    assert np.abs(images.test_images[:, 1, 5, 7].numpy() - np.arange(2.0, 200, 20)).max() <= 1


def test_wrong_folders_are_one_line(imagenette):
    root = imagenette.parent
    shutil.copytree(imagenette, root / "imagenette2")
    refused("holds imagenette2, imagenette2-160; unpack", class_set, root, "imagenette")
    shutil.rmtree(root / "imagenette2")
    refused("holds no folder imagenette2", class_set, imagenette / "train" / "n01440764", "imagenette")
    shutil.rmtree(imagenette / "val" / "n03028079")
    refused(
        f"{imagenette / 'val'}: must hold the ten folders .* see n03028079", class_set, root, "imagenette"
    )
    (imagenette / "val" / "n03028079").mkdir()
    refused(f"{imagenette / 'val'}: is missing or lacks images", class_set, root, "imagenette")
    shutil.rmtree(imagenette / "val")
    refused(f"{imagenette / 'val'}: is missing or lacks images", class_set, root, "imagenette")


@pytest.mark.parametrize("fit", ["crop", "squeeze", "pad"])
def test_new_images_get_their_shape_as_training_images_do(imagenette, fit):
    path = imagenette / "val" / "n01440764" / "n01440764_2.JPEG"
    Image.fromarray(np.tile(np.arange(90, dtype=np.uint8), (70, 1))).save(path)
    default = [] if fit == "crop" else [f"image.fit={fit}"]
    words = [
        "method=fedavg",
        "task=classifier",
        "data=imagenette",
        f"data.root={imagenette}",
        "image.size=64",
    ]
    config = compose([*words, *default])
    images = build(config["data"])
    task = build_model(config, images.categories).task
    new = image_transform(config, task).raw(path).permute(2, 0, 1)
    assert new.equal(images.test_images[0])


WNIDS = ["n03", "n01", "n04", "n02"]
WORDS = {
    "n00": "entity",
    "n01": "goldfish, Carassius auratus",
    "n02": "crane",
    "n03": "European fire salamander, Salamandra salamandra",
    "n04": "crane, construction crane",
}


def picture(path, grey_level):
    """A photograph in colour, or in grey where the level is odd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (64, 64) if grey_level % 2 else (64, 64, 3)
    Image.fromarray(np.full(shape, grey_level, np.uint8)).save(path, quality=95)


@pytest.fixture
def tiny(tmp_path):
    """Image i of a class in wnids.txt has the level 40 + 50 label + i; validation images come in turn."""
    folder = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(WNIDS):
        for i in range(3):
            picture(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 40 + 50 * label + i)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    rows = []
    for i, wnid in enumerate(sorted(WNIDS) * 2):
        picture(folder / "val" / "images" / f"val_{i}.JPEG", 100 + i)
        rows.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(rows))
    (folder / "wnids.txt").write_text("\n".join(WNIDS))
    (folder / "words.txt").write_text("".join(f"{wnid}\t{words}\n" for wnid, words in WORDS.items()))
    return folder


def levels(images):
    """The one grey level of each image."""
    assert images.dtype == torch.uint8
    assert images.shape[1:] == (3, 64, 64)
    first = images[:, 0, 0, 0]
    assert torch.equal(images, first.view(-1, 1, 1, 1).expand_as(images))
    return first.tolist()


def test_tiny_imagenet_is_read(tiny):
    images = class_set(tiny.parent, "tiny_imagenet")
    assert (images.name, images.kind) == ("tiny_imagenet", "classification")
    assert images.classes == ("European fire salamander", "goldfish", "n04", "n02")  # two cranes
    assert images.train_labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert levels(images.train_images) == [40, 41, 42, 90, 91, 92, 140, 141, 142, 190, 191, 192]
    assert images.test_labels.tolist() == [1, 3, 0, 2, 1, 3, 0, 2]
    assert levels(images.test_images) == list(range(100, 108))
    assert (images.mean, images.std) == (SOURCES["tiny_imagenet"].mean, SOURCES["tiny_imagenet"].std)


def test_colours_are_those_of_the_file(tiny):
    file = tiny / "train" / "n03" / "images" / "n03_0.JPEG"
    ramp = np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
    Image.fromarray(ramp[:, :, ::-1]).save(file)
    read = class_set(tiny, "tiny_imagenet").train_images[0].permute(1, 2, 0).numpy()
    assert np.array_equal(read, np.asarray(Image.open(file)))


def test_the_root_may_be_the_folder_itself(tiny):
    inside, around = class_set(tiny, "tiny_imagenet"), class_set(tiny.parent, "tiny_imagenet")
    assert torch.equal(inside.train_images, around.train_images)


def test_classes_without_words_keep_their_number(tiny):
    (tiny / "words.txt").write_text("n03\tsalamander\n")
    assert class_set(tiny, "tiny_imagenet").classes == ("salamander", "n01", "n04", "n02")


def test_a_subset_is_that_of_the_whole_and_nothing_else_is_read(tiny):
    expected = class_set(tiny, "tiny_imagenet").subset(train_per_class=2, test_per_class=1, seed=3)
    drawn = set(levels(expected.train_images))
    for label, wnid in enumerate(WNIDS):
        for i in range(3):
            if 40 + 50 * label + i not in drawn:
                (tiny / "train" / wnid / "images" / f"{wnid}_{i}.JPEG").write_bytes(b"rubbish")
    images = class_set(tiny, "tiny_imagenet", train_per_class=2, test_per_class=1, seed=3)
    assert torch.equal(images.train_images, expected.train_images)
    assert torch.equal(images.train_labels, expected.train_labels)
    assert torch.equal(images.test_images, expected.test_images)
    assert torch.equal(images.test_labels, expected.test_labels)


def test_the_configuration_builds_what_the_function_gives(tiny):
    config = compose(["data=tiny_imagenet", f"data.root={tiny.parent}", "data.train_per_class=2"])
    images, expected = build(config["data"]), class_set(tiny, "tiny_imagenet", train_per_class=2)
    assert torch.equal(images.train_images, expected.train_images)
    assert (tuple(images.mean), tuple(images.std)) == (expected.mean, expected.std)
    batch = LabelledDataset(images.test_images, images.test_labels, images.mean, images.std)[2]
    assert batch["image"][1, 5, 5].item() == pytest.approx((102 / 255 - 0.4481) / 0.2691, abs=1e-5)
    partition = Dirichlet(clients=2, alpha=1, min_size=1)(images, 0)
    assert partition.counts(images).sum(axis=0).tolist() == [2] * 4


def refused_tiny(message, root, **keys):
    with refusal(re.escape(message)):
        class_set(root, "tiny_imagenet", **keys)


@pytest.mark.parametrize("name", ["wnids.txt", "words.txt", "val/val_annotations.txt"])
def test_lists_that_are_missing_or_empty_are_named(tiny, name):
    (tiny / name).write_text("")
    refused_tiny(f"{tiny / name}: is empty; unpack http://", tiny)
    (tiny / name).unlink()
    refused_tiny(f"{tiny / name}: cannot be read; unpack http://", tiny.parent)


def test_a_root_without_the_set_is_named(tmp_path):
    refused_tiny(f"{tmp_path / 'wnids.txt'}: cannot be read", tmp_path)


@pytest.mark.parametrize(
    "row", ["val_0.JPEG", "val_0.JPEG\tn05\t0\t0\t9\t9", "../0.JPEG\tn01", "", "\x00\xff"]
)
def test_a_damaged_annotation_is_named(tiny, row):
    file = tiny / "val" / "val_annotations.txt"
    file.write_text(f"{file.read_text()}{row}\n")
    refused_tiny(f"{file}: line 9 names no image and class of wnids.txt", tiny)


def test_a_class_without_images_is_named(tiny):
    images = tiny / "train" / "n04" / "images"
    images.rename(tiny / "elsewhere")
    refused_tiny(f"{images}: holds no image (*.JPEG)", tiny)


@pytest.mark.parametrize("name", ["train/n01/images/n01_1.JPEG", "val/images/val_5.JPEG"])
def test_a_truncated_image_is_named(tiny, name):
    file = tiny / name
    file.write_bytes(file.read_bytes()[:200])
    refused_tiny(f"{file}: cannot be read as an image", tiny)


def test_a_missing_validation_image_is_named(tiny):
    (tiny / "val" / "images" / "val_7.JPEG").unlink()
    refused_tiny(f"{tiny / 'val' / 'images' / 'val_7.JPEG'}: no such image file", tiny)


def test_limits_and_norms_are_checked(tiny):
    refused_tiny("train_per_class=0 must be at least 1", tiny, train_per_class=0)
    refused_tiny("tiny_imagenet mean=[0.5, 0.5]", tiny, mean=[0.5, 0.5])
