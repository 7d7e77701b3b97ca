"""False alarms and misses of the decisions that a run ships, client by client and product by product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Message, MessageSpec, TensorSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.data.sample import grouped
from lit_fedad.federation.evaluator import ClientQuery, QueriedFederation
from lit_fedad.metrics.conformal import Alpha, Calibration, rounded_up, wilson_interval
from lit_fedad.metrics.federated import Summary, summary, with_products

RATES = ("false_alarm_rate", "miss_rate", "false_alarm_rate_foreign", "miss_rate_foreign")
"""Names of the rates: of products that a client holds, and of all others."""


@dataclass(frozen=True)
class EvaluatedImages:
    """Test images by which decisions are judged.

    Attributes:
        labels: 0 for a normal image, 1 for an anomalous one, int64 [n].
        products: Product of each image; None where an image belongs to none, as anomalies of foreign classes do.
        held: Number of each client's training images by client and product, of the products that it holds.
        known: Whether a decision may depend on an image's product.
    """

    labels: Tensor
    products: Sequence[str | None]
    held: Mapping[int, Mapping[str, int]]
    known: bool


@dataclass
class Rate:
    """Numbers of normal images, of false alarms among them, of anomalous images, and of misses among them."""

    normal: float = 0
    false_alarms: float = 0
    anomalous: float = 0
    misses: float = 0

    @classmethod
    def of(cls, labels: Tensor, alarms: Tensor) -> Rate:
        """Counts decisions [n] about images with labels [n]."""
        anomalous = labels != 0
        counts = (~anomalous, alarms & ~anomalous, anomalous, ~alarms & anomalous)
        return cls(*(int(chosen.sum()) for chosen in counts))

    def __add__(self, other: Rate) -> Rate:
        return Rate(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @classmethod
    def mixed(cls, parts: Sequence[tuple[float, Rate]]) -> Rate:
        """Mixes rates of products by weight, such as the number of images that a client has of each.

        Returns:
            The weighted mean rates, of an effective number of images: (sum w)^2 / sum(w^2 / n).
        """
        normal = [(weight, rate.normal, rate.false_alarms) for weight, rate in parts if rate.normal]
        anomalous = [(weight, rate.anomalous, rate.misses) for weight, rate in parts if rate.anomalous]
        return cls(*_mean(normal), *_mean(anomalous))

    @property
    def false_alarm_rate(self) -> float:
        """Share of normal images that are called anomalous; NaN without one."""
        return self.false_alarms / self.normal if self.normal else math.nan

    @property
    def miss_rate(self) -> float:
        """Share of anomalous images that are called normal; NaN without one."""
        return self.misses / self.anomalous if self.anomalous else math.nan

    def to_json(self) -> dict[str, Any]:
        """Returns numbers, rates, and 95 % intervals of rates that are seen in so many images."""
        return {
            **vars(self),
            "false_alarm_rate": self.false_alarm_rate,
            "interval": list(wilson_interval(self.false_alarms, self.normal)),
            "miss_rate": self.miss_rate,
            "miss_interval": list(wilson_interval(self.misses, self.anomalous)),
        }


class DecisionsQuery(ClientQuery[dict[str | None, Rate]]):
    """The query how many of a client's own test images are judged rightly and wrongly, by product.

    Anomalies that belong to no product, as those of foreign classes, are counted under None.

    Args:
        products: Names of all clients' products.
        limits: Score above which an image is called anomalous, by product.
        images: The client's test images; None on the server.
        scores: Scores these images with the live client; None on the server.
        shipped: Whether the limits are those that the detector is shipped with, which a client may report by.
    """

    def __init__(
        self,
        products: Sequence[str],
        limits: Mapping[str, float],
        images: EvaluatedImages | None = None,
        scores: Callable[[Client], Tensor] | None = None,
        shipped: bool = True,
    ) -> None:
        self.name = "decisions" if shipped else "further decisions"
        self.products, self.numbers = [*products, None], limits
        self.images, self.scores = images, scores

    def __call__(self, client: Client, number: int) -> dict[str | None, Rate]:
        """Decides about every test image of the client."""
        assert self.images is not None
        assert self.scores is not None
        return rates_of(self.scores(client), self.images, self.numbers)

    discloses = (
        counted(
            "numbers of test images above limits that the coordinator sets, rightly and wrongly, by product"
        ),
    )

    def pack(self, answer: dict[str | None, Rate]) -> Message:
        """Returns the four counts of `Rate` by product, then those of no product, int64 [products + 1, 4]."""
        rates = [answer.get(product, Rate()) for product in self.products]
        return {"rates": torch.tensor([[int(value) for value in vars(rate).values()] for rate in rates])}

    def spec(self) -> MessageSpec:
        """Declares four counts a product."""
        return {"rates": TensorSpec((len(self.products), 4), torch.int64, low=0, high=1e8, counted=True)}

    def unpack(self, message: Message) -> dict[str | None, Rate]:
        """Builds the counts by product, of products with test images.

        Raises:
            UserError: If more decisions are wrong than there are images.
        """
        rates = {}
        for product, row in zip(self.products, message["rates"].tolist(), strict=True):
            rate = Rate(*row)
            if rate.false_alarms > rate.normal or rate.misses > rate.anomalous:
                raise UserError(f"more decisions about {product or 'no product'} are wrong than there are")
            if rate.normal or rate.anomalous:
                rates[product] = rate
        return rates


def limit_of(limits: Mapping[str, float], product: str | None) -> float:
    """Returns the score above which an image of a product is called anomalous.

    Where anomalies belong to no product (None), limits do not depend on it.
    """
    return max(limits.values(), default=math.inf) if product is None else limits.get(product, math.inf)


def rates_of(scores: Tensor, images: EvaluatedImages, limits: Mapping[str, float]) -> dict[str | None, Rate]:
    """Counts decisions about images by product: scores [n] above the limit of their product are anomalous."""
    rates = {}
    for product, indices in grouped((product, i) for i, product in enumerate(images.products)).items():
        positions = torch.tensor(indices)
        rates[product] = Rate.of(
            images.labels[positions], scores[positions].double() > limit_of(limits, product)
        )
    return rates


def judged(
    rates: Mapping[str | None, Rate], held: Mapping[str, float], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Describes one client's decisions.

    Its own products count as often as it holds them, however many test images they have: decisions are calibrated for
    the images that the client has. Other products count alike.

    Args:
        rates: Decisions by product; under None those about anomalies that belong to no product.
        held: Number of the client's images by product.
        limits: Score above which an image is called anomalous, by product.

    Returns:
        ``own`` and ``foreign``, a mixed `Rate` each; ``products``, one by product; ``held``, the number of the client's
        images of each product of ``own``; and ``without_promise``, the products about which no promise can be made.
    """
    products = {name: rate for name, rate in rates.items() if name is not None}
    own = [name for name in products if held.get(name)]
    return {
        "own": Rate.mixed([(held[name], products[name]) for name in own]) + rates.get(None, Rate()),
        "foreign": Rate.mixed([(1, rate) for name, rate in products.items() if not held.get(name)]),
        "products": products,
        "held": {name: held[name] for name in own},
        "without_promise": [name for name in products if math.isinf(limits[name])],
    }


