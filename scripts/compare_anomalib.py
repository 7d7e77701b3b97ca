"""Compares the metrics with anomalib's on a run's own anomaly maps: values, processor time and memory.

    pip install anomalib==2.7.0
    python scripts/compare_anomalib.py run=RUN [maps=200] [repeats=3] [data.root=DIR] [backbone.weights=FILE]

The maps are those of the run's first client on test images spread evenly over the test set. Scores are divided by a
power of two, which changes no order: anomalib expects them in [0, 1] and would squash others. Each side computes in a
process of its own, one thread, from batches of 20 maps. AUPIMO of anomalib takes 7 GB of memory.
"""

import importlib.util
import math
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from _script import script
from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.core.errors import UserError
from lit_fedad.core.options import bind
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.federated import plain_values
from lit_fedad.metrics.functional.bins import distinct_bins
from lit_fedad.metrics.functional.curves import aupimo, auroc, average_precision, pro
from lit_fedad.metrics.functional.histograms import (
    component_sizes,
    image_histograms,
    image_sizes,
    pixel_histograms,
)
from lit_fedad.report.naming import human_bytes, metric_title

_BATCH = 20
_BOUNDS = (1e-5, 1e-4)  # of AUPIMO

Scored = tuple[Tensor, Tensor, Tensor, Tensor]
"""Image scores [N], labels [N], maps [N, H, W] and masks [N, H, W]."""

Answer = tuple[dict[str, float], float, int]
"""Values by name, seconds, and bytes of memory beyond what was in use before."""


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        run: A complete run of an anomaly task on images with masks: its folder or MLflow id.
        maps: Number of maps.
        repeats: Number of measurements, of which the fastest counts.
    """

    run: str
    maps: int = 200
    repeats: int = 3


def predicted(options: Options, overrides: Mapping[str, str]) -> Scored:
    """Predicts test images with the run's first client."""
    run = reopen(options.run, overrides)
    test = run.data.module.test
    places = np.linspace(0, len(test) - 1, min(options.maps, len(test))).round().astype(int).tolist()  # type: ignore[arg-type]

    def answer(client: Client, number: int) -> Scored:
        parts = []
        for start in range(0, len(places), _BATCH):
            batch = test.__getitems__(places[start : start + _BATCH])  # type: ignore[attr-defined]
            prediction = predict_batch(client, batch, run.fabric)
            if prediction.anomaly_map is None or "mask" not in batch:
                raise UserError(f"run={options.run}: needs a task that localises, and images with masks")
            maps = prediction.anomaly_map.cpu()
            parts.append((prediction.image_score.cpu(), batch["label"], maps, batch["mask"]))
        scores, labels, maps, masks = (torch.cat(part) for part in zip(*parts, strict=True))
        return _to_one(scores), labels, _to_one(maps), masks

    federation = run.federation
    return federation.ask(federation.rounds, LocalQuery("answer", answer), federation.clients[:1])[
        federation.clients[0]
    ]


_IMAGES, _PIXELS = ("score", "label"), ("map", "mask")
_ANOMALIBS: dict[str, tuple[str, tuple[str, str], dict[str, float | bool]]] = {
    "i_auroc": ("AUROC", _IMAGES, {}),
    "aupr": ("AUPR", _IMAGES, {}),
    "f1_max": ("F1Max", _IMAGES, {}),
    "p_auroc": ("AUROC", _PIXELS, {}),
    "p_ap": ("AUPR", _PIXELS, {}),
    "pro": ("AUPRO", _PIXELS, {}),
    "pro_05": ("AUPRO", _PIXELS, {"fpr_limit": 0.05}),
    "aupimo": ("AUPIMO", _PIXELS, {"force": True}),
}
"""Class, fields and settings of anomalib's metric, by the name of ours."""


def ours(data: Scored) -> dict[str, float]:
    """Computes all values by one metric."""
    metrics = AnomalyMetrics()
    for scores, labels, maps, masks in _batches(data):
        metrics.update(scores, labels, maps, masks)
    return plain_values(metrics)


def exactly(data: Scored) -> dict[str, float]:
    """Computes all values with one bin for every distinct score."""
    scores, labels, maps, masks = data
    images = AnomalyMetrics(pixel=False)
    images.update(scores, labels)
    index, count = distinct_bins(maps)
    sizes = component_sizes(masks)
    normal, anomalous, region = pixel_histograms(index, sizes, count)
    values = {
        "p_auroc": auroc(normal, anomalous),
        "pro": pro(normal, region),
        "pro_05": pro(normal, region, 0.05),
        "p_ap": average_precision(normal, anomalous),
        "aupimo": aupimo(*image_histograms(index, image_sizes(sizes), count)),
    }
    return plain_values(images) | {name: float(value) for name, value in values.items()}


