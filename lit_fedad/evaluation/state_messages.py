"""Metric states of anomaly detectors as messages: counts that add up over clients, nothing about a single image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.metrics.anomaly import PIXELS, AnomalyMetrics
from lit_fedad.metrics.base import concatenated
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins

IMAGE_BINS = LogBins(mantissa_bits=7)
"""Bins of image scores: two scores of one bin differ by less than 1/128."""

MOST = 1 << 56
"""Largest count of a bin: those of a hundred clients still add up in int64."""

MOST_IMAGES = 10_000_000
"""Most test images of a client: each takes eight bytes where its bins are read."""


def packed_states(states: Sequence[AnomalyMetrics]) -> Message:
    """Returns bins and counts of one or more metric states, the bins of each state after those of the state before."""
    histograms: dict[str, list[Tensor]] = {}
    for state in states:
        index = IMAGE_BINS.index(concatenated(state.image_scores)).long()
        anomalous = concatenated(state.image_labels) != 0
        for label, chosen in (("normal", ~anomalous), ("anomalous", anomalous)):
            counts = torch.bincount(index[chosen], minlength=IMAGE_BINS.count)
            histograms.setdefault(f"images.{label}", []).append(counts)
        empty = torch.zeros(0, dtype=torch.int64)
        for name in PIXELS:
            histograms.setdefault(f"pixels.{name}", []).append(getattr(state, name) if state.pixel else empty)
    message: Message = {}
    for name, parts in histograms.items():
        histogram = torch.cat(parts)
        bins = histogram.nonzero().flatten()
        message |= {f"{name}.bins": bins, f"{name}.counts": histogram[bins]}
    return message


def states_spec(states: int) -> MessageSpec:
    """Declares what `packed_states` returns for at most ``states`` states."""
    images = [
        (f"images.{label}", states * IMAGE_BINS.count, MOST_IMAGES) for label in ("normal", "anomalous")
    ]
    pixels = [(f"pixels.{name}", states * DEFAULT_BINS.count, MOST) for name in PIXELS]
    return {key: form for entry in (*images, *pixels) for key, form in _sparse_spec(*entry).items()}


def unpacked_states(message: Message, states: int, pro_limit: float) -> list[AnomalyMetrics]:
    """Builds ``states`` metric states from what `packed_states` returned; those that it lacks are empty.

    Raises:
        UserError: If there are more images than a client may have.
    """
    pixel = any(len(message[f"pixels.{name}.bins"]) for name in PIXELS)
    all_metrics = [AnomalyMetrics(pixel=pixel, limit=pro_limit) for _ in range(states)]
    for label, name in enumerate(("images.normal", "images.anomalous")):
        bins, counts = message[f"{name}.bins"], message[f"{name}.counts"]
        if int(counts.sum()) > MOST_IMAGES:
            raise UserError(f"the client scored more than {MOST_IMAGES} images")
        for number, metrics in enumerate(all_metrics):
            of_state = bins // IMAGE_BINS.count == number
            scores = IMAGE_BINS.upper(bins[of_state] % IMAGE_BINS.count).repeat_interleave(counts[of_state])
            metrics.image_scores.append(scores)
            metrics.image_labels.append(torch.full((len(scores),), float(label)))
    for name in PIXELS if pixel else ():
        histogram = torch.zeros(states * DEFAULT_BINS.count, dtype=torch.int64)
        histogram[message[f"pixels.{name}.bins"]] = message[f"pixels.{name}.counts"]
        for metrics, of_state in zip(all_metrics, histogram.split(DEFAULT_BINS.count), strict=True):
            setattr(metrics, name, of_state)
    return all_metrics


def of_images(state: AnomalyMetrics) -> AnomalyMetrics:
    """Returns a metric state without its pixels."""
    metrics = AnomalyMetrics(pixel=False, limit=state.limit)
    metrics.image_scores, metrics.image_labels = state.image_scores, state.image_labels
    return metrics


def _sparse_spec(name: str, count: int, highest: int) -> MessageSpec:
    length = Free(name, count)
    return {
        f"{name}.bins": TensorSpec((length,), torch.int64, low=0, high=count - 1, distinct=True),
        f"{name}.counts": TensorSpec((length,), torch.int64, low=1, high=highest, counted=True),
    }
