"""Image and pixel metrics of anomaly detectors."""

from __future__ import annotations

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.federated import Summary, summarise


class AnomalyEvaluator(Evaluator):
    """An evaluator of every client on the union of all test images (FedDyMem Eq. 4).

    Args:
        loader: Test batches in a fixed order.
        pixel: Whether there are masks; pixel metrics are then computed for tasks that localise.
        fabric: Moves batches and sets precision.
        pro_limit: Largest false positive rate of PRO.
    """

    metrics: tuple[str, ...] = ("i_auroc", "p_auroc", "pro", "aupr", "f1_max", "p_ap", "pro_05", "aupimo")

    def __init__(self, loader: DataLoader, pixel: bool, fabric: Fabric, pro_limit: float = 0.3) -> None:
        self.loader, self.pixel, self.fabric, self.pro_limit = loader, pixel, fabric, pro_limit

    def score(self, client: Client, number: int) -> AnomalyMetrics:
        """Computes the metric state of one client."""
        metrics = AnomalyMetrics(pixel=False)
        for position, batch in enumerate(self.loader):
            prediction = predict_batch(client, batch, self.fabric)
            maps = prediction.anomaly_map if self.pixel else None
            if position == 0:
                metrics = AnomalyMetrics(pixel=maps is not None, limit=self.pro_limit)
            pixels = () if maps is None else (maps.cpu(), batch["mask"])
            metrics.update(prediction.image_score.cpu(), batch["label"], *pixels)
        return metrics

    def spread(self, state: AnomalyMetrics, clients: list[int]) -> dict[int, AnomalyMetrics]:
        """Returns the same state for every client."""
        return dict.fromkeys(clients, state)

    def summarise(self, states: dict[int, AnomalyMetrics]) -> dict[str, Summary]:
        """Computes the mean, worst, pooled and per-client values of each metric."""
        return summarise(states)
