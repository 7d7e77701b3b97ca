"""Dinomaly: a decoder with linear attention rebuilds groups of a transformer's layers (Guo et al., CVPR 2025)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Prediction, Task
from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.bounds import above, at_least, pair, within
from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import AnomalyMap

_HEAD = 64
"""Channels of an attention head."""


class Dinomaly(Task):
    """A noisy bottleneck and a decoder without local attention, which learn to rebuild means of a backbone's layers.

    The mean of all layers passes a bottleneck with dropout. The decoder has a block for each layer; in reverse order,
    its blocks are compared with the layers by group. The loss is loose: well rebuilt positions get a tenth of their
    gradient. This version differs from the authors' in some points. Layers pass the backbone's final normalisation, and
    tokens that are no patch are left out. The share of well rebuilt positions and the learning rate are constant. Plain
    AdamW replaces its stabilised form and the clipping of gradients. Maps are smoothed by a whole Gaussian; theirs, of
    256 pixels a side, by one that is cut to 5 x 5 pixels, which blurs like one of 1.4 pixels.

    Args:
        backbone: Frozen transformer, whose maps all have the same shape.
        image_size: Side of the images in pixels, or their height and width.
        groups: Groups of successive layers, each compared by its mean.
        dropout: Probability of dropout in the bottleneck.
        easy_share: Share of positions that count as well rebuilt.
        easy_gradient: Factor of the gradient at these positions.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        sigma: Standard deviation of the Gaussian smoothing of the map, in pixels.
        top: Share of a map's pixels, the highest, whose mean is the image score.

    Raises:
        UserError: If a number is out of range, or the backbone is no transformer with as many layers.
    """

    output_modules = ("decoder",)

    def __init__(
        self,
        backbone: FeaturePyramid,
        image_size: int | Sequence[int] = 392,
        groups: int = 2,
        dropout: float = 0.2,
        easy_share: float = 0.9,
        easy_gradient: float = 0.1,
        learning_rate: float = 2e-3,
        weight_decay: float = 1e-4,
        sigma: float = 4.0,
        top: float = 0.01,
    ) -> None:
        super().__init__()
        at_least("task", 1, groups=groups)
        within("task", 0, 1, dropout=dropout, easy_share=easy_share, easy_gradient=easy_gradient, top=top)
        above("task", 0, learning_rate=learning_rate, top=top)
        at_least("task", 0, weight_decay=weight_decay)
        size = pair("task.image_size", image_size)
        shapes = {tuple(layer.shape[1:]) for layer in backbone(torch.zeros(1, 3, *size))}
        layers, channels = len(backbone.channels), backbone.channels[0]
        if len(shapes) > 1 or layers % groups or channels % _HEAD:
            raise UserError(
                f"task dinomaly needs maps of one form, {_HEAD} channels a head, in {groups} equal groups; give a"
                " transformer, as backbone=dinov2_small backbone.layers=[2,3,4,5,6,7,8,9]"
            )
        self.backbone, self.num_features, self.groups = backbone, channels, groups
        self.easy_share, self.easy_gradient, self.top = easy_share, easy_gradient, top
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.bottleneck = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * channels, channels),
            nn.Dropout(dropout),
        )
        self.decoder = nn.ModuleList(Block(channels) for _ in range(layers))
        for layer in (*self.bottleneck.modules(), *self.decoder.modules()):
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.01, a=-0.03, b=0.03)
                nn.init.zeros_(layer.bias)
        ((_, *grid),) = shapes
        self.draw_map = AnomalyMap(grid, size, sigma)

    @property
    def images_behind(self) -> int | None:
        """One if well rebuilt positions have no gradient: all other positions of a batch may be of one image."""
        return 1 if self.easy_share and not self.easy_gradient else None

    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the layers [L, B, P, C] of the backbone, only once for all users of the view."""
        if "layers" in batch:
            return {"layers": batch["layers"]}
        pyramid = batch["pyramid"] if "pyramid" in batch else self.backbone(batch["image"])
        return {"layers": torch.stack([layer.flatten(2).transpose(1, 2) for layer in pyramid])}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the bottleneck [B, P, C] of a batch or a view."""
        return self.bottleneck(self.view(batch)["layers"].mean(0))

    def pairs(self, features: Tensor, batch: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """Computes the mean of each group of layers [B, P, C], and of the decoder's blocks for it."""
        layers, outputs = self.view(batch)["layers"], []
        for block in self.decoder:
            features = block(features)
            outputs.append(features)
        rebuilt = torch.stack(outputs[::-1])
        return [
            (group.mean(0), rebuilt_group.mean(0))
            for group, rebuilt_group in zip(
                layers.chunk(self.groups), rebuilt.chunk(self.groups), strict=True
            )
        ]

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the mean `loose_cosine` of the groups."""
        losses = [
            loose_cosine(f, g, self.easy_share, self.easy_gradient) for f, g in self.pairs(features, batch)
        ]
        return {"loss": torch.stack(losses).mean()}

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes smoothed maps of ``1 - cos``, averaged over groups, and the mean of their highest pixels."""
        distances = [
            1 - F.cosine_similarity(f.float(), g.float(), dim=2) for f, g in self.pairs(features, batch)
        ]
        maps = self.draw_map(torch.stack(distances).mean(0).unflatten(1, (self.draw_map.rows.shape[1], -1)))
        pixels = maps.flatten(1)
        highest = pixels.topk(max(1, int(self.top * pixels.shape[1])), dim=1).values
        return Prediction(image_score=highest.mean(1), anomaly_map=maps)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores a batch; the backbone's layers are computed only once."""
        return super().predict_step({**batch, **self.view(batch)}, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds AdamW with the authors' settings."""
        return torch.optim.AdamW(
            self.trainable, lr=self.learning_rate, weight_decay=self.weight_decay, amsgrad=True, eps=1e-10
        )


def loose_cosine(features: Tensor, rebuilt: Tensor, easy_share: float, easy_gradient: float) -> Tensor:
    """Computes ``1 - cos`` of whole maps, averaged over images, with less gradient at well rebuilt positions.

    Args:
        features: The backbone's features [B, P, C].
        rebuilt: The decoder's features [B, P, C].
        easy_share: Share of all positions of the batch, those of the smallest distance, that count as well rebuilt.
        easy_gradient: Factor of the gradient at these positions.
    """
    with full_precision(rebuilt):
        f, g = features.detach().float(), rebuilt.float()
        with torch.no_grad():
            distances = 1 - F.cosine_similarity(f, g, dim=2)
            limit = distances.flatten().topk(max(1, round((1 - easy_share) * distances.numel()))).values[-1]
            well_rebuilt = (distances < limit)[..., None]
        damped = torch.where(well_rebuilt, easy_gradient * g + (1 - easy_gradient) * g.detach(), g)
        return (1 - F.cosine_similarity(f.flatten(1), damped.flatten(1))).mean()


class Block(nn.Module):
    """A transformer block whose attention is linear.

    Args:
        channels: Channels C.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.heads = channels // _HEAD
        self.norm1, self.norm2 = nn.LayerNorm(channels, eps=1e-8), nn.LayerNorm(channels, eps=1e-8)
        self.qkv, self.project = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Computes the block's output [B, P, C] of features at positions [B, P, C]."""
        rows = rows + self._attention(self.norm1(rows))
        return rows + self.mlp(self.norm2(rows))

    def _attention(self, rows: Tensor) -> Tensor:
        """Computes ``phi(Q) (phi(K)^T V) / (phi(Q) sum phi(K))`` with ``phi = elu + 1`` in each head."""
        q, k, v = (
            part.unflatten(2, (self.heads, _HEAD)).transpose(1, 2) for part in self.qkv(rows).chunk(3, dim=2)
        )
        q, k = F.elu(q) + 1, F.elu(k) + 1
        mixed = q @ (k.mT @ v) / (q @ k.sum(2)[..., None])
        return self.project(mixed.transpose(1, 2).flatten(2))
