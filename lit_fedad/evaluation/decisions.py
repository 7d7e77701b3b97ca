"""False alarms and misses of the decisions that a run ships, client by client and product by product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.federation.evaluator import Interview
from lit_fedad.metrics.conformal import Calibration, wilson_interval
from lit_fedad.metrics.federated import Summary, summary, with_products

RATES = ("false_alarm_rate", "miss_rate", "false_alarm_rate_foreign", "miss_rate_foreign")
"""Names of the rates: of products that a client holds, and of all others."""


@dataclass(frozen=True)
class EvaluatedImages:
    """What decisions are judged by.

    Attributes:
        labels: 0 for a normal image, 1 for an anomalous one, int64 [n].
        products: Product of each image; None where an image belongs to none, as anomalies of foreign classes do.
        held: Number of each client's images by product, of those that it holds.
        known: Whether a decision may depend on an image's product.
    """

    labels: Tensor
    products: Sequence[str | None]
    held: Mapping[int, Mapping[str, int]]
    known: bool


@dataclass
class Rate:
    """Decisions about images of one kind.

    Attributes:
        normal: Normal images.
        false_alarms: Normal images that are called anomalous.
        anomalous: Anomalous images.
        misses: Anomalous images that are called normal.
    """

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
            *(one + another for one, another in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @classmethod
    def mixed(cls, parts: Sequence[tuple[float, Rate]]) -> Rate:
        """Mixes rates of products by weight, such as the number of images that a client has of each.

        Returns:
            The mean rates, of the number of images that is worth as much: (sum w)^2 / sum w^2 / n.
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
        """Returns numbers, rates and their 95 % intervals, as of so many images."""
        return {
            **vars(self),
            "false_alarm_rate": self.false_alarm_rate,
            "interval": list(wilson_interval(self.false_alarms, self.normal)),
            "miss_rate": self.miss_rate,
            "miss_interval": list(wilson_interval(self.misses, self.anomalous)),
        }


def decide(
    scores: Mapping[int, Tensor], images: EvaluatedImages, calibration: Calibration, alpha: float
) -> dict[int, dict[str, Any]]:
    """Judges every client's decisions about the test images.

    Its own products count as often as it holds them, however many test images they have: decisions are calibrated for
    the images that the client has. Other products count alike.

    Args:
        scores: Image scores by client [n].
        images: The test images.
        calibration: Calibration scores of all clients.
        alpha: Promised rate of false alarms.

    Returns:
        By client: ``own`` and ``foreign``, a mixed `Rate` each; ``products``, one by product; ``held``, the products of
        ``own``; and ``without_promise``, the products about which no promise can be made.
    """
    judged: dict[int, dict[str, Any]] = {}
    kinds = list(dict.fromkeys(images.products))
    for client, own_scores in scores.items():
        held, products, silent, nowhere = images.held[client], dict[str, Rate](), list[str](), Rate()
        for product in kinds:
            place = torch.tensor([i for i, other in enumerate(images.products) if other == product])
            limit = calibration.threshold(client, alpha, product if images.known else None)
            found = Rate.of(images.labels[place], own_scores[place].double() > limit)
            if product is None:  # an anomaly that belongs to no product is one to every client
                nowhere += found
                continue
            products[product] = found
            if math.isinf(limit):
                silent.append(product)
        mixed = {
            "own": Rate.mixed([(held[name], rate) for name, rate in products.items() if name in held]),
            "foreign": Rate.mixed([(1, rate) for name, rate in products.items() if name not in held]),
        }
        mixed["own"] += nowhere
        own_products = [name for name in products if name in held]
        judged[client] = {**mixed, "products": products, "held": own_products, "without_promise": silent}
    return judged


def summarise_rates(judged: Mapping[int, Mapping[str, Any]]) -> dict[str, Summary]:
    """Computes mean, worst, pooled, per-client and per-product values of `RATES` from what `decide` returns."""
    found, per_product, pooled, of_products = {}, {}, pooled_rates(judged), product_rates(judged)
    for name in RATES:
        side = "foreign" if name.endswith("_foreign") else "own"
        kind = name.removesuffix("_foreign")
        values = {client: getattr(own[side], kind) for client, own in sorted(judged.items())}
        found[name] = summary(values, getattr(pooled[side], kind), max)
        per_product[name] = {product: getattr(rate, kind) for product, rate in of_products[side].items()}
    return with_products(found, per_product)


def product_rates(judged: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Rate]]:
    """Averages what `decide` returns of each product over the clients that hold it, and over those that do not.

    Clients of one run judge the same images, so the numbers of images are those of one client: further clients make no
    interval narrower. Sites judge images of their own; their numbers are then the mean of those that have the product.

    Returns:
        Rates by side, ``own`` and ``foreign``, and product; without images where no client is on that side.
    """
    found: dict[str, dict[str, Rate]] = {"own": {}, "foreign": {}}
    for product in dict.fromkeys(name for own in judged.values() for name in own["products"]):
        for side, rates in found.items():
            judging = [own for own in judged.values() if product in own["products"]]
            chosen = [own for own in judging if (product in own["held"]) == (side == "own")]
            together = sum((own["products"][product] for own in chosen), Rate())
            rates[product] = Rate(*(count / max(len(chosen), 1) for count in vars(together).values()))
    return found


def pooled_rates(judged: Mapping[int, Mapping[str, Any]]) -> dict[str, Rate]:
    """Adds up what `decide` returns over clients, by side: ``own`` and ``foreign``."""
    pooled = {"own": Rate(), "foreign": Rate()}
    for own in judged.values():
        for side in pooled:
            pooled[side] = pooled[side] + own[side]
    return pooled


def pooled_intervals(judged: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Computes 95 % intervals (Wilson) of the false alarms that `pooled_rates` returns, by side.

    Clients of one run judge the same images, with one model even alike: together they are worth no more images than
    there are of the products that any of them has on that side.
    """
    found, of_products = {}, product_rates(judged)
    for side, rate in pooled_rates(judged).items():
        images = min(rate.normal, sum(own.normal for own in of_products[side].values()))
        found[side] = wilson_interval(rate.false_alarm_rate * images, images)
    return found


def evaluated_scores(
    interview: Interview, round: int, scores: Callable[[Client], Tensor]
) -> dict[int, Tensor]:
    """Scores all test images with every client; once where all predict with one model.

    Args:
        interview: The federation.
        round: The last finished round.
        scores: Scores all test images with a client [n].

    Returns:
        Scores by client [n]; empty on all processes but the first.
    """
    alike = interview.client.predictors.shared

    def answer(client: Client, number: int) -> Tensor:
        return scores(client)

    found = interview.ask(round, answer, interview.clients[:1] if alike else None)
    if not alike or not found:
        return found
    return dict.fromkeys(interview.clients, next(iter(found.values())))


def _mean(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns number of images and events of the weighted mean of rates, each of a weight, images and events."""
    total = sum(weight for weight, _, _ in parts)
    if not total:
        return 0, 0
    number = total**2 / sum(weight**2 / images for weight, images, _ in parts)
    return number, number * sum(weight * events / images for weight, images, events in parts) / total
