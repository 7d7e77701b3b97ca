"""How the statistics of features add up: from each client's counts, means and covariances to sums, and back.

A client adds shares: with n the largest number of vectors that all clients together can have, it adds ``n_i / n m_i``
for its mean m_i of n_i vectors. So sums have the magnitude of single features, and fixed point loses least.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Cohort, Free, Message, MessageSpec, SumSpec, TensorSpec
from lit_fedad.memory.moments import in_filled_sets, upper_triangle

Parts = Mapping[str, Tensor]

LARGEST_FEATURE = 2.0**12
"""Largest magnitude of a feature for which the declared bounds of sums hold."""

LARGEST_RESIDUAL = 2.0**9
"""Largest root mean square of distances and residuals for which the declared bounds of sums hold."""

MOST_STAGES = 64
"""Largest ratio of the images in sums by slot, which include those of earlier stages, to the images of this stage."""


@dataclass(frozen=True)
class FeatureSums:
    """The base of additions of statistics of feature vectors.

    Attributes:
        vectors_per_image: Largest number of vectors that a statistic counts for an image.
    """

    vectors_per_image: int

    def _vectors(self, asked: Cohort) -> int:
        return asked.images * self.vectors_per_image


class ChannelSums(FeatureSums):
    """The addition of ``count``, ``mean`` and ``variance`` [C]."""

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares the number of vectors, and sums of their values and squares."""
        shape = _sizes(spec["mean"])
        return {
            "count": SumSpec((), self._vectors(asked), whole=True),
            "total": SumSpec(shape, LARGEST_FEATURE),
            "square": SumSpec(shape, LARGEST_FEATURE**2),
        }

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Computes a client's sums."""
        share, mean = message["count"].double() / self._vectors(asked), message["mean"].double()
        square = message["variance"].double() + mean.square()
        return {"count": message["count"], "total": share * mean, "square": share * square}

    def from_sums(self, sums: Parts, spec: MessageSpec, answered: Cohort, asked: Cohort) -> Message:
        """Computes the statistics of all vectors."""
        share = (sums["count"].double() / self._vectors(asked)).clamp(min=1e-300)
        mean = sums["total"] / share
        variance = (sums["square"] / share - mean.square()).clamp(min=0)
        return {"count": sums["count"], "mean": mean.float(), "variance": variance.float()}


class MomentSums(FeatureSums):
    """The addition of ``count`` [n], ``mean`` [k, C] and ``covariance`` [k, C (C + 1) / 2] of n sets, k with vectors.

    A client without new vectors has no rows; secure aggregation puts zeros in their place, so that the sum does not
    tell which clients have some.
    """

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares the number of vectors of each set, and the sums of their values and products."""
        count, mean, covariance = (_sizes(spec[name]) for name in ("count", "mean", "covariance"))
        return {
            "count": SumSpec(count, self._vectors(asked), whole=True),
            "total": SumSpec(mean, LARGEST_FEATURE),
            "product": SumSpec(covariance, LARGEST_FEATURE**2),
        }

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Computes a client's sums by set: zeros for a set without vectors, and no rows for a message without sets."""
        counts, mean = message["count"], message["mean"].double()
        share = counts[counts > 0].double()[:, None] / self._vectors(asked)
        product = message["covariance"].double() + _products(mean)
        parts = {"total": share * mean, "product": share * product}
        return {"count": counts, **{name: in_filled_sets(part, counts > 0) for name, part in parts.items()}}

    def from_sums(self, sums: Parts, spec: MessageSpec, answered: Cohort, asked: Cohort) -> Message:
        """Computes the moments of all vectors; there is no set if no client has sent a vector."""
        count = sums["count"] if bool(sums["count"].any()) else sums["count"][:0]
        filled = sums["count"] > 0
        share = sums["count"][filled].double()[:, None] / self._vectors(asked)
        mean = sums["total"][filled] / share
        covariance = sums["product"][filled] / share - _products(mean)
        return {"count": count, "mean": mean.float(), "covariance": covariance.float()}


class ClusterSums(FeatureSums):
    """The addition of ``squares`` and ``counts`` [K] of clusters, which are sums already."""

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares sums."""
        vectors, shape = self._vectors(asked), _sizes(spec["counts"])
        return {
            "squares": SumSpec(shape, vectors * LARGEST_RESIDUAL**2),
            "counts": SumSpec(shape, vectors, whole=True),
        }

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Returns the message, with the counts as whole numbers."""
        return {"squares": message["squares"], "counts": message["counts"].round().long()}

    def from_sums(self, sums: Parts, spec: MessageSpec, answered: Cohort, asked: Cohort) -> Message:
        """Returns the sums in the form of a message."""
        return {"squares": sums["squares"].clamp(min=0).float(), "counts": sums["counts"].float()}


