"""Metrics of detectors of semantic anomalies."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.evaluation.calibration import CalibrationScores
from lit_fedad.evaluation.predict import predict_batch
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
        module: Test batches in a fixed order, and training data by client.
        normal_classes: Categories below this number are normal.
        anomalies: Names of the anomaly sets, which are the categories after the normal classes.
        fabric: Moves batches and sets precision.
        calibration: Counts a client's calibration scores.
        alpha: Rate of false alarms that a client's label-free threshold promises.
    """

    def __init__(
        self,
        module: FederatedDataModule,
        normal_classes: int,
        anomalies: tuple[str, ...],
        fabric: Fabric,
        calibration: CalibrationScores,
        alpha: float,
    ) -> None:
        self.module, self.normal_classes, self.anomalies = module, normal_classes, anomalies
        self.fabric = fabric
        self.calibration, self.alpha = calibration, alpha
        self.metrics = semantic_names(anomalies)

    def score(self, client: Client, number: int) -> dict[int, SemanticMetrics]:
        """Computes metric states of one client, or of all where they share a model, each at its own threshold."""
        metrics = SemanticMetrics(self.anomalies)
        for batch in self.module.test_dataloader():
            scores = predict_batch(client, batch, self.fabric).image_score.cpu()
            metrics.update(scores, (batch["category"] - self.normal_classes + 1).clamp(min=0))
        holders = (
            [c for c, size in self.module.sizes.items() if size] if client.predictors.shared else [number]
        )
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
