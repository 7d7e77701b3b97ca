"""Functions of the distances of patches to memory slots: the loss in training, and the scores."""

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

    It is ``mean_k max(0, |m - m'_k| - th)`` over the K nearest slots, plus ``repulsion`` times
    ``mean_j max(0, margin th - |m - m'_j|)`` over the next J slots. The second term is CFA's, and the paper lacks it;
    without it attraction may contract the features.

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
        """Computes the loss from ascending distances to the `reach` nearest slots [n, reach] and the scalar th."""
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
    """The distance to the nearest slot as patch score."""

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
    """The distance relative to the usual distance of normal patches to the slot: ``min_k d_k / (r_k / r)^exponent``.

    Patches of a homogeneous surface lie close to their slot, those of a varied one far from it. Without the scale,
    images of varied products have the highest scores whether anomalous or not. The paper has no such score.

    Args:
        exponent: Exponent of the scale on a grid of `COARSE` patches; 0 gives the plain distance, 1 the full scale.
        neighbours: Number K of nearest slots over which the smallest scaled distance is taken: a normal patch between a
            narrow slot and a wide one may belong to the wide one, though it is farther away.
        grid: Number of patches along the grid. On grids finer than `COARSE`, patches see less of their surroundings and
            slots differ more. There an exponent below 1 is multiplied by the square root of grid / COARSE, up to a grid
            twice as fine, and to 1 at most.
    """

    def __init__(self, exponent: float = 0.5, neighbours: int = 1, grid: int = COARSE) -> None:
        at_least("task.image_score", 0, exponent=exponent)
        at_least("task.image_score", 1, neighbours=neighbours, grid=grid)
        fineness = min(2.0, max(1.0, grid / COARSE))
        self.exponent, self.neighbours = max(exponent, min(1.0, exponent * fineness**0.5)), neighbours

    def __call__(self, distances: Tensor, radii: Tensor, slots: Tensor) -> Tensor:
        """Computes scores of patches [n].

        Args:
            distances: Distances to the nearest slots [n, K].
            radii: Radius of each slot [slots]; radii below a tenth of the mean are raised to a tenth.
            slots: Numbers of the nearest slots [n, K].
        """
        typical = radii.mean().clamp(min=torch.finfo(radii.dtype).tiny)
        scale = (radii / typical).clamp(min=0.1) ** self.exponent
        return (distances / scale[slots]).amin(1)
