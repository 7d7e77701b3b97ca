"""Metrics of detectors of semantic anomalies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Free, Message, MessageSpec, Task, TensorSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.calibration import CalibrationScores
from lit_fedad.evaluation.predict import ImageScorer, Predicted
from lit_fedad.evaluation.state_messages import IMAGE_BINS, MOST_IMAGES
from lit_fedad.federation.evaluator import Evaluation, Evaluator, QueriedFederation
from lit_fedad.metrics.base import concatenated
from lit_fedad.metrics.conformal import Alpha, Calibration
from lit_fedad.metrics.federated import Summary, summarise
from lit_fedad.metrics.semantic import SemanticMetrics, semantic_names
from lit_fedad.tasks.contrastive import Contrastive


@dataclass(frozen=True)
class SemanticTest:
    """Test images and calibration by which clients are scored.

    Attributes:
        scorer: Scores all test images with a client.
        labels: Class of each test image, int64 [n].
        normal_classes: Classes below this number are normal, the others the sets of anomalies.
        calibration: Counts a client's calibration scores.
        alpha: Rate of false alarms that a client's label-free threshold promises.
        shown: Indices of test images whose features are drawn [m]; none where it is empty.
    """

    scorer: ImageScorer
    labels: Tensor
    normal_classes: int
    calibration: CalibrationScores
    alpha: Alpha
    shown: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


class SemanticScores(NamedTuple):
    """Metrics and thresholds of one model.

    Attributes:
        metrics: Metric state of all test images.
        thresholds: Label-free threshold of each client that predicts with the model; empty where decisions came with
            the state.
        predicted: The scores, and the features that are drawn; None where they stay with the client.
    """

    metrics: SemanticMetrics
    thresholds: Mapping[int, float]
    predicted: Predicted | None = None

    def of(self, client: int) -> SemanticMetrics:
        """Returns the metric state at a client's threshold."""
        threshold = self.thresholds.get(client)
        return self.metrics if threshold is None else self.metrics.at_threshold(threshold)


class SemanticEvaluator(Evaluator):
    """An evaluator of every client against whole sets of anomalous images (FADngs, experiments).

    Over sites every client is scored on its own test images, and only bins and counts of its scores cross.

    Args:
        anomalies: Names of the anomaly sets, which are the classes after the normal ones.
        test: Test images and calibration; None on a server whose clients have test images of their own.
        clients: Clients that hold images; the features of the first are drawn.
        common: Whether all clients are scored on these images.
    """

    def __init__(
        self,
        anomalies: Sequence[str],
        test: SemanticTest | None = None,
        clients: Sequence[int] = (),
        common: bool = True,
    ) -> None:
        self.anomalies, self.test, self.clients, self.common = tuple(anomalies), test, clients, common
        self.metrics = semantic_names(self.anomalies)

    def evaluate(self, federation: QueriedFederation, round: int) -> Evaluation | None:
        """Computes the metrics after a round."""
        self.clients = federation.clients
        return super().evaluate(federation, round)

    def score(self, client: Client, number: int) -> SemanticScores:
        """Computes the metric state of one client, or of all where they share a model, and their thresholds."""
        assert self.test is not None
        alike = self.alike(client, client.context.round - 1)
        predicted = self._predicted(client, alike or number in self.clients[:1])
        metrics = SemanticMetrics(self.anomalies)
        metrics.update(predicted.scores, (self.test.labels - self.test.normal_classes + 1).clamp(min=0))
        holders = self.clients if alike else [number]
        return SemanticScores(
            metrics, {holder: self.threshold(client, holder) for holder in holders}, predicted
        )

    def _predicted(self, client: Client, drawn: bool) -> Predicted:
        """Predicts the test images, and keeps the features of those that are shown where the client is drawn."""
        assert self.test is not None
        shown = self.test.shown if drawn else self.test.shown[:0]
        scores, features = list[Tensor](), dict[int, Tensor]()
        chosen = set(shown.tolist())
        for batch, embedding, prediction in self.test.scorer.batches(client):
            scores.append(prediction.image_score.cpu())
            positions = [
                position for position, index in enumerate(batch["index"].tolist()) if index in chosen
            ]
            if positions:
                rows = represented(client.task, embedding)[positions].cpu()
                features |= dict(zip(batch["index"][positions].tolist(), rows, strict=True))
        rows_in_order = [features[index] for index in shown.tolist()]
        return Predicted(torch.cat(scores), features=torch.stack(rows_in_order) if rows_in_order else None)

    def threshold(self, client: Client, number: int) -> float:
        """Computes a client's threshold from its own calibration images; infinity where they are too few."""
        assert self.test is not None
        counted = self.test.calibration(client, number)
        return Calibration({number: counted}, shared=False).threshold(number, self.test.alpha)

    discloses = (counted("numbers of test images by bin of their score, and set"),)

    def pack(self, answer: SemanticScores) -> Message:
        """Returns set, decision, bin and count of every combination that occurs."""
        (client,) = answer.thresholds
        metrics = answer.of(client)
        decisions = concatenated(metrics.decisions)
        bins = IMAGE_BINS.index(concatenated(metrics.scores))
        rows = torch.stack([concatenated(metrics.sets).long(), decisions.long(), bins.long()], dim=1)
        combinations, counts = rows.unique(dim=0, return_counts=True)
        sets, decided, binned = combinations.unbind(dim=1)
        return {"sets": sets, "decisions": decided, "bins": binned, "counts": counts}

    def spec(self) -> MessageSpec:
        """Declares four lists of one length."""
        combinations = (len(self.anomalies) + 1) * 2 * IMAGE_BINS.count
        rows = Free("rows", min(combinations, MOST_IMAGES))
        highest = {"sets": len(self.anomalies), "decisions": 1, "bins": IMAGE_BINS.count - 1}
        form: MessageSpec = {
            name: TensorSpec((rows,), torch.int64, low=0, high=high) for name, high in highest.items()
        }
        return {**form, "counts": TensorSpec((rows,), torch.int64, low=1, high=MOST_IMAGES, counted=True)}

    def unpack(self, message: Message) -> SemanticScores:
        """Builds the metric state; every score is the largest one of its bin.

        Raises:
            UserError: If more images were scored than any client has.
        """
        counts = message["counts"]
        if int(counts.sum()) > MOST_IMAGES:
            raise UserError(f"the client scored more than {MOST_IMAGES} images")
        metrics = SemanticMetrics(self.anomalies)
        metrics.scores.append(IMAGE_BINS.upper(message["bins"]).repeat_interleave(counts))
        metrics.sets.append(message["sets"].float().repeat_interleave(counts))
        metrics.decisions.append(message["decisions"].float().repeat_interleave(counts))
        return SemanticScores(metrics, {})

    def summarise(self, states: dict[int, SemanticScores]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise({client: state.of(client) for client, state in states.items()})


@torch.inference_mode()
def represented(task: Task, embedding: Tensor) -> Tensor:
    """Computes what is drawn of an embedding [n, D]: z of contrastive tasks, or features averaged over positions."""
    if isinstance(task, Contrastive):
        return task.represent(embedding)
    return embedding if embedding.dim() == 2 else embedding.mean(1)
