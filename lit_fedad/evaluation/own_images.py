"""Questions that clients answer about images of their own, which stay where they are.

Every answer is counts: metric states that add up over clients, calibration scores by bin, and decisions. No score of a
single image crosses, nor which image a count belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Free, Message, MessageSpec, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.calibration import CalibrationScores
from lit_fedad.evaluation.decisions import EvaluatedImages, Rate
from lit_fedad.federation.evaluator import Evaluation, Evaluator, Interview
from lit_fedad.federation.question import Question
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.base import concatenated
from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.metrics.federated import Summary, summarise
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins

IMAGE_BINS = LogBins(mantissa_bits=7)
"""Bins of image scores: two scores of one bin differ by less than 1/128."""

MOST = 1 << 56
"""Largest count of a bin: those of a hundred clients still add up in int64."""

MOST_IMAGES = 10_000_000
"""Most test images of a client: each takes eight bytes where its bins are read."""

PIXELS = ("normal", "anomalous", "region", "normal_images", "image")
"""Histograms of pixels in `AnomalyMetrics`."""


class OwnScores(Question[AnomalyMetrics]):
    """The question for a client's metric state on its own test images.

    Args:
        judge: Scores the client on its test images; None on the server, which only reads answers.
        pro_limit: Largest false positive rate of PRO.
    """

    name = "scores"

    def __init__(self, judge: AnomalyEvaluator | None = None, pro_limit: float = 0.3) -> None:
        self.judge, self.pro_limit = judge, pro_limit

    def __call__(self, client: Client, number: int) -> AnomalyMetrics:
        """Scores the client on its own test images."""
        assert self.judge is not None
        return self.judge.score(client, number).state

    def pack(self, answer: AnomalyMetrics) -> Message:
        """Returns bins and counts: of image scores by label, and of pixels in five histograms."""
        return packed_states([answer])

    def spec(self) -> MessageSpec:
        """Declares ascending bins and their counts."""
        return states_spec(1)

    def unpack(self, message: Message) -> AnomalyMetrics:
        """Builds the metric state; every image score is the largest one of its bin."""
        return unpacked_states(message, 1, self.pro_limit)[0]


def packed_states(states: Sequence[AnomalyMetrics]) -> Message:
    """Returns bins and counts of one or more metric states; the bins of a state follow those of the one before."""
    whole: dict[str, list[Tensor]] = {}
    for state in states:
        index = IMAGE_BINS.index(concatenated(state.image_scores)).long()
        anomalous = concatenated(state.image_labels) != 0
        for label, chosen in (("normal", ~anomalous), ("anomalous", anomalous)):
            counts = torch.bincount(index[chosen], minlength=IMAGE_BINS.count)
            whole.setdefault(f"images.{label}", []).append(counts)
        empty = torch.zeros(0, dtype=torch.int64)
        for name in PIXELS:
            whole.setdefault(f"pixels.{name}", []).append(getattr(state, name) if state.pixel else empty)
    return {key: part for name, own in whole.items() for key, part in _sparse(name, torch.cat(own)).items()}


def states_spec(states: int) -> MessageSpec:
    """Declares what `packed_states` returns of at most so many states."""
    images = [
        (f"images.{label}", states * IMAGE_BINS.count, MOST_IMAGES) for label in ("normal", "anomalous")
    ]
    pixels = [(f"pixels.{name}", states * DEFAULT_BINS.count, MOST) for name in PIXELS]
    return {key: form for part in (*images, *pixels) for key, form in _sparse_spec(*part).items()}


def unpacked_states(message: Message, states: int, pro_limit: float) -> list[AnomalyMetrics]:
    """Builds so many metric states of what `packed_states` returned; those that it lacks are empty.

    Raises:
        UserError: If there are more images than a client may have.
    """
    pixel = any(len(message[f"pixels.{name}.bins"]) for name in PIXELS)
    found = [AnomalyMetrics(pixel=pixel, limit=pro_limit) for _ in range(states)]
    for label, name in enumerate(("images.normal", "images.anomalous")):
        bins, counts = message[f"{name}.bins"], message[f"{name}.counts"]
        if int(counts.sum()) > MOST_IMAGES:
            raise UserError(f"the client scored more than {MOST_IMAGES} images")
        for place, metrics in enumerate(found):
            own = bins // IMAGE_BINS.count == place
            scores = IMAGE_BINS.upper(bins[own] % IMAGE_BINS.count).repeat_interleave(counts[own])
            metrics.image_scores.append(scores)
            metrics.image_labels.append(torch.full((len(scores),), float(label)))
    for name in PIXELS if pixel else ():
        whole = torch.zeros(states * DEFAULT_BINS.count, dtype=torch.int64)
        whole[message[f"pixels.{name}.bins"]] = message[f"pixels.{name}.counts"]
        for metrics, own in zip(found, whole.split(DEFAULT_BINS.count), strict=True):
            setattr(metrics, name, own)
    return found


class OwnImagesEvaluator(Evaluator):
    """An evaluator of every client on its own test images; pixel metrics where all clients have masks.

    Subclasses do the same with other metric states.

    Args:
        question: The question for metric states.
    """

    metrics: tuple[str, ...] = AnomalyEvaluator.metrics

    def __init__(self, question: Question[Any]) -> None:
        self.question = question

    def asked(self, client: Client, clients: list[int]) -> list[int]:
        """Lists all clients: with one model for all, each still has images of its own."""
        return clients

    def evaluate(self, interview: Interview, round: int) -> Evaluation | None:
        """Computes the metrics after a round."""
        states = interview.ask(round, self.question)
        return Evaluation(self.summarise(states)) if interview.fabric.is_global_zero else None

    def summarise(self, states: dict[int, Any]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        if not all(state.pixel for state in states.values()):
            states = {client: of_images(state) for client, state in states.items()}
        return summarise(states)


class OwnCalibration(Question[dict[str, ScoreCounts]]):
    """The question for the counts of a client's calibration scores, by product.

    Args:
        products: Names of all clients' products; a product crosses as its place in this list.
        scores: Counts the client's scores; None on the server.
    """

    name = "calibration"

    def __init__(self, products: Sequence[str], scores: CalibrationScores | None = None) -> None:
        self.products, self.scores = list(products), scores

    def __call__(self, client: Client, number: int) -> dict[str, ScoreCounts]:
        """Counts the scores of the client's calibration images."""
        assert self.scores is not None
        return self.scores(client, number)

    def pack(self, answer: dict[str, ScoreCounts]) -> Message:
        """Returns product, bin and count of every bin that holds a score."""
        places = [
            torch.full_like(counts.bins, self.products.index(product)) for product, counts in answer.items()
        ]
        columns = (places, *([getattr(c, name) for c in answer.values()] for name in ("bins", "counts")))
        return {
            name: torch.cat([torch.zeros(0, dtype=torch.int64), *parts])
            for name, parts in zip(("products", "bins", "counts"), columns, strict=True)
        }

    def spec(self) -> MessageSpec:
        """Declares three lists of one length."""
        rows = Free("bins", len(self.products) * DEFAULT_BINS.count)
        return {
            "products": TensorSpec((rows,), torch.int64, low=0, high=len(self.products) - 1),
            "bins": TensorSpec((rows,), torch.int64, low=0, high=DEFAULT_BINS.count - 1),
            "counts": TensorSpec((rows,), torch.int64, low=1, counted=True),
        }

    def unpack(self, message: Message) -> dict[str, ScoreCounts]:
        """Builds the counts by product.

        Raises:
            UserError: If the bins of a product do not ascend.
        """
        found = {}
        for place in message["products"].unique().tolist():
            chosen = message["products"] == place
            counts = {name: message[name][chosen].tolist() for name in ("bins", "counts")}
            found[self.products[place]] = ScoreCounts.from_json(counts)
        return found


