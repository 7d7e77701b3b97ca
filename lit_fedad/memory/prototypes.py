"""Class prototypes: one feature vector for each class; the prototypes of some classes may be unknown."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Prototypes:
    """At most one vector for each class.

    Attributes:
        vectors: Prototypes [K, D]; zeros for a class that has none.
        known: Whether each class has one, bool [K].
    """

    vectors: Tensor
    known: Tensor

    @classmethod
    def none(cls, classes: int, width: int) -> Prototypes:
        """Creates K classes without a prototype of D features."""
        return cls(torch.zeros(classes, width), torch.zeros(classes, dtype=torch.bool))

    @classmethod
    def unpack(cls, vectors: Tensor, members: Tensor, classes: int) -> Prototypes:
        """Spreads the known prototypes over all classes: the inverse of `pack`.

        Args:
            vectors: Known prototypes [n, D].
            members: Their classes, int64 [n].
            classes: Number of classes K.
        """
        known = torch.zeros(classes, dtype=torch.bool).index_fill(0, members, True)
        return cls(vectors.new_zeros(classes, vectors.shape[1]).index_copy(0, members, vectors), known)

    def pack(self) -> tuple[Tensor, Tensor]:
        """Selects the known prototypes [n, D] and their classes, int64 [n]."""
        members = self.known.nonzero().squeeze(1)
        return self.vectors[members], members

    def moved(self, newer: Prototypes, beta: float) -> Prototypes:
        """Computes the moving average with newer prototypes; new classes are copied (GLDP Eq. 9, GLDP Eq. 11).

        It is ``beta C + (1 - beta) C'`` for classes known to both, and the only known prototype for other classes.

        Args:
            newer: Newer prototypes C'.
            beta: Share of the old prototypes C.
        """
        both = self.known & newer.known
        averaged = beta * self.vectors + (1 - beta) * newer.vectors
        vectors = torch.where(both[:, None], averaged, self.renewed(newer).vectors)
        return Prototypes(vectors, self.known | newer.known)

    def renewed(self, newer: Prototypes) -> Prototypes:
        """Replaces the prototype of every class that has a newer one."""
        return Prototypes(
            torch.where(newer.known[:, None], newer.vectors, self.vectors), self.known | newer.known
        )

    def logits(self, features: Tensor) -> Tensor:
        """Computes class logits: minus the Euclidean distance to the prototype of each class (GLDP Eq. 13).

        Args:
            features: Features [B, D].

        Returns:
            Logits [B, K]; -inf for classes without a prototype.
        """
        # Without matrix products, which lose small distances between features that lie far from zero.
        vectors = self.vectors.to(features.device).float()
        distances = torch.cdist(features.float(), vectors, compute_mode="donot_use_mm_for_euclid_dist")
        return (-distances).masked_fill(~self.known.to(features.device), -torch.inf)


def class_means(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Computes the mean feature of each class (GLDP Eq. 6); gradients reach the features.

    Args:
        features: Features [B, D].
        labels: Classes, int64 [B], below K.
        classes: Number of classes K.

    Returns:
        Means [K, D], zero for classes without an image; images of each class, int64 [K].
    """
    member = F.one_hot(labels, classes)
    counts = member.sum(0)
    return member.T.to(features.dtype) @ features / counts.clamp(min=1)[:, None], counts


# Checkpoints hold Prototypes. They are read as data (`weights_only`), which refuses unregistered classes.
torch.serialization.add_safe_globals([Prototypes])
