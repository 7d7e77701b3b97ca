"""Blocks of vision transformers as feature maps, and ResNet-50 v2 with the stem of Gluon's weights."""

import inspect
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import timm
from timm.layers import BatchNormAct2d, create_conv2d
from timm.models import FeatureInfo, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnetv2 import ResNetV2
from torch import Tensor, nn

default_cfgs = generate_default_cfgs(
    {
        "resnetv2_50_gluon.": {
            "mean": (0.485, 0.456, 0.406),
            "std": (0.229, 0.224, 0.225),
            "input_size": (3, 224, 224),
            "num_classes": 1000,
            "first_conv": "stem.conv.conv",
            "classifier": "head.fc",
        }
    }
)


class GluonResNetV2(ResNetV2):
    """Pre-activation ResNet (He et al. 2016, arXiv:1603.05027) that also normalises input and stem."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        conv = self.stem.conv
        self.stem.conv = nn.Sequential(
            OrderedDict(
                bn_in=nn.BatchNorm2d(conv.in_channels),
                conv=conv,
                bn=nn.BatchNorm2d(conv.out_channels),
                relu=nn.ReLU(),
            )
        )


@register_model
def resnetv2_50_gluon(pretrained: bool = False, **kwargs: Any) -> GluonResNetV2:
    """Builds ResNet-50 v2 with Gluon's stem; there are no weights to download."""
    arguments = {
        "layers": [3, 4, 6, 3],
        "conv_layer": create_conv2d,
        "norm_layer": BatchNormAct2d,
        "feature_cfg": {"flatten_sequential": True},
    }
    return build_model_with_cfg(GluonResNetV2, "resnetv2_50_gluon", pretrained, **{**arguments, **kwargs})


_PLAIN = {"class_token", "dynamic_img_size"}
"""Arguments of transformers whose blocks all have one scale; those of several scales (Swin) have no class token."""


def dynamic_size(name: str) -> dict[str, bool]:
    """Returns the argument of `timm.create_model` by which a plain vision transformer takes images of any size.

    Example:
        >>> dynamic_size("vit_small_patch14_reg4_dinov2"), dynamic_size("resnet18")
        ({'dynamic_img_size': True}, {})
    """
    module = sys.modules[timm.model_entrypoint(name.partition(".")[0]).__module__]
    models = [
        one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__
    ]
    inits = [
        inspect.signature(base.__init__)
        for one in models
        for base in one.__mro__
        if issubclass(base, nn.Module)
    ]
    return {"dynamic_img_size": True} if any(init.parameters.keys() >= _PLAIN for init in inits) else {}


class TransformerBlocks(nn.Module):
    """Feature maps of chosen blocks of a transformer, each through the model's final normalisation.

    The scale of a block's output grows with its depth. The final normalisation brings all blocks to the same scale, as
    DINOv2 (arXiv 2304.07193) does for comparisons of patches.

    Args:
        model: timm model with ``forward_intermediates``; its blocks behind the last chosen one are removed.
        layers: Numbers of the chosen blocks, from 0, in ascending order.

    Raises:
        AssertionError: If there is no such block.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers: list[int] = model.prune_intermediate_layers(list(layers), prune_norm=False)
        self.feature_info = FeatureInfo(model.feature_info, tuple(self.layers))
        self.model = model

    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps images [B, 3, H, W] to one map [B, C, H / patch, W / patch] for each block."""
        maps: list[Tensor] = self.model.forward_intermediates(
            images, indices=self.layers, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        return maps
