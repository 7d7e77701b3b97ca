"""Evaluation of anomaly detectors whose product types come in stages: detection and forgetting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Subset, default_convert

from lit_fedad.contracts import Client
from lit_fedad.core.errors import UserError
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.stream import StreamDataModule, Timetable
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.federation.evaluator import Evaluation, Evaluator, Interview
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.base import union
from lit_fedad.metrics.continual import forgetting, summarise_clients
from lit_fedad.metrics.federated import (
    Summary,
    defined_mean,
    over_clients,
    plain_values,
    summarise,
    with_products,
)


class Judged(NamedTuple):
    """The metric states of a model on the test images of one client's stages so far.

    Attributes:
        met: Metric state of all these images.
        tasks: I-AUROC of each stage alone.
        products: Values of each product, by product and name.
    """

    met: AnomalyMetrics
    tasks: list[float]
    products: dict[str, dict[str, float]]


class StageMetrics:
    """The metrics of clients on the test images of their stages so far.

    With a_lj the I-AUROC after stage l on the test images of stage j, and m the current stage of a client:

    - ``i_auroc``, ``p_auroc``, ``pro``, ``spro``, ``aupr``: on the test images of stages 1 .. m together, and of each
      product.
    - ``incremental_i_auroc``: mean over l <= m of the ``i_auroc`` after stage l.
    - ``forgetting``: mean over j < m of max_l a_lj - a_mj, j <= l < m (see `forgetting`).
    - ``i_auroc_task_j``: a_mj, from j = 1; NaN before a client has reached its stage j.

    Values after an earlier stage are those of the last evaluation in it: the ends of stages are always evaluated,
    whatever ``evaluation.every``. Values of several stages are pooled as the mean over clients, weighted by training
    images.

    Args:
        timetable: Each client's stage in a round.
        sizes: Training images of each client by stage.
        measured: Names of the metrics of all stages together.

    Attributes:
        names: Names of all metrics.
    """

    def __init__(
        self,
        timetable: Timetable,
        sizes: Sequence[Sequence[int]],
        measured: Sequence[str] = AnomalyEvaluator.metrics,
    ) -> None:
        self.timetable, self.sizes = timetable, sizes
        self.task_metrics = tuple(f"i_auroc_task_{task}" for task in range(1, max(timetable.lengths) + 1))
        self.names = (*measured, "incremental_i_auroc", "forgetting", *self.task_metrics)

    def summarise(
        self, now: Mapping[int, Judged], round: int, history: Sequence[RoundReport]
    ) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric.

        Args:
            now: What the clients' models are worth after the round, by client.
            round: The round.
            history: Reports of the rounds so far.
        """
        stages = self.timetable.stages(round)
        earlier = [report for report in history if report.round < round and report.metrics]
        of_met = with_products(
            summarise({client: judged.met for client, judged in now.items()}),
            over_clients({client: judged.products for client, judged in now.items()}),
        )
        values: dict[int, dict[str, float]] = {}
        for client, judged in now.items():
            ends = {self.timetable.stage(client, report.round): report.metrics or {} for report in earlier}
            ends = {
                stage: metrics
                for stage, metrics in ends.items()
                if stage < stages[client] and client in metrics["i_auroc"]["per_client"]
            }
            so_far = [metrics["i_auroc"]["per_client"][client] for metrics in (*ends.values(), of_met)]
            after = {
                stage: [metrics[name]["per_client"][client] for name in self.task_metrics[: stage + 1]]
                for stage, metrics in ends.items()
            }
            values[client] = {
                "incremental_i_auroc": defined_mean(so_far),
                "forgetting": forgetting({**after, stages[client]: judged.tasks}),
                **dict.fromkeys(self.task_metrics, math.nan),
                **dict(zip(self.task_metrics, judged.tasks, strict=False)),
            }
        sizes = {client: sum(self.sizes[client][: stages[client] + 1]) for client in now}
        return {**of_met, **summarise_clients(values, sizes, ["forgetting"])}


