"""Rules for weights: bounds on how far one client moves them, and combinations that no single client decides.

Weights are the floating-point entries of a fixed shape that the server has sent under the same name; messages with sets
of vectors have none, and entries that only clients send stay unchanged. Servers average weights, so a rule returns its
combination as equal weights from every client, whose mean is exact (`weighted_mean`). Lengths and directions are
measured for each part of the weights separately, because some parts would hide the model's weights: changes of running
statistics, and of SCAFFOLD's controls, which are gradients, are many times as long as changes of weights.
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

_MODEL, _STATISTICS = "weights", "running statistics"  # names of parts in remarks
_SPAN = 16_384  # number of weights at a time, so that the changes of ten clients fit into a core's cache


def weight_names(spec: MessageSpec, previous: Message) -> list[str]:
    """Lists the entries of a message that are weights; empty for a message with a set of vectors."""
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
    """Groups the names of entries by part of the weights.

    The model's weights come first, then its running statistics of batch normalisation; neither has a prefix. Other
    parts are groups of names with the same prefix before a slash.
    """
    parts: dict[str, list[str]] = {_MODEL: [], _STATISTICS: []}
    for name in names:
        prefix, slash, _ = name.partition("/")
        of_model = _STATISTICS if name.endswith(("running_mean", "running_var")) else _MODEL
        parts.setdefault(prefix if slash else of_model, []).append(name)
    return {part: part_names for part, part_names in parts.items() if part_names}


@dataclass(frozen=True)
class WeightRule(ABC):
    """A rule for weights, which names clients that are outliers; it does nothing with fewer than 3 clients.

    A client is an outlier if its change of the weights is longer than `max_length_ratio` times the usual length for its
    number of images (`lengths`). It also is one if its change points against the others (its cosine with the sum
    of their directions is below `min_cosine`), unless half of the clients or more do so.

    Attributes:
        max_length_ratio: Largest factor by which a change may be longer than usual.
        min_cosine: Cosine below which a change points against the others.
    """

    max_length_ratio: float = 2.0
    min_cosine: float = -0.25

    def __post_init__(self) -> None:
        at_least("federation.robust.weights", 1, max_length_ratio=self.max_length_ratio)
        within("federation.robust.weights", -1, 1, min_cosine=self.min_cosine)

    def __call__(self, updates: Updates, spec: MessageSpec, previous: Message) -> Judged:
        """Combines weights; see `RobustAggregation`."""
        names = weight_names(spec, previous)
        if not names or len(updates) < 3:
            return dict(updates), []
        sizes = {client: update.num_samples for client, update in updates.items()}
        parts = _parts(names)
        products = {part: inner_products(updates, entries, previous) for part, entries in parts.items()}
        combined = self.combine(updates, products, {name: previous[name] for name in names})
        remarks: dict[int, str] = {}
        for part, matrix in products.items():
            remarks = dict(self.name_far(lengths(matrix, sizes), matrix, part)) | remarks
        return combined, sorted(remarks.items())

    @abstractmethod
    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Combines the weights.

        Args:
            updates: Updates by client.
            products: Inner products of the clients' changes, by part.
            previous: The weights that the server has sent.
        """

    def name_far(self, ratios: Mapping[int, float], products: Tensor, part: str) -> list[Remark]:
        """Returns a remark on each client that is an outlier in a part of the weights.

        `ratios` are those of `lengths`. If half of the clients or more point against the others, as clients with
        different classes do, there is no common direction, and none is named for its direction.
        """
        directions = dict(zip(ratios, cosines(products).tolist(), strict=True))
        opposed = [client for client, cosine in directions.items() if cosine < self.min_cosine]
        if 2 * len(opposed) >= len(directions):
            opposed = []
        lines = []
        for client, ratio in ratios.items():
            if ratio > self.max_length_ratio:
                lines.append((client, f"it changes the {part} {ratio:.3g} times as far as usual"))
            elif client in opposed:
                cosine = directions[client]
                lines.append((client, f"it moves the {part} against the others (cosine {cosine:.2f})"))
        return [(client, f"is an outlier: {line}") for client, line in lines]


