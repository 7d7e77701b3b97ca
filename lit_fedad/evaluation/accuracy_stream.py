"""Evaluation of classifiers whose images come in stages (GLDP, evaluation metrics)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client
from lit_fedad.core.errors import UserError
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.evaluation.accuracy import by_predictor, test_images
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.federation.evaluator import Evaluation, Evaluator, LocalQuery, QueriedFederation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.metrics.classification import constant_accuracies
from lit_fedad.metrics.continual import ContinualAccuracy, summarise_clients
from lit_fedad.metrics.federated import Summary

ClientTest = Literal["own", "balanced"]
Scores = dict[str, Tensor]
"""Suffix of metrics' names, which marks a classifier -> its correct images, and images, of each class [2, K]."""


_NAMES = ("selection_accuracy", "global_accuracy", "local_accuracy", "incremental_accuracy", "forgetting")


class StreamAccuracyEvaluator(Evaluator):
    """An evaluator of classifiers on the test data of a client's stages so far.

    - ``global_accuracy``: the server's model (A_glo).
    - ``local_accuracy``: the client's model (A_loc): what it trained last, or its personal parts on the server's merged
      base (`Predictors.merged`); undefined where only the server builds models that predict (`Predictors.own`).
    - ``selection_accuracy``: the same, or else the server's model, over the clients of the last round only (A_sel).
    - ``incremental_accuracy``, ``forgetting``: of the client's models at the end of each stage.

    The suffix ``_masked`` marks predictions restricted to the classes of the client's stages so far, for a fair
    comparison of heads with prototypes; the name of one of `Predictors.heads` marks that classifier.

    Args:
        loader: Test batches in a fixed order: the whole test split, of which every client's test data are weighted
            together (`ContinualAccuracy`).
        module: The stream, with each client's stage in a round.
        counts: Training images of each client by stage and class [M_i, K].
        client: A client, for the names of the method's classifiers.
        fabric: Moves batches and sets precision.
        client_test: Whether a client's test classes are as frequent as in its training data, or ``"balanced"``.

    Raises:
        UserError: If ``client_test`` is neither.
    """

    after_fit = True
    local = True

    def __init__(
        self,
        loader: DataLoader,
        module: StreamDataModule,
        counts: Sequence[np.ndarray],
        client: Client,
        fabric: Fabric,
        client_test: ClientTest = "own",
    ) -> None:
        if client_test not in get_args(ClientTest):
            raise UserError(f"evaluation.client_test={client_test}: give {' or '.join(get_args(ClientTest))}")
        self.loader, self.module, self.fabric = loader, module, fabric
        self.images = [torch.from_numpy(stage_counts) for stage_counts in counts]
        self.weights = [
            (stage_counts > 0).long() if client_test == "balanced" else stage_counts
            for stage_counts in self.images
        ]
        self.own_models, self.merged = client.predictors.own, client.predictors.merged
        self.endings = ["", "_masked", *(f"_{name}" for name in client.predictors.heads)]
        self.metrics = tuple(f"{name}{ending}" for ending in self.endings for name in _NAMES)

    def asked(self, client: Client, clients: list[int], round: int) -> list[int]:
        """Lists one client where the server's model is the same for all, otherwise all."""
        return clients[:1] if client.predictors.server_shared else clients

    def score(self, client: Client, number: int) -> Scores:
        """Counts the correct predictions of a client's model."""
        return self._score(client, {number: client.context.stage})[number]

    def evaluate(self, federation: QueriedFederation, round: int) -> Evaluation | None:
        """Scores the server's model, and clients' merged models; scores of other models are read from the history."""
        stages = self.module.at(round).stages
        common = federation.client.predictors.server_shared

        def score(client: Client, number: int) -> dict[int, Scores]:
            return self._score(client, stages if common else {number: stages[number]})

        asked = self.asked(federation.client, federation.clients, round)
        answers = federation.ask(round, LocalQuery(self.name, score), asked, "server")
        merged = federation.ask(round, self) if self.merged and round > 0 else {}
        if not federation.fabric.is_global_zero:
            return None
        server = {client: scores for answer in answers.values() for client, scores in answer.items()}
        reports = [report for report in federation.history if report.round <= round]
        participants = reports[-1].participants if reports else []
        trained = self._history(reports)
        in_place = None
        if not self.own_models and reports:
            # Only the server builds models: this round's model stands for what its participants have trained.
            in_place = {client: server[client] for client in participants if client in server}
        elif self.merged and reports:
            in_place = merged
        for client, scores in (in_place or {}).items():
            self._add_visit(trained, client, reports[-1].round, scores)
        now = {client: {stages[client]: scores} for client, scores in server.items()}
        return Evaluation(self._summarise(now, trained, participants, stages), in_place)

    @cached_property
    def test_images(self) -> Tensor:
        """Number of test images of each class, int64 [K]."""
        return test_images(self.loader, self.weights[0].shape[1])

    def constants(self, report: RoundReport) -> dict[str, dict[str, float]]:
        """Computes the accuracies of constant predictions on the stages so far.

        They are means over the clients that have the metric: A_sel is of the participants alone. Of a metric that no
        client has they are those of all.
        """
        stages = self.module.at(report.round).stages

        def so_far(counts: Sequence[Tensor]) -> Tensor:
            return torch.stack([counts[client][: stage + 1].sum(0) for client, stage in stages.items()])

        images, weights = so_far(self.images), so_far(self.weights) * (self.test_images > 0)

        def of_metric(name: str) -> dict[str, float]:
            values = (report.metrics or {})[name]["per_client"]
            defined = torch.tensor([[values.get(client, math.nan)] for client in stages]).isfinite()
            return constant_accuracies(images, weights * (defined if defined.any() else 1))

        return by_predictor({name: of_metric(name) for name in _NAMES[:3]})

    def _score(self, client: Client, stages: Mapping[int, int]) -> dict[int, Scores]:
        """Scores one model as it predicts for clients at their stages."""
        metrics_of = {
            number: {ending: self._metric(number, ending) for ending in self.endings} for number in stages
        }
        for batch in self.loader:
            prediction = predict_batch(client, batch, self.fabric)
            assert prediction.logits is not None
            other_logits = {f"_{name}": logits for name, logits in prediction.others.items()}
            by_ending = {"": prediction.logits, "_masked": prediction.logits, **other_logits}
            for ending, logits in by_ending.items():
                guesses = logits.cpu()
                for number, metrics in metrics_of.items():
                    metrics[ending].update(guesses, batch["label"], stages[number])
        return {
            number: {ending: metric.of_stage(stages[number]) for ending, metric in metrics.items()}
            for number, metrics in metrics_of.items()
        }

    def _metric(self, client: int, ending: str) -> ContinualAccuracy:
        return ContinualAccuracy(self.weights[client], known_only=ending == "_masked")

    def _history(self, reports: Sequence[RoundReport]) -> dict[int, dict[int, Scores]]:
        """Returns, by client and stage up to its last one, the scores of the client's last model in that stage."""
        last: dict[int, dict[int, Scores]] = {}
        for report in reports:
            for client, scores in report.trained.items():
                self._add_visit(last, client, report.round, scores)
        return last

    def _add_visit(self, last: dict[int, dict[int, Scores]], client: int, round: int, scores: Scores) -> None:
        """Adds a client's scores of a round; drops those of later stages, outdated where stages come again."""
        stage = self.module.stage(client, round)
        earlier = {
            number: stage_scores for number, stage_scores in last.get(client, {}).items() if number < stage
        }
        last[client] = {**earlier, stage: scores}

    def _summarise(
        self,
        server: Mapping[int, Mapping[int, Scores]],
        trained: Mapping[int, Mapping[int, Scores]],
        participants: Sequence[int],
        stages: Mapping[int, int],
    ) -> dict[str, Summary]:
        sizes = {client: int(self.images[client][: stages[client] + 1].sum()) for client in server}
        values: dict[int, dict[str, float]] = {
            client: dict.fromkeys(self.metrics, math.nan) for client in server
        }
        for client, ending in itertools.product(values, self.endings):
            computed = self._compute(client, ending, server[client])
            values[client][f"global_accuracy{ending}"] = computed["accuracy"]
            if client not in trained:
                continue
            computed = self._compute(client, ending, trained[client])
            if self.own_models:
                values[client][f"local_accuracy{ending}"] = computed["accuracy"]
            values[client] |= {
                f"incremental_accuracy{ending}": computed["incremental_accuracy"],
                f"forgetting{ending}": computed["forgetting"],
            }
            if client in participants:
                values[client][f"selection_accuracy{ending}"] = computed["accuracy"]
        lower = [name for name in self.metrics if name.startswith("forgetting")]
        return summarise_clients(values, sizes, lower)

    def _compute(self, client: int, ending: str, by_stage: Mapping[int, Scores]) -> dict[str, float]:
        metric = self._metric(client, ending)
        for stage, scores in by_stage.items():
            metric.add(scores[ending], stage)
        return {name: float(value) for name, value in metric.compute_local().items()}
