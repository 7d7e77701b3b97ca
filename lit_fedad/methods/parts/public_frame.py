"""Directions that features usually vary in, measured on drawn scenes: public, so that they cost no privacy."""

from __future__ import annotations

from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lit_fedad.contracts.task import channel_scale
from lit_fedad.memory.moments import Moments
from lit_fedad.pretraining.scenes import Scenes
from lit_fedad.tasks.patches import PatchTask

MOST_SCENES = 128
"""Scenes that show in which range and directions features lie: they have no relation to any image of a client."""

_LEAST_SCENES, _PIXELS = 8, MOST_SCENES * 128**2
_BATCH = 16

Frame = tuple[Tensor, Tensor]

_FRAMES: WeakKeyDictionary[PatchTask, dict[int, Frame]] = WeakKeyDictionary()


def public_frame(task: PatchTask, directions: int) -> Frame:
    """Computes the principal directions of the features of drawn scenes, each channel divided by its scale.

    Args:
        task: Features.
        directions: Number of directions k, those of most variance; at most as many as features have channels.

    Returns:
        The centre c [C] and directions A [C, k], float64: ``(f - c) A`` has a mean square length of 1 on the scenes.
    """
    found = _FRAMES.setdefault(task, {})
    if directions not in found:
        moments = _moments(task)
        scale = channel_scale(moments.variance, 1.0)
        variances, axes = torch.linalg.eigh(moments.scaled(scale).covariance)
        held = variances.flip(0)[:directions].clamp(min=0).sum().clamp(min=1e-12).sqrt()
        found[directions] = moments.mean, axes.flip(1)[:, :directions] / scale[:, None] / held
    return found[directions]


@torch.no_grad()
def _moments(task: PatchTask) -> Moments:
    height, width = task.size
    scenes = _scenes(max(height, width))[:, :, :height, :width]
    mean, std = (torch.tensor(values)[:, None, None] for values in (task.backbone.mean, task.backbone.std))
    batches = (((part - mean) / std).to(task.mean.device) for part in scenes.split(_BATCH))
    rows = (task.embed({"image": batch}).flatten(0, 1) for batch in batches)
    return Moments.of(rows, task.num_features)


@lru_cache(maxsize=1)
def _scenes(side: int) -> Tensor:
    """Draws scenes [n, 3, side, side] in [0, 1], fewer of large ones, on the CPU: alike everywhere."""
    count = min(MOST_SCENES, max(_LEAST_SCENES, _PIXELS // side**2))
    return Scenes(size=side, scenes=count, textures=min(count, 48)).views(0)[0]
