"""Blocks of vision transformers: timm's own intermediate outputs, at any multiple of the patch."""

import warnings
from types import SimpleNamespace

import pytest
import timm
import torch
from helpers.refusals import refusal

from lit_fedad.core.errors import UserError
from lit_fedad.core.sizes import IMAGENET_MEAN, IMAGENET_STD
from lit_fedad.experiment.datasets import image_transform
from lit_fedad.models.backbone_parts import dynamic_size
from lit_fedad.models.backbones import create_backbone


def backbone(name, layers, weights="random"):
    with warnings.catch_warnings(action="ignore"):
        return create_backbone(name, layers, weights)


@pytest.fixture
def whole():
    """A complete tiny transformer whose weights are none of the defaults; it is made for 160 pixels."""
    model = timm.create_model("test_vit").eval()
    generator = torch.Generator().manual_seed(1)
    for value in model.state_dict().values():
        value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return model


def test_features_are_those_of_timms_blocks_after_the_final_norm(whole, tmp_path):
    torch.save(whole.state_dict(), tmp_path / "weights.pt")
    images = torch.randn(2, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    found = backbone("test_vit", (1, 4), tmp_path / "weights.pt")(images)
    expected = whole.get_intermediate_layers(images, n=[1, 4], reshape=True, norm=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    raw = whole.get_intermediate_layers(images, n=[1, 4], reshape=True, norm=False)
    assert not torch.allclose(found[0], raw[0], atol=0.1)


def test_oblong_images_and_other_sizes_are_taken():
    pyramid = backbone("test_vit", (0, 2))
    assert (pyramid.channels, pyramid.strides) == ((64, 64), (16, 16))
    maps = pyramid(torch.zeros(1, 3, 64, 176))
    assert [tuple(one.shape) for one in maps] == [(1, 64, 4, 11), (1, 64, 4, 11)]


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("test_vit", (64, 100), "'test_vit' takes no images of 64 x 100 pixels"),
        ("hiera_tiny_224", (64, 64), "'hiera_tiny_224' takes no images of 64 x 64 pixels"),
    ],
)
def test_sizes_that_do_not_fit_are_said_in_one_line(name, size, said):
    with refusal(said) as error:
        backbone(name, (0,))(torch.zeros(1, 3, *size))
    assert str(error.value).endswith("give another image.size")


def test_images_are_normalised_as_the_model_expects():
    config = {"data": {}, "image": {"size": 64}}
    task = SimpleNamespace(backbone=backbone("test_vit", (0,)))
    own = image_transform(config, task)
    assert (own.mean, own.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    usual = image_transform(config, SimpleNamespace(backbone=backbone("resnet10t", (0,))))
    assert (usual.mean, usual.std) == (IMAGENET_MEAN, IMAGENET_STD)
    labelled = image_transform({**config, "data": {"mean": [0.1] * 3, "std": [0.2] * 3}}, task)
    assert labelled.mean == (0.1, 0.1, 0.1)


def test_a_block_that_there_is_not_is_said():
    with pytest.raises(UserError, match="'test_vit' gives no features at layers"):
        backbone("test_vit", (1, 99))


def test_only_transformers_of_one_scale_take_any_size():
    names = (
        "vit_small_patch16_dinov3",
        "deit3_small_patch16_224",
        "swin_tiny_patch4_window7_224",
        "convnext_tiny",
    )
    assert [bool(dynamic_size(name)) for name in names] == [True, True, False, False]
