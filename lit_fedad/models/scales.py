"""One frozen backbone at several sizes of an image: whole objects show in a small one, small defects in a large one."""

import hashlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.models.tiles import TiledPyramid

LARGE = 256
"""Pixels along the short side from which on an image is seen in several sizes, where none are asked for."""

USUAL_SCALES = 2
"""Sizes of such an image: whole and half."""

SMALLEST = 32
"""Pixels along the short side of the smallest size."""


class ScaledPyramid(nn.Module):
    """A frozen backbone that sees an image whole, and halved again and again; stands in for a `FeaturePyramid`.

    Args:
        backbone: The backbone.
        scales: Number of sizes, the whole image among them.

    Attributes:
        channels, strides, mean, std: Those of the backbone; of the whole image.
        provenance: The backbone's, with the number of sizes.
        fingerprint: The backbone's and the number of sizes.
    """

    def __init__(self, backbone: FeaturePyramid, scales: int) -> None:
        super().__init__()
        self.backbone, self.scales = backbone, scales
        self.channels, self.strides = backbone.channels, backbone.strides
        self.mean, self.std = backbone.mean, backbone.std
        self.provenance: dict[str, Any] = {**backbone.provenance, "scales": scales}
        self.fingerprint = hashlib.sha256(f"{backbone.fingerprint} scales {scales} v1".encode()).hexdigest()

    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps images ``[B, 3, H, W]`` to features ``[B, C_l, H_l, W_l]`` of all layers, a size after the other."""
        return self._of_each_size(self.backbone, images)

    def features(self, images: Tensor) -> list[Tensor]:
        """Computes the same with gradients for the images."""
        return self._of_each_size(self.backbone.features, images)

    def _of_each_size(self, see: Callable[[Tensor], list[Tensor]], images: Tensor) -> list[Tensor]:
        maps = [*see(images)]
        for _ in range(1, self.scales):
            images = F.avg_pool2d(images, 2)
            maps += see(images)
        return maps


Backbone = FeaturePyramid | TiledPyramid | ScaledPyramid
"""A frozen backbone, whether it sees whole images, tiles, or several sizes."""


def at_scales(backbone: Backbone, scales: int | None, size: tuple[int, int]) -> Backbone:
    """Returns a backbone that sees images in so many sizes, of one that sees them in any number.

    Args:
        backbone: The backbone.
        scales: Number of sizes; None for `USUAL_SCALES` from `LARGE` pixels on, but one in tiles, and for backbones of
            one stride, such as transformers, whose layers all see the whole image.
        size: Height and width of the images in pixels.

    Raises:
        UserError: If images are too small for so many, or seen in tiles.
    """
    single = backbone.backbone if isinstance(backbone, ScaledPyramid) else backbone
    if scales is None:
        strides = set(getattr(single, "strides", ()))  # a backbone of a user's own need not say any
        whole = not isinstance(single, TiledPyramid) and len(strides) > 1
        scales = USUAL_SCALES if whole and min(size) >= LARGE else 1
    if scales == 1:
        return single
    if scales < 1 or min(size) < SMALLEST * 2 ** (scales - 1):
        raise UserError(
            f"task.scales={scales}: give 1 or more, of which the smallest has {SMALLEST} pixels along its short side"
            f" (images of {size[0]} x {size[1]})"
        )
    if isinstance(single, TiledPyramid):
        raise UserError(f"task.scales={scales}: an image in tiles is seen in one size; give task.scales=1")
    return ScaledPyramid(single, scales)
