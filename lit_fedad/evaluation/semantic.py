"""Metrics of detectors of semantic anomalies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from lit_fedad.contracts import Client
from lit_fedad.evaluation.calibration import CalibrationScores
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.metrics.conformal import Calibration
from lit_fedad.metrics.federated import Summary, summarise
from lit_fedad.metrics.semantic import SemanticMetrics

_NAMES = ("auroc", "aupr", "fe", "me", "fe_calibrated", "me_calibrated")


def semantic_names(anomalies: Sequence[str]) -> tuple[str, ...]:
    """Lists the names of metrics: means over the sets of anomalies and, where there are several, those of each.

    Example:
        >>> semantic_names(["cat", "dog"])[5:8]
        ('me_calibrated', 'auroc_cat', 'aupr_cat')
    """
    sets = ("", *(f"_{name}" for name in anomalies)) if len(anomalies) > 1 else ("",)
    return tuple(f"{name}{of}" for of in sets for name in _NAMES)


class SemanticEvaluator(Evaluator):
    """An evaluator of every client against whole sets of anomalous images (FADngs, experiments).

    Args:
        scores: Scores all test images with a client [n].
        labels: Class of each test image, int64 [n].
        normal_classes: Classes below this number are normal.
        anomalies: Names of the anomaly sets, which are the classes after the normal ones.
        sizes: Number of training images by client.
        calibration: Counts a client's calibration scores.
        alpha: Rate of false alarms that a client's label-free threshold promises.
    """

    def __init__(
        self,
        scores: Callable[[Client], Tensor],
        labels: Tensor,
        normal_classes: int,
        anomalies: tuple[str, ...],
        sizes: Mapping[int, int],
        calibration: CalibrationScores,
        alpha: float,
    ) -> None:
        self.scores, self.sizes, self.anomalies = scores, sizes, anomalies
        self.sets = (labels - normal_classes + 1).clamp(min=0)
        self.calibration, self.alpha = calibration, alpha
        self.metrics = semantic_names(anomalies)

    def score(self, client: Client, number: int) -> dict[int, SemanticMetrics]:
        """Computes metric states of one client, or of all where they share a model, each at its own threshold."""
        metrics = SemanticMetrics(self.anomalies)
        metrics.update(self.scores(client), self.sets)
        holders = [c for c, size in self.sizes.items() if size] if client.predictors.shared else [number]
        return {holder: metrics.at_threshold(self.threshold(client, holder)) for holder in holders}

    def threshold(self, client: Client, number: int) -> float:
        """Computes a client's threshold from its own calibration images; infinity where they are too few."""
        counted = self.calibration(client, number)
        return Calibration({number: counted}, shared=False).threshold(number, self.alpha)

    def spread(
        self, state: dict[int, SemanticMetrics], clients: list[int]
    ) -> dict[int, dict[int, SemanticMetrics]]:
        """Returns each client's own state."""
        return {client: {client: state[client]} for client in clients}

    def summarise(self, states: dict[int, dict[int, SemanticMetrics]]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise({client: state[client] for client, state in states.items()})
