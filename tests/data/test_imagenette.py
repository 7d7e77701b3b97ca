"""ImageNette as distributed: a small tree of the official form."""

import shutil

import numpy as np
import pytest
from helpers.refusals import refused
from PIL import Image

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.data.class_sets import IMAGENETTE, class_set
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.datasets import image_transform


@pytest.fixture
def folder(tmp_path):
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


def test_a_tree_is_read(folder):
    images = build(compose(["data=imagenette", f"data.root={folder.parent}"])["data"])
    assert (images.name, images.classes[:2]) == ("imagenette", ("tench", "English springer"))
    assert images.train_images.shape == (20, 3, 64, 64)
    assert images.train_labels.tolist() == [k for k in range(10) for _ in range(2)]
    levels = [20 * k + i for k in range(10) for i in range(2)]
    assert np.abs(images.train_images.float().mean((1, 2, 3)).numpy() - levels).max() < 1
    assert images.test_labels.tolist() == list(range(10))
    assert np.abs(images.test_images[:, 1, 5, 7].numpy() - np.arange(2.0, 200, 20)).max() <= 1


def test_wrong_folders_are_one_line(folder):
    root = folder.parent
    shutil.copytree(folder, root / "imagenette2")
    refused("holds imagenette2, imagenette2-160; unpack", class_set, root, "imagenette")
    shutil.rmtree(root / "imagenette2")
    refused("holds no folder imagenette2", class_set, folder / "train" / "n01440764", "imagenette")
    shutil.rmtree(folder / "val" / "n03028079")
    refused(f"{folder / 'val'}: must hold the ten folders .* see n03028079", class_set, root, "imagenette")
    (folder / "val" / "n03028079").mkdir()
    refused(f"{folder / 'val'}: is missing or lacks images", class_set, root, "imagenette")
    shutil.rmtree(folder / "val")
    refused(f"{folder / 'val'}: is missing or lacks images", class_set, root, "imagenette")


@pytest.mark.parametrize("fit", ["crop", "squeeze", "pad"])
def test_new_images_get_their_shape_as_training_images_do(folder, fit):
    path = folder / "val" / "n01440764" / "n01440764_2.JPEG"
    Image.fromarray(np.tile(np.arange(90, dtype=np.uint8), (70, 1))).save(path)
    default = [] if fit == "crop" else [f"image.fit={fit}"]
    words = ["method=fedavg", "task=classifier", "data=imagenette", f"data.root={folder}", "image.size=64"]
    config = compose([*words, *default])
    images = build(config["data"])
    task = build_model(config, images.categories).task
    new = image_transform(config, task).raw(path).permute(2, 0, 1)
    assert new.equal(images.test_images[0])
