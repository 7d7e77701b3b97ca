"""By which mean and deviation pixels are normalised."""

import pytest
from torchvision.models import ResNet18_Weights

from lit_fedad.core.config import compose
from lit_fedad.core.pixels import IMAGENET_MEAN, IMAGENET_STD


@pytest.mark.parametrize(
    ("data", "mean"),
    [
        (
            ["data=labelled_csv", "data.root=images"],
            list(IMAGENET_MEAN),
        ),  # whose ``normal`` is a list of labels
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