def theirs(data: Scored, name: str) -> dict[str, float]:
    """Computes one value by anomalib's metric."""
    metrics = importlib.import_module("anomalib.metrics")
    pimo = importlib.import_module("anomalib.metrics.pimo")
    kind, fields, settings = _ANOMALIBS[name]
    metric = getattr(metrics, kind, None) or getattr(pimo, kind)
    metric = metric(fields=fields, **settings)
    for scores, labels, maps, masks in _batches(data):
        metric.update(SimpleNamespace(score=scores, label=labels.int(), map=maps, mask=masks.int()))
    return {name: float(metric.compute())}


def aupimo_at_their_bounds(data: Scored) -> float:
    """Computes AUPIMO between the rates nearest to its bounds, but divided by the whole width, as anomalib does."""
    _, _, maps, masks = data
    index, count = distinct_bins(maps)
    normal, image = image_histograms(index, image_sizes(component_sizes(masks)), count)
    rates = normal.flip(0).cumsum(0).double() / normal.sum()
    low, high = (float(rates[(rates - bound).abs().argmin()]) for bound in _BOUNDS)
    width = math.log(high / low) / math.log(_BOUNDS[1] / _BOUNDS[0])
    return float(aupimo(normal, image, (low, high))) * width


def measured(
    compute: Callable[..., dict[str, float]], data: Scored, repeats: int, *settings: object
) -> Answer:
    """Computes values in a process of its own, and measures it there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, compute, data, repeats, settings).result()


def compare(options: Options, overrides: Mapping[str, str]) -> list[dict[str, str]]:
    """Computes all values on both sides.

    Returns:
        The rows of the table: one a metric, then the sums.
    """
    data = predicted(options, overrides)
    own, own_seconds, own_memory = measured(ours, data, options.repeats)
    exact, exact_seconds, exact_memory = measured(exactly, data, options.repeats)
    answers = {name: measured(theirs, data, options.repeats, name) for name in _ANOMALIBS}
    rows = [
        _row(
            metric_title(name), values[name], own[name], exact[name], f"{seconds:.3f} s", human_bytes(memory)
        )
        for name, (values, seconds, memory) in answers.items()
    ]
    at_bounds = aupimo_at_their_bounds(data)
    rows.append(_row("AUPIMO, their bounds", answers["aupimo"][0]["aupimo"], math.nan, at_bounds, "", ""))
    spent = {"anomalib": sum(seconds for _, seconds, _ in answers.values()), "histograms": own_seconds}
    held = {"anomalib": max(memory for *_, memory in answers.values()), "histograms": own_memory}
    times = {**spent, "exact": exact_seconds}
    memories = {**held, "exact": exact_memory}
    blank = dict.fromkeys(rows[0], "")
    rows.append({**blank, "metric": "all: time", **{side: f"{value:.3f} s" for side, value in times.items()}})
    rows.append(
        {**blank, "metric": "all: memory", **{side: human_bytes(value) for side, value in memories.items()}}
    )
    return rows


def _row(title: str, value: float, own: float, exact: float, seconds: str, memory: str) -> dict[str, str]:
    shown = {"anomalib": value, "histograms": own, "exact": exact}
    cells = {side: "" if math.isnan(number) else f"{number:.6f}" for side, number in shown.items()}
    return {
        "metric": title,
        **cells,
        "histograms off by": "" if math.isnan(own) else f"{abs(own - value):.1e}",
        "exact off by": f"{abs(exact - value):.1e}",
        "anomalib's time": seconds,
        "anomalib's memory": memory,
    }


def _measure(
    compute: Callable[..., dict[str, float]], data: Scored, repeats: int, settings: tuple[object, ...]
) -> Answer:
    """Computes values several times: returns the shortest processor time, and the memory beyond that of the data."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the first batch, which may hold no anomalous image
    # Modules are imported, and memory is taken that a process takes once, before anything is measured.
    compute(tuple(part[:_BATCH] for part in data), *(["i_auroc"] if compute is theirs else []))
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forgets the largest memory so far
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        values = compute(data, *settings)
        seconds.append(time.process_time() - began)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = 1024 * int(status["VmHWM"].split()[0])
    return values, min(seconds), max(peak - before, 0)


def _batches(data: Scored) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(part.split(_BATCH) for part in data), strict=True)


def _to_one(scores: Tensor) -> Tensor:
    """Divides scores by a power of two, so that none is above 1."""
    return scores / 2 ** math.ceil(math.log2(float(scores.max())))


if __name__ == "__main__":
    with script() as screen:
        if importlib.util.find_spec("anomalib") is None:
            raise UserError("anomalib is not installed: pip install anomalib==2.7.0")
        screen.table(bind(compare, sys.argv[1:], "compare_anomalib")())
