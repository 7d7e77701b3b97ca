"""Metrics of detectors of semantic anomalies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Client, Free, Message, MessageSpec, TensorSpec
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.calibration import CalibrationScores
from lit_fedad.evaluation.state_messages import IMAGE_BINS, MOST_IMAGES
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.metrics.base import concatenated
from lit_fedad.metrics.conformal import Calibration
from lit_fedad.metrics.federated import Summary, summarise
from lit_fedad.metrics.semantic import SemanticMetrics

_NAMES = ("auroc", "aupr", "fe", "me", "fe_calibrated", "me_calibrated")
_UNDECIDED = 2


def semantic_names(anomalies: Sequence[str]) -> tuple[str, ...]:
    """Lists the names of metrics: means over the sets of anomalies and, where there are several, those of each.

    Example:
        >>> semantic_names(["cat", "dog"])[5:8]
        ('me_calibrated', 'auroc_cat', 'aupr_cat')
    """
    sets = ("", *(f"_{name}" for name in anomalies)) if len(anomalies) > 1 else ("",)
    return tuple(f"{name}{of}" for of in sets for name in _NAMES)


@dataclass(frozen=True)
class SemanticTest:
    """What a client is scored by.

    Attributes:
        scores: Scores all test images with a client [n].
        labels: Class of each test image, int64 [n].
        normal_classes: Classes below this number are normal, the others the sets of anomalies.
        calibration: Counts a client's calibration scores.
        alpha: Rate of false alarms that a client's label-free threshold promises.
    """

    scores: Callable[[Client], Tensor]
    labels: Tensor
    normal_classes: int
    calibration: CalibrationScores
    alpha: float


class SemanticEvaluator(Evaluator):
    """An evaluator of every client against whole sets of anomalous images (FADngs, experiments).

    Over sites every client is scored on its own test images, and only bins and counts of its scores cross.

    Args:
        anomalies: Names of the anomaly sets, which are the classes after the normal ones.
        test: What clients are scored by; None on a server whose clients have test images of their own.
        clients: Clients that hold images.
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

    def score(self, client: Client, number: int) -> SemanticMetrics | dict[int, SemanticMetrics]:
        """Computes the metric state of one client, or those of all where they share a model, each at its threshold."""
        assert self.test is not None
        metrics = SemanticMetrics(self.anomalies)
        metrics.update(
            self.test.scores(client), (self.test.labels - self.test.normal_classes + 1).clamp(min=0)
        )
        if self.alike(client):
            return {one: metrics.at_threshold(self.threshold(client, one)) for one in self.clients}
        return metrics.at_threshold(self.threshold(client, number))

    def threshold(self, client: Client, number: int) -> float:
        """Computes a client's threshold from its own calibration images; infinity where they are too few."""
        assert self.test is not None
        counted = self.test.calibration(client, number)
        return Calibration({number: counted}, shared=False).threshold(number, self.test.alpha)

    def spread(self, state: dict[int, SemanticMetrics], clients: list[int]) -> dict[int, SemanticMetrics]:
        """Returns each client's own state."""
        return {client: state[client] for client in clients}

    discloses = (counted("numbers of test images by bin of their score, and set"),)

    def pack(self, answer: SemanticMetrics) -> Message:
        """Returns set, decision, bin and count of every combination that occurs."""
        decisions = concatenated(answer.decisions).nan_to_num(_UNDECIDED)
        bins = IMAGE_BINS.index(concatenated(answer.scores))
        rows = torch.stack([concatenated(answer.sets).long(), decisions.long(), bins.long()], dim=1)
        found, counts = rows.unique(dim=0, return_counts=True)
        sets, decided, binned = found.unbind(dim=1)
        return {"sets": sets, "decisions": decided, "bins": binned, "counts": counts}

    def spec(self) -> MessageSpec:
        """Declares four lists of one length."""
        combinations = (len(self.anomalies) + 1) * (_UNDECIDED + 1) * IMAGE_BINS.count
        rows = Free("rows", min(combinations, MOST_IMAGES))
        highest = {"sets": len(self.anomalies), "decisions": _UNDECIDED, "bins": IMAGE_BINS.count - 1}
        form: MessageSpec = {
            name: TensorSpec((rows,), torch.int64, low=0, high=high) for name, high in highest.items()
        }
        return {**form, "counts": TensorSpec((rows,), torch.int64, low=1, high=MOST_IMAGES, counted=True)}

    def unpack(self, message: Message) -> SemanticMetrics:
        """Builds the metric state; every score is the largest one of its bin.

        Raises:
            UserError: If more images were scored than any client has.
        """
        counts = message["counts"]
        if int(counts.sum()) > MOST_IMAGES:
            raise UserError(f"the client scored more than {MOST_IMAGES} images")
        decided = torch.tensor([0.0, 1.0, torch.nan])[message["decisions"]]
        metrics = SemanticMetrics(self.anomalies)
        metrics.scores.append(IMAGE_BINS.upper(message["bins"]).repeat_interleave(counts))
        metrics.sets.append(message["sets"].float().repeat_interleave(counts))
        metrics.decisions.append(decided.repeat_interleave(counts))
        return metrics

    def summarise(
        self, states: dict[int, SemanticMetrics | dict[int, SemanticMetrics]]
    ) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise({c: state[c] if isinstance(state, dict) else state for c, state in states.items()})