def decide(
    scores: Mapping[int, Tensor], images: EvaluatedImages, calibration: Calibration, alpha: Alpha
) -> dict[int, dict[str, Any]]:
    """Judges every client's decisions about the test images, given their scores [n] by client.

    Returns:
        What `judged` returns, by client; ``promised``, the client's rate of false alarms; and ``deciding``, how many
        calibration scores decide about each of its products, or about any image.
    """
    products = [name for name in dict.fromkeys(images.products) if name is not None]
    by_client = {}
    for client, own_scores in scores.items():
        limits = limits_of(client, calibration, products, alpha, images.known)
        by_client[client] = judged(rates_of(own_scores, images, limits), images.held[client], limits)
        by_client[client] |= _promise(client, calibration, by_client[client]["held"], alpha, images.known)
    return by_client


def decide_apart(
    federation: QueriedFederation,
    calibration: Calibration,
    products: Sequence[str],
    held: Mapping[int, Mapping[str, float]],
    alpha: Alpha,
    by_product: bool,
    shipped: bool,
) -> dict[int, dict[str, Any]]:
    """Has every client judge test images of its own at the limits that its calibration gives.

    Args:
        federation: The federation.
        calibration: Calibration scores of all clients.
        products: Names of all clients' products.
        held: Number of each client's images by product.
        alpha: Promised rate of false alarms.
        by_product: Whether limits depend on the product.
        shipped: Whether this is the rate that the detector is shipped with.

    Returns:
        The same as `decide`; without images of a client that has not answered.
    """
    groups = grouped(
        (tuple(limits_of(client, calibration, products, alpha, by_product).values()), client)
        for client in federation.clients
    )
    by_client: dict[int, dict[str, Any]] = {}
    # Clients with the same limits are asked together; no client sees the limits of others.
    for values, clients in groups.items():
        limits = dict(zip(products, values, strict=True))
        query = DecisionsQuery(products, limits, shipped=shipped)
        answers = federation.ask(federation.rounds, query, clients, optional=True)
        for client in clients:
            by_client[client] = judged(answers.get(client, {}), held[client], limits)
            by_client[client] |= _promise(client, calibration, by_client[client]["held"], alpha, by_product)
    return by_client


def _promise(
    client: int, calibration: Calibration, held: Mapping[str, float], alpha: Alpha, by_product: bool
) -> dict[str, Any]:
    """Describes what a client promises: averaged over its products, as its false alarms are, and by how many scores."""
    weights: dict[str | None, float] = {None: 1}
    if by_product and held:
        weights = dict(held.items())
    rules = {name: calibration.rule(client, alpha, name) for name in weights}
    mean = sum(weights[name] * rule.alpha for name, rule in rules.items()) / sum(weights.values())
    promised = rounded_up(mean) if isinstance(alpha, str) else alpha
    return {"promised": promised, "deciding": [rule.scores.total for rule in rules.values()]}


