"""Rules for weights: bounds on how far one client moves them, and combinations that no single client decides.

Weights are the floating-point entries of a fixed shape that the server had sent under the same name; messages with
sets of vectors hold none, and what only clients send stays as it is. Servers average weights: a combination is
returned as the same weights from every client, whose mean is exact (`weighted_mean`). Lengths and directions are those
of the model's weights; what else is averaged is measured apart, since it hides them: changes of running statistics, and
SCAFFOLD's controls, which are gradients, are many times as long as changes of weights.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec, Update
from lit_fedad.core.bounds import at_least, within
from lit_fedad.federation.receiver import Remark
from lit_fedad.robust.aggregation import Judged, Updates, tolerated

Products = Mapping[str, Tensor]
"""Inner products of the clients' changes [N, N], by part of the weights; the model comes first."""

_MODEL, _STATISTICS = "weights", "running statistics"
_SPAN = 16_384  # weights at a time: the changes of ten clients stay in a core's cache


def weight_names(spec: MessageSpec, previous: Message) -> list[str]:
    """Lists the entries of a message that are weights; none in a message that holds a set of vectors."""
    if any(form.unordered for form in spec.values()):
        return []
    return [
        name
        for name, form in spec.items()
        if form.dtype.is_floating_point
        and not any(isinstance(size, Free) for size in form.shape)
        and name in previous
        and tuple(previous[name].shape) == form.shape
    ]


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Divides names by what stands before a slash: the model's weights have no such prefix, and come first.

    Its running statistics, of batch normalisation, follow.
    """
    parts: dict[str, list[str]] = {_MODEL: [], _STATISTICS: []}
    for name in names:
        prefix, slash, _ = name.partition("/")
        own = _STATISTICS if name.endswith(("running_mean", "running_var")) else _MODEL
        parts.setdefault(prefix if slash else own, []).append(name)
    return {part: own for part, own in parts.items() if own}


@dataclass(frozen=True)
class WeightRule(ABC):
    """A rule for weights, which names clients that lie far out; with fewer than 3 clients there is no telling who does.

    A client lies far out if its change of the weights is longer than `far` times what is usual for its number of images
    (`lengths`), or if it is among fewer than half that point against the others: its cosine with the sum of their
    directions is below `against`.

    Attributes:
        far: Factor by which a change may be longer than usual.
        against: Cosine below which a client is named.
    """

    far: float = 2.0
    against: float = -0.25

    def __post_init__(self) -> None:
        at_least("federation.robust.weights", 1, far=self.far)

    def __call__(self, updates: Updates, spec: MessageSpec, previous: Message) -> Judged:
        """Combines weights; see `RobustAggregation`."""
        names = weight_names(spec, previous)
        if not names or len(updates) < 3:
            return dict(updates), []
        sizes = {client: update.num_samples for client, update in updates.items()}
        parts = _parts(names)
        products = {part: inner_products(updates, own, previous) for part, own in parts.items()}
        combined = self.combine(updates, products, {name: previous[name] for name in names})
        remarks: dict[int, str] = {}
        for part, own in products.items():
            remarks = dict(self.name_far(lengths(own, sizes), own, part)) | remarks
        return combined, sorted(remarks.items())

    @abstractmethod
    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Combines the weights.

        Args:
            updates: Updates by client.
            products: Inner products of their changes.
            previous: The weights that the server had sent.
        """

    def name_far(self, ratios: Mapping[int, float], products: Tensor, part: str) -> list[Remark]:
        """Returns a remark on each client that lies far out.

        Where half of the clients or more pull against the rest, as those that hold different classes do, they have no
        common direction, and none is named for its own.
        """
        directions = dict(zip(ratios, cosines(products).tolist(), strict=True))
        opposed = [client for client, cosine in directions.items() if cosine < self.against]
        if 2 * len(opposed) >= len(directions):
            opposed = []
        found = []
        for client, ratio in ratios.items():
            if ratio > self.far:
                found.append((client, f"it changes the {part} {ratio:.3g} times as far as usual"))
            elif client in opposed:
                cosine = directions[client]
                found.append((client, f"it moves the {part} against the others (cosine {cosine:.2f})"))
        return [(client, f"lies far out: {line}") for client, line in found]


