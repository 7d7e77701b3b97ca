"""What one image adds to the noised sums of its patches by slot: shares, offsets from the slots, squared residuals.

All three together have length 1, so that every image counts alike and there is no length to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts import Message
from lit_fedad.contracts.image_sums import HiddenByNoiseError
from lit_fedad.memory.knn import nearest
from lit_fedad.methods.parts.image_moments import ProjectedSums
from lit_fedad.tasks.patches import PatchTask

DEVIATIONS = 3.0
"""Deviations of the noise within which a count may be noise alone."""

PRIOR = 10.0
"""Weight, in deviations of the noise, that the mean of all slots has in the mean square of each."""


class ImageSlots(ProjectedSums):
    """The sums ``counts`` [K], ``offsets`` [K, k] and ``squares`` [K] over the patches g that are nearest to slot m_k.

    Of an image with P patches they are ``n_k / P``, ``sum (g - m_k) / P`` and ``sum |B^T g|^2 / P``, over the length of
    all three. The unit of offsets is the length of usual features, that of squares the mean square residual.

    Args:
        task: Features.
        directions: Number of directions k.
        frame: ``centre`` and ``frame``, ``slots`` m [K, k], and ``outside`` B [k, R]: the directions outside the
            subspace over the usual length of residuals; empty before the server has sent them.
    """

    def __init__(self, task: PatchTask, directions: int, frame: Message, slots: int) -> None:
        super().__init__(task, directions, frame)
        self.slots = slots

    def form(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {"counts": (self.slots,), "offsets": (self.slots, self.directions), "squares": (self.slots,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        slots, outside = (self.frame[name].to(projected) for name in ("slots", "outside"))
        at = nearest(projected.flatten(0, 1), slots, 1)[1].view(projected.shape[:2])
        shares = F.one_hot(at, len(slots)).to(projected).mT / projected.shape[1]
        counts = shares.sum(2)
        squares = (projected @ outside).square().sum(2, keepdim=True)
        return {
            "counts": counts,
            "offsets": shares @ projected - counts[:, :, None] * slots,
            "squares": (shares @ squares)[:, :, 0],
        }

    def joined(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes what the sums say of slots.

        An image's part of a count is at most 1: as many images as a count has ones lie behind a slot at least.

        Returns:
            ``shown``: which slots count `DEVIATIONS` of the noise more than ``server.min_images``, bool [K];
            ``counts``; ``steps`` [K, k] to the mean of their patches, shortened by the share of noise in them (James
            and Stein 1961); ``squares``: mean squares of residuals, drawn to the mean of all slots (`PRIOR`).

        Raises:
            HiddenByNoiseError: If no slot counts enough.
        """
        counts, offsets, squares = sums["counts"], sums["offsets"], sums["squares"]
        shown = counts - DEVIATIONS * noise >= server.min_images
        if not shown.any():
            raise HiddenByNoiseError("fewer task.slots")
        lengths = offsets.square().sum(1, keepdim=True).clamp(min=1e-300)
        steps = (
            offsets * (1 - self.directions * noise**2 / lengths).clamp(min=0) / counts.clamp(min=1)[:, None]
        )
        usual = (squares[shown].sum() / counts[shown].sum()).clamp(min=1e-12)
        means = (squares + PRIOR * noise * usual).clamp(min=0) / (counts + PRIOR * noise).clamp(min=1)
        return {"shown": shown, "counts": counts, "steps": steps, "squares": means}