class NormClipping(WeightRule):
    """A bound on the length of changes: a multiple of the usual length instead of a fixed number.

    After Sun et al. 2019, "Can you really backdoor federated learning?", section 3::

        w_n <- w + (w_n - w) min(1, max_length_ratio / ratio_n)    with the ratio of `lengths`

    If no change is longer, messages stay unchanged.
    """

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Shortens changes that are too long; each part of the weights is judged by its own length."""
        sizes = {client: update.num_samples for client, update in updates.items()}
        combined = dict(updates)
        for part, names in _parts(list(previous)).items():
            for client, ratio in lengths(products[part], sizes).items():
                if ratio > self.max_length_ratio:
                    message, share = updates[client].message, self.max_length_ratio / ratio
                    sent = {name: previous[name].double() for name in names}
                    shortened = {
                        name: last + (message[name].double() - last) * share for name, last in sent.items()
                    }
                    combined[client] = _with(combined[client], shortened)
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
        malicious_share: Share of malicious clients to tolerate, at least one client; as many values are left
            out at each end.
    """

    malicious_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        within("federation.robust.weights", 0, 1, malicious_share=self.malicious_share)

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Replaces all weights by their trimmed mean."""
        trimmed = tolerated(self.malicious_share, len(updates))
        middle = slice(trimmed, len(updates) - trimmed)
        return _with_mean(updates, previous, middle)


@dataclass(frozen=True)
class Krum(WeightRule):
    """The clients with the most others nearby (Blanchard et al. 2017, "Machine learning with adversaries", section 4).

        ``s(i) = sum_{i -> j} |w_i - w_j|^2`` over the N - f - 2 clients j nearest to i

    Krum takes the client with the smallest score, multi-Krum the mean of several clients, weighted by data size. The
    guarantee needs 2 f + 2 < N, so five clients tolerate one that is malicious. Honest clients that differ from most
    are left out too.

    Attributes:
        merged_clients: Number of clients that are merged; 1 is Krum.
        malicious_share: Share f / N of malicious clients to tolerate, at least one client.
    """

    merged_clients: int = 1
    malicious_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("federation.robust.weights", 1, merged_clients=self.merged_clients)
        within("federation.robust.weights", 0, 1, malicious_share=self.malicious_share)

    def combine(self, updates: Updates, products: Products, previous: Message) -> dict[int, Update]:
        """Leaves out all clients but the merged ones; scores are computed from the first part, the model's weights."""
        scores = krum_scores(next(iter(products.values())), tolerated(self.malicious_share, len(updates)))
        best = set(scores.argsort(stable=True)[: self.merged_clients].tolist())
        return {client: update for row, (client, update) in enumerate(updates.items()) if row in best}


def inner_products(updates: Updates, names: list[str], previous: Message) -> Tensor:
    """Computes the inner products [N, N] of the clients' changes of all named entries, in double precision."""
    products = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name in names:
        last = previous[name].reshape(-1)
        weights = [update.message[name].reshape(-1) for update in updates.values()]
        for start in range(0, len(last), _SPAN):
            span = slice(start, start + _SPAN)
            changes = torch.stack([flat[span] for flat in weights]).double().sub_(last[span])
            products.addmm_(changes, changes.T)
    return products


def krum_scores(products: Tensor, malicious: int) -> Tensor:
    """Computes Krum's scores.

    Args:
        products: Inner products of the changes of N clients [N, N].
        malicious: Number f of malicious clients.

    Returns:
        For each client, the sum of squared distances to its N - f - 2 (at least one) nearest others [N].
    """
    squares = (products.diagonal()[:, None] + products.diagonal() - 2 * products).clamp(min=0)
    nearest = max(1, len(products) - malicious - 2)
    return squares.fill_diagonal_(torch.inf).sort(1).values[:, :nearest].sum(1)


def lengths(products: Tensor, sizes: Mapping[int, int]) -> dict[int, float]:
    """Computes the length of each client's change as a multiple of the usual length for its number of images.

    The usual length is the median over all clients. For clients with more images than the median, which take more
    steps, it is multiplied by the ratio of the numbers of images.

    Args:
        products: Inner products of the changes [N, N].
        sizes: Number of images by client.
    """
    norms = products.diagonal().sqrt().tolist()
    usual, images = statistics.median_low(norms), statistics.median_low(sizes.values())
    ratios = {}
    for (client, size), norm in zip(sizes.items(), norms, strict=True):
        expected = usual * max(1.0, size / max(1, images))
        ratios[client] = norm / expected if expected > 0 else 1.0 if norm == 0 else math.inf
    return ratios


def cosines(products: Tensor) -> Tensor:
    """Computes the cosine [N] of each change with the sum of the other changes' directions, from `products` [N, N]."""
    norms = products.diagonal().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    pairwise = products / norms[:, None] / norms
    own, sums = pairwise.diagonal(), pairwise.sum(0)
    squares = pairwise.sum() - 2 * sums + own
    return (sums - own) / squares.clamp(min=1e-12).sqrt()


def _with(update: Update, weights: Message) -> Update:
    """Returns the update with other weights, converted to the types of its entries."""
    converted = {name: entry.to(update.message[name].dtype) for name, entry in weights.items()}
    return Update({**update.message, **converted}, update.num_samples)


def _with_mean(updates: Updates, names: Iterable[str], ranks: slice) -> dict[int, Update]:
    """Replaces weights in all updates by the mean over some ranks of the clients' sorted values, by coordinate."""

    def mean(name: str) -> Tensor:
        sent = torch.stack([update.message[name].double() for update in updates.values()])
        return sent.sort(0).values[ranks].mean(0)

    weights = {name: mean(name) for name in names}
    return {client: _with(update, weights) for client, update in updates.items()}