class NormClipping(WeightRule):
    """A bound on the length of changes, by a multiple of what is usual instead of a fixed number.

    After Sun et al. 2019, "Can you really backdoor federated learning?", section 3::

        w_n <- w + (w_n - w) min(1, far / ratio_n)    with the ratio of `lengths`

    As long as no change is longer, messages stay as they are.
    """

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Shortens changes that are too long, of each part by its own length."""
        sizes = {client: update.num_samples for client, update in updates.items()}
        combined = dict(updates)
        for part, names in _parts(list(previous)).items():
            for client, ratio in lengths(products[part], sizes).items():
                if ratio > self.far:
                    message, share = updates[client].message, self.far / ratio
                    sent = {name: previous[name].double() for name in names}
                    own = {
                        name: last + (message[name].double() - last) * share for name, last in sent.items()
                    }
                    combined[client] = _with(combined[client], own)
        return combined


class CoordinateMedian(WeightRule):
    """The median of the weights, coordinate by coordinate (Yin et al. 2018, Definition 1).

    "Byzantine-robust distributed learning", ICML 2018. All clients have the same weight. The median of an even number
    is the mean of the middle two.
    """

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Replaces all weights by their median."""
        number = len(updates)
        middle = slice((number - 1) // 2, number // 2 + 1)
        return _with_mean(updates, previous, middle)


@dataclass(frozen=True)
class TrimmedMean(WeightRule):
    """The mean without the largest and the smallest values, coordinate by coordinate (Yin et al. 2018, Definition 2).

    All clients have the same weight.

    Attributes:
        liars: Share of clients to tolerate, at least one: as many values are left out at each end.
    """

    liars: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        within("federation.robust.weights", 0, 1, liars=self.liars)

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Replaces all weights by their trimmed mean."""
        trimmed = tolerated(self.liars, len(updates))
        middle = slice(trimmed, len(updates) - trimmed)
        return _with_mean(updates, previous, middle)


@dataclass(frozen=True)
class Krum(WeightRule):
    """The clients with the most others nearby (Blanchard et al. 2017, "Machine learning with adversaries", section 4).

        ``s(i) = sum_{i -> j} |w_i - w_j|^2`` over the N - f - 2 clients j nearest to i

    Krum takes the client of the least score, multi-Krum the mean of several, weighted by data size. The guarantee needs
    2 f + 2 < N, so five clients tolerate one liar. Honest clients that differ from most are left out too.

    Attributes:
        chosen: Number of clients that are merged; 1 is Krum.
        liars: Share f / N of clients to tolerate, at least one.
    """

    chosen: int = 1
    liars: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("federation.robust.weights", 1, chosen=self.chosen)
        within("federation.robust.weights", 0, 1, liars=self.liars)

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Leaves all but the chosen clients out, by their changes of the model."""
        scores = krum_scores(next(iter(products.values())), tolerated(self.liars, len(updates)))
        best = set(scores.argsort(stable=True)[: self.chosen].tolist())
        return {client: update for row, (client, update) in enumerate(updates.items()) if row in best}


def inner_products(updates: Updates, names: list[str], previous: Message) -> Tensor:
    """Computes the inner products [N, N] of the clients' changes of all named entries, in double precision."""
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in names:
        last = previous[name].reshape(-1)
        weights = [update.message[name].reshape(-1) for update in updates.values()]
        for start in range(0, len(last), _SPAN):
            span = slice(start, start + _SPAN)
            changes = torch.stack([own[span] for own in weights]).double().sub_(last[span])
            products.addmm_(changes, changes.T)
    return products


def krum_scores(products: Tensor, liars: int) -> Tensor:
    """Computes Krum's scores.

    Args:
        products: Inner products of the changes of N clients [N, N].
        liars: Number f of liars.

    Returns:
        Sums of squared distances to the N - f - 2 nearest others, at least one, [N].
    """
    squares = (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp(min=0)
    nearest = max(1, len(products) - liars - 2)
    return squares.fill_diagonal_(torch.inf).sort(1).values[:, :nearest].sum(1)


def lengths(products: Tensor, sizes: Mapping[int, int]) -> dict[int, float]:
    """Computes how long each client's change is, as a multiple of what is usual for its number of images.

    Usual is the median length of all clients; for clients with more images than the median, which take more steps, so
    many times more.

    Args:
        products: Inner products of the changes [N, N].
        sizes: Number of images by client.
    """
    norms = products.diagonal().sqrt().tolist()
    usual, images = statistics.median_low(norms), statistics.median_low(sizes.values())
    found = {}
    for (client, size), own in zip(sizes.items(), norms, strict=True):
        allowed = usual * max(1.0, size / max(1, images))
        found[client] = own / allowed if allowed > 0 else 1.0 if own == 0 else math.inf
    return found


def cosines(products: Tensor) -> Tensor:
    """Computes the cosine [N] of each change with the sum of the others' directions, so that none of them decides."""
    norms = products.diagonal().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    directions = products / norms[:, None] / norms
    own, sums = directions.diagonal(), directions.sum(0)
    squares = directions.sum() - 2 * sums + own
    return (sums - own) / squares.clamp(min=1e-12).sqrt()


def _with(update: Update, weights: Message) -> Update:
    """Returns the update with other weights, in the type of its own."""
    own = {name: entry.to(update.message[name].dtype) for name, entry in weights.items()}
    return Update({**update.message, **own}, update.num_samples)


def _with_mean(updates: Updates, names: Iterable[str], ranks: slice) -> dict[int, Update]:
    """Gives every update the mean of some ranks of the sorted weights, coordinate by coordinate."""

    def mean(name: str) -> Tensor:
        sent = torch.stack([update.message[name].double() for update in updates.values()])
        return sent.sort(0).values[ranks].mean(0)

    weights = {name: mean(name) for name in names}
    return {client: _with(update, weights) for client, update in updates.items()}
