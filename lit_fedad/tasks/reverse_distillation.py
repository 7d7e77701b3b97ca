"""Reverse distillation: a decoder rebuilds a frozen network's features from a narrow code (Deng and Li, CVPR 2022)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Prediction, Task
from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.bounds import above, at_least, pair
from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import AnomalyMap

_WIDE = 256
"""Fewest channels of the finest map with which residual blocks are bottlenecks, as in the authors' wide ResNet."""

_MIN_SIDE = 3
"""Fewest positions along a side of the deepest map, so that a code has several: a batch of one image with a single
position would have no batch statistics."""


class ReverseDistillation(Task):
    """A decoder that mirrors a frozen backbone, and gets only a one-class embedding of the backbone's features.

    All maps of the backbone are brought to the resolution of the deepest one, concatenated, and embedded in a code of
    half that resolution. From the code the decoder rebuilds the maps, the deepest first. Features that it has not
    learnt to rebuild are anomalous. Loss and score are those of the authors' code: the loss compares whole maps, the
    score compares them position by position.

    Args:
        backbone: Frozen feature extractor, whose maps halve their resolution from layer to layer.
        image_size: Side of the images in pixels, or their height and width.
        blocks: Residual blocks of the embedding, and of each stage of the decoder.
        learning_rate: Learning rate of Adam.
        sigma: Standard deviation of the Gaussian smoothing of the map, in pixels.

    Raises:
        UserError: If a number is out of range, or the backbone's maps do not halve.
    """

    output_modules = ("decoder",)

    def __init__(
        self,
        backbone: FeaturePyramid,
        image_size: int | Sequence[int] = 256,
        blocks: int = 2,
        learning_rate: float = 5e-3,
        sigma: float = 4.0,
    ) -> None:
        super().__init__()
        at_least("task", 1, blocks=blocks)
        above("task", 0, learning_rate=learning_rate)
        height, width = pair("task.image_size", image_size)
        shapes = [tuple(maps.shape[2:]) for maps in backbone(torch.zeros(1, 3, height, width))]
        if any(deep != tuple(-(-side // 2) for side in fine) for fine, deep in pairwise(shapes)):
            raise UserError(
                f"task reverse_distillation: the backbone's maps have {shapes} positions, and each must have half of"
                " those before along a side; give backbone=resnet18"
            )
        if min(shapes[-1]) < _MIN_SIDE:
            raise UserError(
                f"image.size={image_size}: the backbone's deepest map has {shapes[-1]} positions, and task"
                f" reverse_distillation needs {_MIN_SIDE} along a side; give larger images"
            )
        self.backbone, self.learning_rate = backbone, learning_rate
        self.num_features = 2 * backbone.channels[-1]
        self.embedder = Embedder(backbone.channels, blocks)
        self.decoder = Decoder(backbone.channels, blocks)
        self.draw_maps = nn.ModuleList(AnomalyMap(shape, (height, width), sigma) for shape in shapes)

    def view(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Computes the backbone's maps, only once for all users of the view."""
        return {"pyramid": batch["pyramid"] if "pyramid" in batch else self.backbone(batch["image"])}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the code [B, positions, num_features] of a batch or a view."""
        return self.embedder(self.view(batch)["pyramid"]).flatten(2).transpose(1, 2)

    def rebuilt(self, features: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
        """Computes the decoder's maps [B, C_l, H_l, W_l] of codes, in the order of the backbone's."""
        height, width = (-(-side // 2) for side in maps[-1].shape[2:])
        code = features.transpose(1, 2).unflatten(2, (height, width))
        return self.decoder(code, [(layer.shape[2], layer.shape[3]) for layer in maps])

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes ``sum_l (1 - cos(f_l, g_l))`` of maps flattened to one vector, averaged over images."""
        maps = self.view(batch)["pyramid"]
        rebuilt = self.rebuilt(features, maps)
        with full_precision(features):
            cosines = [
                F.cosine_similarity(f.float().flatten(1), g.float().flatten(1))
                for f, g in zip(maps, rebuilt, strict=True)
            ]
            return {"loss": torch.stack([(1 - cosine).mean() for cosine in cosines]).sum()}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes smoothed maps of ``sum_l (1 - cos)`` by position (RD4AD Eq. 1), and their maximum."""
        maps = self.view(batch)["pyramid"]
        layer_maps = [
            draw(1 - F.cosine_similarity(f.float(), g.float()))
            for draw, f, g in zip(self.draw_maps, maps, self.rebuilt(features, maps), strict=True)
        ]
        anomaly_map = torch.stack(layer_maps).sum(0)
        return Prediction(image_score=anomaly_map.flatten(1).amax(1), anomaly_map=anomaly_map)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores a batch; the backbone's maps are computed only once."""
        return super().predict_step({**batch, **self.view(batch)}, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds Adam, with the authors' momentum of 0.5."""
        return torch.optim.Adam(self.trainable, lr=self.learning_rate, betas=(0.5, 0.999))


class Embedder(nn.Module):
    """Fuses maps of several scales, and embeds them: `code` [B, 2 C_L, H_L / 2, W_L / 2].

    Args:
        channels: Channels C_l of the backbone's maps, the finest first.
        blocks: Residual blocks behind the fusion.
    """

    def __init__(self, channels: Sequence[int], blocks: int) -> None:
        super().__init__()
        # A map passes one strided convolution for each step of resolution between it and the deepest map.
        self.reduce = nn.ModuleList(
            nn.Sequential(
                *(_normed(_conv3(a, b, stride=2), relu=True) for a, b in pairwise(channels[level:]))
            )
            for level in range(len(channels))
        )
        narrow = channels[0] >= _WIDE
        deepest, code = channels[-1], 2 * channels[-1]
        self.embed = _stage(len(channels) * deepest, code, blocks, "down", narrow)
        _initialise(self)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        """Computes codes."""
        fused = [reduce(layer) for reduce, layer in zip(self.reduce, maps, strict=True)]
        return self.embed(torch.cat(fused, dim=1))


class Decoder(nn.Module):
    """Builds maps from codes, the deepest first; each stage doubles the resolution.

    Args:
        channels: Channels C_l of the maps, the finest first.
        blocks: Residual blocks of a stage.
    """

    def __init__(self, channels: Sequence[int], blocks: int) -> None:
        super().__init__()
        wide = [2 * channels[-1], *reversed(channels)]
        self.stages = nn.ModuleList(
            _stage(a, b, blocks, "up", channels[0] >= _WIDE) for a, b in pairwise(wide)
        )
        _initialise(self)

    def forward(self, code: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Computes maps of the given heights and widths, both the finest first."""
        built, current = [], code
        for stage, (height, width) in zip(self.stages, reversed(shapes), strict=True):
            # Cropped, since the backbone rounds up when it halves odd sides.
            current = stage(current)[:, :, :height, :width]
            built.append(current)
        return built[::-1]


class Residual(nn.Module):
    """A residual block of two convolutions or, if narrow, of three with half of the channels in the middle.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        change: ``"down"`` halves the resolution, ``"up"`` doubles it, ``""`` leaves it.
        narrow: See above.
    """

    def __init__(self, inputs: int, outputs: int, change: str, narrow: bool) -> None:
        super().__init__()
        width = outputs // 2 if narrow else outputs
        first = width if narrow else inputs
        middle: dict[str, nn.Module] = {
            "down": _conv3(first, width, stride=2),
            "up": nn.ConvTranspose2d(first, width, 2, stride=2, bias=False),
            "": _conv3(first, width),
        }
        ends = nn.Conv2d(width, outputs, 1, bias=False) if narrow else _conv3(width, outputs)
        head = [_normed(nn.Conv2d(inputs, width, 1, bias=False), relu=True)] if narrow else []
        self.body = nn.Sequential(*head, _normed(middle[change], relu=True), _normed(ends))
        skips: dict[str, nn.Module] = {
            "down": nn.Conv2d(inputs, outputs, 1, stride=2, bias=False),
            "up": nn.ConvTranspose2d(inputs, outputs, 2, stride=2, bias=False),
        }
        self.skip = _normed(skips[change]) if change else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """Computes maps."""
        return F.relu(self.body(maps) + self.skip(maps))


def _stage(inputs: int, outputs: int, blocks: int, change: str, narrow: bool) -> nn.Sequential:
    """Builds a stage of residual blocks, of which the first changes channels and resolution."""
    rest = (Residual(outputs, outputs, "", narrow) for _ in range(blocks - 1))
    return nn.Sequential(Residual(inputs, outputs, change, narrow), *rest)


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


def _normed(layer: nn.Module, relu: bool = False) -> nn.Sequential:
    """Appends batch normalisation to a convolution, and a ReLU if ``relu`` is set."""
    (weight,) = layer.parameters()
    outputs = weight.shape[1 if isinstance(layer, nn.ConvTranspose2d) else 0]
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), *([nn.ReLU()] if relu else []))


def _initialise(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
