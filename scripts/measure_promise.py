"""Measures whether decisions keep their promise: false alarms promised and seen, over redrawn splits of real images.

    python scripts/measure_promise.py [sets=textures,real_mixture] [methods=feddymem] [seeds=0,1] [out=DIR]
        [root=DATA weights=FILE] [start=false]

Every seed redraws which normal images train and which test (``data.split_seed``), the partition to clients and the
calibration folds; of CIFAR-10 the partition and the images held out. A run is an ordinary one, in a folder below
``out``; complete runs are reused. Prints the table, and writes ``promise.md`` with one row a method, data set and
promised rate. ``root`` is the folder of the data, ``weights`` the file of ResNet-18's weights.

Beside a promised rate stand the misses at the *best threshold with labels*: that of each product of the largest F1
score on the test images themselves, which nobody has in use. What the promise misses beyond it is the cost of honesty.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from _script import script
from torch import Tensor

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.options import bind
from lit_fedad.evaluation.decisions import EvaluatedImages, decide, summarise_rates
from lit_fedad.experiment.decisions import evaluated_images
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.train import train
from lit_fedad.metrics.conformal import Alpha, Calibration, DecisionRule, ScoreCounts
from lit_fedad.report.console import Display
from lit_fedad.report.html import markdown_table

ALPHAS = ("auto", 0.01, 0.05, 0.1)
AUTOENCODER = ["task=autoencoder", "features=frozen"]
DETECTORS = {
    "federated_subspace": ["method=federated_subspace"],
    "federated_bank": ["method=federated_bank"],
    "feddymem": ["method=feddymem"],
    "federated_patchcore": ["method=federated_patchcore"],
    "fedavg, autoencoder": ["method=fedavg", *AUTOENCODER],
    "local, autoencoder": ["method=local", *AUTOENCODER],
}
# Before training. 500 images a client, of which a fifth calibrates, and 5,000 normal test images that all seeds share.
FADNGS = {
    "fadngs": [
        "method=fadngs", "features=frozen", "features.size=48", "backbone.layers=[3]", "rounds=0", "warmup=0",
        "method.server.distillation=null", "partition.size=500", "data.normal.train_per_class=525",
        "data.normal.test_per_class=500", "data.contaminants=100", "+data.anomalies.mnist.train=null",
        "+data.anomalies.mnist._target_=lit_fedad.data.packed.packed", "+data.anomalies.mnist._partial_=true",
        "+data.anomalies.mnist.test=ood_mnist_test_28.npz", "+data.anomalies.mnist.test_per_class=100",
        "~callbacks.capacities", "~callbacks.density_privacy",
    ]
}  # fmt: skip
SHARED_TESTS = {"cifar10": 5_000}  # normal test images that are the same for every seed
METHODS = {"textures": DETECTORS, "real_mixture": DETECTORS, "medical": DETECTORS, "cifar10": FADNGS}
DATA = {
    "textures": ["experiment=small"],
    "real_mixture": ["experiment=real_mixture", "data.root={root}"],
    "medical": ["experiment=medical", "data.root={root}"],
    "cifar10": ["experiment=semantic_cifar10", "backbone=resnet18", "data.root={root}/cifar"],
}


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        root: Folder of the real data; none for the embedded textures alone.
        weights: File of ResNet-18's weights; none where they are downloaded.
        sets: Keys of `DATA`.
        methods: First words of the rows' names; none for all.
        seeds: Seeds of splits.
        out: Folder of the runs and of the table.
        start: Whether missing runs are made; else the table is of those that are complete.
    """

    root: str | None = None
    weights: str | None = None
    sets: tuple[str, ...] = ("textures",)
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = tuple(range(10))
    out: str = "outputs/promise"
    start: bool = True


@dataclass(frozen=True)
class BestThresholds:
    """Thresholds of the largest F1 score on the test images, in the place of those of a `Calibration`."""

    scores: Mapping[int, Tensor]
    images: EvaluatedImages

    def rule(self, client: int, alpha: Alpha, product: str | None = None) -> DecisionRule:
        """Returns a rule of no calibration scores: these thresholds promise nothing."""
        return DecisionRule("test images", ScoreCounts.union([]), 1.0)

    def threshold(self, client: int, alpha: Alpha, product: str | None = None) -> float:
        """Chooses the best of the scores of a product's images, or of all where no product is known."""
        chosen = torch.tensor([product is None or name == product for name in self.images.products])
        scores, anomalous = self.scores[client][chosen].double(), self.images.labels[chosen] != 0
        limits = torch.cat([scores.new_tensor([-torch.inf]), scores.unique()])
        alarms = scores > limits[:, None]
        f1 = 2 * (alarms & anomalous).sum(1) / (alarms.sum(1) + anomalous.sum()).clamp(min=1)
        return float(limits[f1.argmax()])