def limits_of(
    client: int, calibration: Calibration, products: Sequence[str], alpha: Alpha, by_product: bool
) -> dict[str, float]:
    """Returns a client's limits by product; the same for all where they do not depend on it."""
    return {name: calibration.threshold(client, alpha, name if by_product else None) for name in products}


def summarise_rates(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, Summary]:
    """Computes mean, worst, pooled, per-client and per-product values of `RATES` from what `decide` returns."""
    summaries, per_product, pooled, of_products = {}, {}, pooled_rates(by_client), product_rates(by_client)
    for name in RATES:
        side = "foreign" if name.endswith("_foreign") else "own"
        kind = name.removesuffix("_foreign")
        values = {client: getattr(decisions[side], kind) for client, decisions in sorted(by_client.items())}
        summaries[name] = summary(values, getattr(pooled[side], kind), max)
        per_product[name] = {product: getattr(rate, kind) for product, rate in of_products[side].items()}
    return with_products(summaries, per_product)


def promised_rates(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Returns mean, lowest and highest of the rates that clients promise, of those that false alarms are averaged over.

    These are the clients with normal test images of their own products; all where none has one. The mean of rates that
    differ is rounded up, so that it is never less than what clients promise.
    """
    measured = [decisions["promised"] for decisions in by_client.values() if decisions["own"].normal]
    rates = measured or [decisions["promised"] for decisions in by_client.values()]
    low, high = min(rates), max(rates)
    mean = low if low == high else rounded_up(sum(rates) / len(rates))
    return {"mean": mean, "lowest": low, "highest": high}


def product_rates(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Rate]]:
    """Averages what `decide` returns of each product over the clients that hold it, and over those that do not.

    Clients of one run judge the same images, so the numbers of images are those of one client: further clients make no
    interval narrower. Sites judge images of their own; their numbers are then the mean of those that have the product.

    Returns:
        Rates by side, ``own`` and ``foreign``, and product; without images where no client is on that side.
    """
    by_side: dict[str, dict[str, Rate]] = {"own": {}, "foreign": {}}
    for product in dict.fromkeys(name for decisions in by_client.values() for name in decisions["products"]):
        for side, rates in by_side.items():
            judging = [decisions for decisions in by_client.values() if product in decisions["products"]]
            chosen = [decisions for decisions in judging if (product in decisions["held"]) == (side == "own")]
            together = sum((decisions["products"][product] for decisions in chosen), Rate())
            rates[product] = Rate(*(count / max(len(chosen), 1) for count in vars(together).values()))
    return by_side


def pooled_rates(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, Rate]:
    """Adds up what `decide` returns over clients, by side: ``own`` and ``foreign``."""
    pooled = {"own": Rate(), "foreign": Rate()}
    for decisions in by_client.values():
        for side in pooled:
            pooled[side] = pooled[side] + decisions[side]
    return pooled


def pooled_intervals(by_client: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Computes 95 % intervals (Wilson) of the false alarms that `pooled_rates` returns, by side.

    Clients of one run judge the same images, and with one model in the same way. So all of them count as no more images
    than there are of the products that any client has on that side.
    """
    intervals, of_products = {}, product_rates(by_client)
    for side, rate in pooled_rates(by_client).items():
        images = min(rate.normal, sum(product_rate.normal for product_rate in of_products[side].values()))
        intervals[side] = wilson_interval(rate.false_alarm_rate * images, images)
    return intervals


def mean_interval(by_client: Mapping[int, Mapping[str, Any]]) -> tuple[float, float]:
    """Computes the 95 % interval (Wilson) of clients' mean false alarms about their own products.

    Clients of one run judge the same images. So their mean is a mean over products, each with its mean weight at the
    clients, and counts as many images as `Rate.mixed` says.
    """
    measured = [decisions for decisions in by_client.values() if decisions["own"].normal]
    weights, rates = dict[str, float](), product_rates(by_client)["own"]
    for decisions in measured:
        held, products = decisions["held"], decisions["products"]
        weight_of = {name: weight for name, weight in held.items() if products[name].normal}
        for name, weight in weight_of.items():
            weights[name] = weights.get(name, 0) + weight / sum(weight_of.values())
    images = Rate.mixed([(weight, rates[name]) for name, weight in weights.items()]).normal
    mean = sum(decisions["own"].false_alarm_rate for decisions in measured) / max(len(measured), 1)
    return wilson_interval(mean * images, images)


def _mean(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns effective images, and events, of a weighted mean of rates, given weight, images and events of each."""
    total = sum(weight for weight, _, _ in parts)
    if not total:
        return 0, 0
    number = total**2 / sum(weight**2 / images for weight, images, _ in parts)
    return number, number * (sum(weight * events / images for weight, images, events in parts) / total)
