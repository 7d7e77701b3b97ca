"""Evaluation of anomaly detectors whose product types come in stages: detection and forgetting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Subset, default_convert

from lit_fedad.contracts import Client, Message, MessageSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.stream import StreamDataModule, Timetable
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.predict import Cases, Predicted, predictions
from lit_fedad.evaluation.state_messages import of_images, packed_states, states_spec, unpacked_states
from lit_fedad.federation.evaluator import Evaluation, Evaluator, QueriedFederation
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
        stages: Metric state of each stage, where clients have test images of their own; otherwise empty, as states take
            several megabytes each.
        predicted: The scores, after the last round of all test images, and the maps that are drawn; None where they
            stay with the client.
    """

    met: AnomalyMetrics
    tasks: list[float]
    products: dict[str, dict[str, float]]
    stages: Sequence[AnomalyMetrics] = ()
    predicted: Predicted | None = None


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
        """Computes the mean, worst, pooled and per-client values of each metric of clients' models after a round."""
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
    Over sites these are a client's own test images, and only bins and counts of its scores cross. After the last round
    the other test images are scored too, for decisions.

    Args:
        judges: The evaluator of each product type, by the number of the type (`product_evaluators`); none on a server
            whose clients have test images of their own.
        timetable: Each client's stage in a round.
        counts: Training images of each client by stage and product type [M_i, K].
        pro_limit: Largest false positive rate of PRO.
        common: Whether clients' images are those of one test set.
        cases: Images that may be drawn; None for none.
    """

    def __init__(
        self,
        judges: Mapping[int, AnomalyEvaluator],
        timetable: Timetable,
        counts: Sequence[np.ndarray],
        pro_limit: float = 0.3,
        common: bool = True,
        cases: Cases | None = None,
    ) -> None:
        self.judges, self.timetable, self.pro_limit, self.common = judges, timetable, pro_limit, common
        self.cases = cases
        # For each client and stage: the numbers of its product types.
        self.tasks = [
            [frozenset(np.flatnonzero(row).tolist()) for row in stage_counts] for stage_counts in counts
        ]
        measured = next((judge.metrics for judge in judges.values()), AnomalyEvaluator.metrics)
        self.summary = StageMetrics(
            timetable, [stage_counts.sum(1).tolist() for stage_counts in counts], measured
        )
        self.metrics = self.summary.names

    def score(self, client: Client, number: int) -> Judged | dict[int, Judged]:
        """Scores one client on its stages so far, or all of them where they share a model."""
        round = client.context.round - 1  # the last finished one
        stages, alike = self.timetable.stages(round), self.alike(client, round)
        holders = {number: stages[number]}
        if alike:
            holders = {other: stage for other, stage in enumerate(stages) if any(self.tasks[other])}
        drawn = self.cases is not None and (number == self.cases.client or alike)
        judged = self._judge(client, holders, round == self.timetable.rounds, self.cases if drawn else None)
        return judged if alike else judged[number]

    def spread(self, state: dict[int, Judged], clients: list[int]) -> dict[int, Judged]:
        """Returns each client's own state."""
        return {client: state[client] for client in clients}

    def evaluate(self, federation: QueriedFederation, round: int) -> Evaluation | None:
        """Scores clients as they predict now; scores after earlier stages are read from the history."""
        if self.cases is not None:
            self.cases.choose(federation.clients)
        now = self.collect(federation, round)
        if now is None:
            return None
        predicted = {client: judged.predicted for client, judged in now.items()}
        if not self.common:
            stages = self.timetable.stages(round)
            met = {client: judged.stages[: stages[client] + 1] for client, judged in now.items()}
            if not all(state.pixel for states in met.values() for state in states):
                met = {client: [of_images(state) for state in states] for client, states in met.items()}
            now = {
                client: Judged(
                    union(states), [float(state.compute_local()["i_auroc"]) for state in states], {}
                )
                for client, states in met.items()
            }
        return Evaluation(self.summary.summarise(now, round, federation.history), predictions=predicted)

    discloses = (counted("numbers of test images and their pixels by bin of their score, and label"),)

    def pack(self, answer: Judged) -> Message:
        """Returns bins and counts, the bins of a stage after those of the stage before."""
        return packed_states(answer.stages)

    def spec(self) -> MessageSpec:
        """Declares ascending bins and their counts."""
        return states_spec(max(self.timetable.lengths))

    def unpack(self, message: Message) -> Judged:
        """Builds the metric states of all stages; those that have not come are empty."""
        states = unpacked_states(message, max(self.timetable.lengths), self.pro_limit)
        return Judged(states[0], [], {}, states)

    def _judge(
        self, client: Client, stages: Mapping[int, int], all_products: bool, cases: Cases | None
    ) -> dict[int, Judged]:
        """Scores one model as it predicts for clients at their stages; each product is scored once.

        With ``all_products``, test images of products that none of them has met are scored too.
        """
        tasks = {holder: self.tasks[holder][: stage + 1] for holder, stage in stages.items()}
        met = {holder: frozenset[int]().union(*of_stages) for holder, of_stages in tasks.items()}
        predicted = Predicted.empty(max(len(judge.products) for judge in self.judges.values()))
        states_of = {
            product: self.judges[product].states(client, predicted, cases)
            for product in sorted(frozenset[int]().union(*met.values()))
        }
        for judge in (
            self.judges[product] for product in self.judges if all_products and product not in states_of
        ):
            assert judge.loader is not None
            for _ in predictions(client, judge.loader, judge.fabric, predicted, cases):
                pass
        values_of = {
            product: {name: plain_values(state) for name, state in states.items()}
            for product, states in states_of.items()
        }
        groups = {*met.values(), *(task for of_stages in tasks.values() for task in of_stages)}
        states = {
            products: union(state for product in sorted(products) for state in states_of[product].values())
            for products in groups
        }
        image_aurocs = {
            products: float(state.compute_local()["i_auroc"]) for products, state in states.items()
        }
        return {
            holder: Judged(
                states[met[holder]],
                [image_aurocs[task] for task in of_stages],
                {
                    name: values
                    for product in sorted(met[holder])
                    for name, values in values_of[product].items()
                },
                () if self.common else [states[task] for task in of_stages],
                predicted,
            )
            for holder, of_stages in tasks.items()
        }