@dataclass(frozen=True)
class SlotMeans(FeatureSums):
    """The addition of ``memory`` [slots, C], ``counts``, ``radii`` and ``image_counts`` [slots], and of moments.

    With n_k the number of patches nearest to slot k, m_k their mean and r_k its radius, sums are of ``n_k m_k`` and
    ``n_k r_k^2``.

    Attributes:
        moments: The addition of the moments in the same message; None where there are none.
    """

    moments: MomentSums | None

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares sums by slot."""
        max_vectors, shape = self._vectors(asked) * MOST_STAGES, _sizes(spec["counts"])
        forms = {
            "rows": SumSpec(_sizes(spec["memory"]), max_vectors * LARGEST_FEATURE),
            "counts": SumSpec(shape, max_vectors, whole=True),
            "squares": SumSpec(shape, max_vectors * LARGEST_RESIDUAL**2),
        }
        if "image_counts" in spec:
            forms["image_counts"] = SumSpec(shape, asked.images * MOST_STAGES, whole=True)
        return forms | (self.moments.sum_spec(spec, asked) if self.moments else {})

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Computes a client's sums."""
        counts = message["counts"].double()
        sums = {
            "rows": counts[:, None] * message["memory"].double(),
            "counts": counts.round().long(),
            "squares": counts * message["radii"].double().square(),
        }
        if "image_counts" in message:
            sums["image_counts"] = message["image_counts"]
        return sums | (self.moments.summands(message, client, asked) if self.moments else {})

    def from_sums(self, sums: Parts, spec: MessageSpec, answered: Cohort, asked: Cohort) -> Message:
        """Computes the mean patch, counts and radius of each slot; all are 0 for a slot without a patch."""
        counts = sums["counts"].double()
        message = {
            "memory": (sums["rows"] / counts.clamp(min=1)[:, None]).float(),
            "counts": counts.float(),
            "radii": (sums["squares"].clamp(min=0) / counts.clamp(min=1)).sqrt().float(),
        }
        if "image_counts" in spec:
            message["image_counts"] = sums["image_counts"]
        return message | (self.moments.from_sums(sums, spec, answered, asked) if self.moments else {})


class PrototypeSums:
    """The addition of ``count`` [n, K], ``mean`` [n, K, C] and ``within`` [n, C (C + 1) / 2]; n is 0 or 1.

    Features have length 1. Summed are products of the features themselves: products of their deviations from the
    classes' means (``within``) do not add up.
    """

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares sums of features by class, and of products, each as a share of the mean over all images."""
        count, mean, within = (_sizes(spec[name]) for name in ("count", "mean", "within"))
        return {
            "count": SumSpec(count, asked.images, whole=True),
            "total": SumSpec(mean, 1.0, exact=True),
            "product": SumSpec(within, 1.0, exact=True),
        }

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Computes a client's sums; they have no rows if its message has none."""
        share = message["count"].double()[..., None] / asked.images
        total = share * message["mean"].double()
        product = share.sum(1) * message["within"].double() + _between(total, message["mean"].double())
        return {"count": message["count"], "total": total, "product": product}

    def from_sums(self, sums: Parts, spec: MessageSpec, answered: Cohort, asked: Cohort) -> Message:
        """Computes the statistics of all images; n is 0 if no client has sent any."""
        count = sums["count"] if bool(sums["count"].any()) else sums["count"][:0]
        share = count.double()[..., None] / asked.images
        total = sums["total"][: len(count)]
        mean = total / share.clamp(min=1e-300)
        within = (sums["product"][: len(count)] - _between(total, mean)) / share.sum(1).clamp(min=1e-300)
        return {
            "count": count,
            "mean": mean.clamp(-1, 1).float(),
            "within": within.clamp(-1, 1).float(),
        }


def _products(means: Tensor) -> Tensor:
    """Computes the products ``m m^T`` of means [n, C], packed like covariances [n, C (C + 1) / 2]."""
    rows, columns = torch.triu_indices(means.shape[1], means.shape[1])
    return means[:, rows] * means[:, columns]


def _between(totals: Tensor, means: Tensor) -> Tensor:
    """Computes ``sum_k t_k m_k^T`` of totals and means [n, K, C], packed [n, C (C + 1) / 2]."""
    products = totals.mT @ means
    return upper_triangle((products + products.mT) / 2)


def _sizes(form: TensorSpec) -> tuple[int, ...]:
    """Returns the largest shape that a declared form allows."""
    sizes = [size.at_most if isinstance(size, Free) else size for size in form.shape]
    if any(size is None for size in sizes):
        raise TypeError("a size without a bound has no sum")
    return tuple(int(size) for size in sizes if size is not None)