class AnomalyStreamEvaluator(Evaluator):
    """An evaluator of every client on the test images, normal and anomalous, of its product types so far.

    A stage's test images are those of the product types in its training images; metrics are those of `StageMetrics`.

    Args:
        images: Product types of the test images, and whether there are masks.
        module: Test images, and each client's stage in a round.
        counts: Training images of each client by stage and product type [M_i, K].
        fabric: Moves batches and sets precision.
        pro_limit: Largest false positive rate of PRO.
        spro_limit: Largest false positive rate of sPRO; None where regions do not saturate.

    Raises:
        UserError: If a product type of a stage has no test images.
    """

    def __init__(
        self,
        images: ImageSet,
        module: StreamDataModule,
        counts: Sequence[np.ndarray],
        fabric: Fabric,
        pro_limit: float = 0.3,
        spro_limit: float | None = None,
    ) -> None:
        self.module = module
        self.tasks = [[frozenset(np.flatnonzero(row).tolist()) for row in own] for own in counts]
        self.judges: dict[int, AnomalyEvaluator] = {}
        for number in sorted({product for own in self.tasks for task in own for product in task}):
            product = images.categories[number]
            indices = [i for i, sample in enumerate(images.test) if sample.category == product]
            if not indices:
                raise UserError(
                    f"{images.name}: product '{product}' comes in a task but has no test images; add some, or leave"
                    " it out of the partition"
                )
            loader = DataLoader(
                Subset(module.test, indices),
                module.eval_batch_size,
                generator=torch.Generator(),  # otherwise the loader draws from the global generator
                collate_fn=default_convert,  # data sets return whole batches
            )
            products = [sample.category for sample in images.test]
            limits = pro_limit, spro_limit
            self.judges[number] = AnomalyEvaluator(loader, products, images.has_masks, fabric, *limits)
        measured = next(iter(self.judges.values())).metrics
        self.summary = StageMetrics(module.timetable, [own.sum(1).tolist() for own in counts], measured)
        self.metrics = self.summary.names

    def score(self, client: Client, number: int) -> list[AnomalyMetrics]:
        """Computes the metric states of one client, one for each of its stages so far."""
        tasks = self.tasks[number][: client.context.stage + 1]
        scored = {
            product: self.judges[product].states(client) for product in sorted(frozenset[int]().union(*tasks))
        }
        return [union(state for p in sorted(task) for state in scored[p].values()) for task in tasks]

    def evaluate(self, interview: Interview, round: int) -> Evaluation | None:
        """Scores clients as they predict now; scores after earlier stages are read from the history."""
        stages = self.module.at(round).stages
        alike = interview.client.predictors.shared

        def judge(client: Client, number: int) -> dict[int, Judged]:
            judged = interview.clients if alike else [number]
            return self._judge(client, {holder: stages[holder] for holder in judged})

        answers = interview.ask(round, judge, self.asked(interview.client, interview.clients))
        if not interview.fabric.is_global_zero:
            return None
        now = {holder: judged for answer in answers.values() for holder, judged in answer.items()}
        return Evaluation(self.summary.summarise(now, round, interview.history))

    def _judge(self, client: Client, stages: Mapping[int, int]) -> dict[int, Judged]:
        """Scores one model as it predicts for clients at their stages; each product is scored once."""
        tasks = {holder: self.tasks[holder][: stage + 1] for holder, stage in stages.items()}
        met = {holder: frozenset[int]().union(*own) for holder, own in tasks.items()}
        scored = {
            product: self.judges[product].states(client)
            for product in sorted(frozenset[int]().union(*met.values()))
        }
        alone = {
            product: {name: plain_values(state) for name, state in states.items()}
            for product, states in scored.items()
        }
        wanted = {*met.values(), *(task for own in tasks.values() for task in own)}
        states = {
            products: union(state for product in sorted(products) for state in scored[product].values())
            for products in wanted
        }
        image_aurocs = {
            products: float(state.compute_local()["i_auroc"]) for products, state in states.items()
        }
        return {
            holder: Judged(
                states[met[holder]],
                [image_aurocs[task] for task in own],
                {name: values for product in sorted(met[holder]) for name, values in alone[product].items()},
            )
            for holder, own in tasks.items()
        }