def product_evaluators(
    images: ImageSet,
    module: StreamDataModule,
    counts: Sequence[np.ndarray],
    fabric: Fabric,
    pro_limit: float = 0.3,
    spro_limit: float | None = None,
) -> dict[int, AnomalyEvaluator]:
    """Builds the evaluator of each product type that has test images, by the number of the type.

    Args:
        images: Product types of the test images, and whether there are masks.
        module: Test images.
        counts: Training images of each client by stage and product type [M_i, K].
        fabric: Moves batches and sets precision.
        pro_limit: Largest false positive rate of PRO.
        spro_limit: Largest false positive rate of sPRO; None where regions do not saturate.

    Raises:
        UserError: If a product type of a stage has no test images.
    """
    staged = {int(product) for stage_counts in counts for product in np.flatnonzero(stage_counts.sum(0))}
    products, limits = [sample.category for sample in images.test], (pro_limit, spro_limit)
    judges: dict[int, AnomalyEvaluator] = {}
    for number, product in enumerate(images.categories):
        indices = [i for i, category in enumerate(products) if category == product]
        if not indices and number in staged:
            raise UserError(
                f"{images.name}: product '{product}' comes in a task but has no test images; add some, or leave"
                " it out of the partition"
            )
        if not indices:
            continue
        loader = DataLoader(
            Subset(module.test, indices),
            module.eval_batch_size,
            generator=torch.Generator(),  # otherwise the loader draws from the global generator
            collate_fn=default_convert,  # data sets return whole batches
        )
        judges[number] = AnomalyEvaluator(loader, products, images.has_masks, fabric, *limits)
    return judges