class LabelledChoice(RunCallback):
    """Adds the rates at the best thresholds with labels to the run's result."""

    def on_rounds_end(self, run: Run) -> None:
        """Judges the run's scores at these thresholds."""
        images = evaluated_images(run.config, run.local)
        scores = {client: predicted.scores for client, predicted in run.predictions.items()}
        judged = decide(scores, images, cast("Calibration", BestThresholds(scores, images)), alpha=0)
        run.extras["best_thresholds"] = summarise_rates(judged)


def results(options: Options, data: str, method: str) -> list[dict[str, Any]]:
    """Makes the runs of a row, or reads those that are complete."""
    weights = [f"backbone.weights={options.weights}"] if options.weights and data != "textures" else []
    given, found = [*(part.format(root=options.root) for part in DATA[data]), *weights], []
    for seed in options.seeds:
        folder = Path(options.out) / f"{data}-{method.replace(', ', '-')}-{seed}"
        if not options.start and not (folder / "result.json").exists():
            continue
        split = [] if data == "cifar10" else [f"data.split_seed={seed}"]
        config = compose(
            [*METHODS[data][method], *given, *split, f"seed={seed}", f"out={folder}", "tracking=off",
             f"evaluation.alpha=[{','.join(map(str, ALPHAS))}]", "evaluation.every=1000", "evaluation.pictures=0",
             "evaluation.alone=false"]
        )  # fmt: skip
        found.append(train(config, quiet=True, callbacks=[LabelledChoice()]))
    return found


def rows(name: str, data: str, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Summarises the runs of a method on a data set: a row for each promised rate."""
    best = [run["best_thresholds"] for run in runs]
    labelled = [f"{statistics.mean(mean(best, rate)):.2f}" for rate in ("miss_rate", "false_alarm_rate")]
    table = []
    for alpha in ALPHAS:
        judged = [run["decisions"][str(alpha)] for run in runs]
        promised = statistics.mean(one["promised"]["mean"] for one in judged)
        shared = promised * (1 - promised) / SHARED_TESTS[data] if data in SHARED_TESTS else 0.0
        own, kept = cells(mean(judged, "false_alarm_rate"), promised, 1, shared)
        foreign, kept_foreign = cells(mean(judged, "false_alarm_rate_foreign"), promised, 2, shared)
        table.append(
            {
                "data": data,
                "method": name,
                "splits": str(len(runs)),
                "alpha": str(alpha),
                "promised": f"{promised:.3g}",
                "false alarms": own,
                "kept": kept,
                "foreign": foreign,
                "kept, foreign": kept_foreign,
                "misses": f"{statistics.mean(mean(judged, 'miss_rate')):.2f}",
                "misses (false alarms) with labels": f"{labelled[0]} ({labelled[1]})",
            }
        )
    return table


def mean(judged: Sequence[Mapping[str, Any]], rate: str) -> list[float]:
    """Lists the mean over clients of each run, where it is defined."""
    return [one[rate]["mean"] for one in judged if one[rate]["mean"] is not None]


def cells(values: Sequence[float], promised: float, errors: int, shared: float) -> tuple[str, str]:
    """Formats mean and standard error, and whether the mean is at most so many errors above what was promised.

    ``shared`` is the variance of the mean by test images that are the same in all runs.
    """
    if not values:
        return "-", "-"
    own = statistics.variance(values) / len(values) if len(values) > 1 else 0.0
    seen, error = statistics.mean(values), (own + shared) ** 0.5
    return f"{seen:.3f} ± {error:.3f}", "yes" if seen <= promised + errors * error else "no"


def main(options: Options, screen: Display) -> None:
    """Makes runs and table."""
    table: list[dict[str, str]] = []
    for data in options.sets:
        for name in METHODS[data]:
            if not options.methods or name.split(",")[0] in options.methods:
                found = results(options, data, name)
                table += rows(name, data, found) if found else []
    if not table:
        raise UserError(f"{options.out}: holds no complete run; leave start=false out")
    text = markdown_table(list(table[0]), [list(row.values()) for row in table])
    Path(options.out, "promise.md").write_text(text + "\n")
    screen.table(table)


if __name__ == "__main__":
    with script() as display:
        bind(main, sys.argv[1:], "measure_promise", screen=display)()
