"""What the distances of patches to memory slots are worth: the loss in training, and the scores."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.tasks.patches import COARSE

MEDIAN = "median"


class HingeLoss(nn.Module):
    """A hinge loss that attracts patches to their nearest memory slots (FedDyMem Eq. 12).

    ``mean_k max(0, |m - m'_k| - th)`` over the K nearest slots, plus ``repulsion`` times
    ``mean_j max(0, 1.1 th - |m - m'_j|)`` over the next J slots, which the paper lacks (it is CFA's) and without
    which pure attraction may contract the features.

    Args:
        threshold: Distance th below which a patch has no loss; ``"median"`` takes the median distance of normal
            patches to their K nearest slots, once, before training.
        neighbours: Number K of nearest slots that attract.
        repulsion: Weight of the repulsion; 0 gives FedDyMem Eq. 12 itself.
        repelled: Number J of next slots that repel.
        margin: Factor by which repulsion extends beyond th.

    Raises:
        UserError: If a setting is out of range.
    """

    def __init__(
        self,
        threshold: float | str = 0.01,
        neighbours: int = 3,
        repulsion: float = 0.0,
        repelled: int = 3,
        margin: float = 1.1,
    ) -> None:
        super().__init__()
        if isinstance(threshold, str) and threshold != MEDIAN:
            raise UserError(f"task.loss.threshold='{threshold}' must be a number or '{MEDIAN}'")
        at_least("task.loss", 1, neighbours=neighbours)
        at_least("task.loss", 0, repulsion=repulsion, repelled=repelled, margin=margin)
        at_least("task.loss", 0, threshold=None if isinstance(threshold, str) else threshold)
        self.threshold = threshold
        self.neighbours, self.repulsion, self.repelled, self.margin = neighbours, repulsion, repelled, margin

    @property
    def reach(self) -> int:
        """Number of nearest slots that the loss uses."""
        return self.neighbours + (self.repelled if self.repulsion else 0)

    def forward(self, distances: Tensor, threshold: Tensor) -> Tensor:
        """Computes the loss of the distances to the `reach` nearest slots, ascending [n, reach], by the scalar th."""
        near, far = distances[:, : self.neighbours], distances[:, self.neighbours :]
        loss = F.relu(near - threshold).mean()
        if far.shape[1]:
            loss = loss + self.repulsion * F.relu(self.margin * threshold - far).mean()
        return loss


class Score(Protocol):
    """A patch score from the distances to the nearest slots."""

    neighbours: int

    def __call__(self, distances: Tensor) -> Tensor:
        """Computes scores [n] from ascending distances [n, neighbours]."""


class NearestDistance:
    """The patch score by the distance to the nearest slot."""

    neighbours = 1

    def __call__(self, distances: Tensor) -> Tensor:
        """Computes scores [n] from distances [n, 1]."""
        return distances[:, 0]


class Softmin:
    """CFA's score, which FedDyMem follows: the nearest distance, weighted by its softmin among the K nearest.

    Args:
        neighbours: Number K of nearest slots.
    """

    def __init__(self, neighbours: int = 3) -> None:
        at_least("task.score", 1, neighbours=neighbours)
        self.neighbours = neighbours

    def __call__(self, distances: Tensor) -> Tensor:
        """Computes scores [n] from ascending distances [n, K]."""
        return F.softmin(distances, dim=1)[:, 0] * distances[:, 0]


class LocalScale:
    """The distance relative to the slot's distance of normal patches: ``min_k d_k / (r_k / r)^exponent``.

    Patches of a homogeneous surface lie close to their slot, those of a varied one far from it; without the scale,
    images of varied products have the highest scores whether anomalous or not. Not in the paper.

    Args:
        exponent: Exponent of the scale on a grid of `COARSE` patches; 0 gives the plain distance, 1 the full scale.
        neighbours: Number K of nearest slots of which the smallest scaled distance is taken: between a narrow slot and
            a wide one, a normal patch may belong to the farther.
        grid: Patches along the grid. On one finer than `COARSE`, patches see less of their surroundings and slots
            differ more: an exponent below 1 grows with the grid's square root, until that is twice as fine, and to 1
            at most.
    """

    def __init__(self, exponent: float = 0.5, neighbours: int = 1, grid: int = COARSE) -> None:
        at_least("task.image_score", 0, exponent=exponent)
        at_least("task.image_score", 1, neighbours=neighbours, grid=grid)
        finer = min(2.0, max(1.0, grid / COARSE))
        self.exponent, self.neighbours = max(exponent, min(1.0, exponent * finer**0.5)), neighbours

    def __call__(self, distances: Tensor, radii: Tensor, slots: Tensor) -> Tensor:
        """Scores images' patches [n].

        Args:
            distances: Distances to the nearest slots [n, K].
            radii: Radius of each slot [slots]; those below a tenth of the mean are raised to it.
            slots: The nearest slots [n, K].
        """
        typical = radii.mean().clamp(min=torch.finfo(radii.dtype).tiny)
        scale = (radii / typical).clamp(min=0.1) ** self.exponent
        return (distances / scale[slots]).amin(1)