class OwnDecisions(Question[dict[str | None, Rate]]):
    """The question how many of a client's own test images are called anomalous, by product.

    Anomalies that belong to no product, as those of foreign classes, are counted under None.

    Args:
        products: Names of all clients' products.
        limits: Score above which an image is called anomalous, by product.
        images: The client's test images; None on the server.
        scores: Scores them with the live client; None on the server.
        shipped: Whether the limits are those that the detector is shipped with, and a client may report by.
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
        scores, products = self.scores(client).double(), self.images.products
        rates = {}
        for product in dict.fromkeys(products):
            place = torch.tensor([i for i, other in enumerate(products) if other == product])
            rates[product] = Rate.of(
                self.images.labels[place], scores[place] > limit_of(self.numbers, product)
            )
        return rates

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
            UserError: If more images are wrong than there are.
        """
        found = {}
        for product, row in zip(self.products, message["rates"].tolist(), strict=True):
            rate = Rate(*row)
            if rate.false_alarms > rate.normal or rate.misses > rate.anomalous:
                raise UserError(f"more decisions about {product or 'no product'} are wrong than there are")
            if rate.normal or rate.anomalous:
                found[product] = rate
        return found


def limit_of(limits: Mapping[str, float], product: str | None) -> float:
    """Returns the score above which an image of a product is called anomalous.

    Where anomalies belong to no product (None), limits do not depend on it.
    """
    return max(limits.values()) if product is None else limits.get(product, math.inf)


def of_images(state: AnomalyMetrics) -> AnomalyMetrics:
    """Returns a metric state without its pixels."""
    metrics = AnomalyMetrics(pixel=False, limit=state.limit)
    metrics.image_scores, metrics.image_labels = state.image_scores, state.image_labels
    return metrics


def _sparse(name: str, histogram: Tensor) -> Message:
    """Returns the bins of a histogram that are not empty, and their counts."""
    bins = histogram.nonzero().flatten()
    return {f"{name}.bins": bins, f"{name}.counts": histogram[bins]}


def _sparse_spec(name: str, count: int, most: int) -> MessageSpec:
    held = Free(name, count)
    return {
        f"{name}.bins": TensorSpec((held,), torch.int64, low=0, high=count - 1, distinct=True),
        f"{name}.counts": TensorSpec((held,), torch.int64, low=1, high=most, counted=True),
    }
