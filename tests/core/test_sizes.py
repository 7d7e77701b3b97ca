"""The size at which images are looked at where nobody gives one, and by which statistics they are normalised."""

import pytest
from torchvision.models import ResNet18_Weights

from lit_fedad.core import sizes
from lit_fedad.core.config import compose
from lit_fedad.core.sizes import IMAGENET_MEAN, IMAGENET_STD

OWN = ["data=auto", "data.root=images"]


@pytest.fixture
def machine(monkeypatch):
    """Sets the gigabytes of memory that the machine says it has."""
    return lambda gigabytes: monkeypatch.setattr(sizes, "machine_memory", lambda: int(gigabytes * 2**30))


@pytest.mark.parametrize(
    ("overrides", "memory", "size", "grid"),
    [
        (OWN, 8, 256, 32),
        (OWN, 2, 128, 16),  # memory does not allow more
        (["experiment=small", *OWN], 8, 128, 16),  # asked for
        ([], 8, 128, 16),  # drawn
    ],
)
def test_photographs_are_looked_at_in_256_pixels_where_memory_allows(machine, overrides, memory, size, grid):
    machine(memory)
    config = compose(overrides)
    assert (config["image"]["size"], config["grid"], config["task"]["grid"]) == (size, grid, grid)


def test_a_run_says_its_size_the_key_and_why_photographs_have_no_more(machine):
    config = {"image": {"size": [128, 64]}, "data": {"_target_": "lit_fedad.data.auto.auto"}}
    machine(8)
    assert sizes.size_in_words(config) == "128 x 64 pixels (image.size)"
    machine(2.5)
    assert "machine of 4.0 GiB of memory, here are 2.5 GiB" in sizes.size_in_words(config)


def test_memory_is_that_of_the_container(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes, "_LIMITS", (str(tmp_path / "none"), str(limit)))
    limit.write_text("max\n")
    whole = sizes.machine_memory()
    limit.write_text("1048576\n")
    assert sizes.machine_memory() == 1048576 < whole


@pytest.mark.parametrize(
    ("data", "mean"),
    [
        # Its ``normal`` is a list of labels.
        (["data=labelled_csv", "data.root=images"], list(IMAGENET_MEAN)),
        (["data=mvtec_loco", "data.root=images"], list(IMAGENET_MEAN)),  # of folders
        (["data=semantic_cifar10", "data.root=images"], [0, 0, 0]),  # a section
        (["data=cifar10", "data.root=images"], [0.4914, 0.4822, 0.4465]),
        (["data=folders", "data.root=images", "+image.mean=[0.5,0.5,0.5]"], [0.5, 0.5, 0.5]),
    ],
)
@pytest.mark.parametrize("task", ["contrastive", "elsa", "csi", "deep_svdd", "one_class_svm", "autoencoder"])
def test_tasks_of_pixels_take_what_the_image_section_or_the_data_say(task, data, mean):
    config = compose([f"task={task}", "method=fedavg", "features=train", *data])
    assert config["task"]["mean"] == mean


def test_frozen_features_take_it_too():
    config = compose(["method=panda", "features=frozen", "data=labelled_csv", "data.root=images"])
    assert config["features"]["mean"] == list(IMAGENET_MEAN)


def test_imagenets_are_those_of_torchvisions_weights():
    usual = ResNet18_Weights.DEFAULT.transforms()
    assert (tuple(usual.mean), tuple(usual.std)) == (IMAGENET_MEAN, IMAGENET_STD)
