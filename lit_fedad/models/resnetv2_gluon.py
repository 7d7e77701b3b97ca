"""ResNet-50 v2 as Gluon trains it: timm's ``resnetv2_50`` with two more normalisations in the stem.

Its first three stages are as wide as those of WideResNet-50-2: 256, 512, 1024 channels at strides 4, 8, 16.
"""

from collections import OrderedDict
from typing import Any

from timm.layers import BatchNormAct2d, create_conv2d
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnetv2 import ResNetV2
from torch import nn

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
