"""FedDetect: an averaged autoencoder, a learning rate that falls over rounds, one threshold for all clients.

A baseline of FADngs Table I, whose text says that it "learns AE and specific threshold" (Zhang et al., 2021, FedIoT).
After every merger clients send number, mean and variance of their images' reconstruction errors under the merged
weights. The threshold is ``mean + a std / sqrt(B)`` over the errors of all clients, with batches of B images. Scores
are errors divided by the threshold: FedDetect calls an image with a score above 1 anomalous.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Message, MessageSpec, Prediction, Task, TensorSpec, Update
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.disclosure import summed
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import pool_moments
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import MEANS, AfterMerger, FedAvgClient, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.autoencoder import Autoencoder, FeatureAutoencoder

THRESHOLD = "threshold"
_MIN_THRESHOLD = 1e-12  # keeps scores finite


class FedDetectClient(FedAvgClient):
    """A client of an `Autoencoder` or a `FeatureAutoencoder`, whose errors set the common threshold."""

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Checks that a task class is an autoencoder."""
        super().check_task(task)
        if not issubclass(task, (Autoencoder, FeatureAutoencoder)):
            raise UserError(
                f"method feddetect takes its threshold from an autoencoder's errors, and task {task.__name__} is"
                " none; give task=autoencoder"
            )

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the threshold."""
        return {THRESHOLD: TensorSpec((), low=_MIN_THRESHOLD)}

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores images by their errors divided by the threshold."""
        prediction = super().predict_step(batch, batch_idx)
        threshold = self.auxiliary[THRESHOLD].to(prediction.image_score)
        anomaly_map = None if prediction.anomaly_map is None else prediction.anomaly_map / threshold
        return prediction._replace(image_score=prediction.image_score / threshold, anomaly_map=anomaly_map)


class FedDetectServer(FedAvgServer):
    """FedAvg's server, which also sends the threshold.

    Args:
        deviations: Number a of standard deviations, of a batch's mean error, by which the threshold exceeds the mean.
        batch_size: Images in a batch (B).
    """

    def __init__(self, client: FedDetectClient, deviations: float = 1.0, batch_size: int = 32) -> None:
        super().__init__(client)
        at_least("method.server", 0, deviations=deviations)
        at_least("method.server", 1, batch_size=batch_size)
        self.deviations, self.batch_size = deviations, batch_size


class Errors(AfterMerger):
    """The exchange in which clients send count, mean and variance of their images' errors under merged weights."""

    name = "errors"

    discloses = (summed("mean and variance of the images' reconstruction errors"),)

    @torch.no_grad()
    def send(self, client: FedDetectClient, loader: DataLoader) -> Message:
        """Returns ``count``, ``mean`` [1] and ``variance`` [1] of the client's errors."""
        task = client.task
        scores = map_batches(task, loader, lambda batch: task.predict_step(batch).image_score.cpu())
        errors = torch.cat(list(scores)).double()
        return {
            "count": torch.tensor(len(errors)),
            "mean": errors.mean()[None].float(),
            "variance": errors.var(correction=0)[None].float(),
        }

    def upload_spec(self, client: FedDetectClient) -> MessageSpec:
        """Declares three numbers."""
        count = TensorSpec((), torch.int64, low=1, counted=True)
        return {"count": count, "mean": TensorSpec((1,), low=0), "variance": TensorSpec((1,), low=0)}

    def validate(self, server: FedDetectServer, client_id: int, update: Update) -> None:
        """Checks the count."""
        check_count(int(update.message["count"]), update.num_samples)

    def aggregate(self, server: FedDetectServer, updates: Mapping[int, Update]) -> None:
        """Pools the moments, and sets the threshold."""
        messages = [update.message for update in updates.values()]
        counts, means, variances = (
            torch.stack([message[name] for message in messages]) for name in ("count", "mean", "variance")
        )
        mean, variance = pool_moments(counts, means, variances)
        threshold = mean + server.deviations * (variance / server.batch_size).sqrt()
        server.auxiliary = {THRESHOLD: threshold[0].clamp(min=_MIN_THRESHOLD)}
        server.report = {THRESHOLD: float(server.auxiliary[THRESHOLD])}


def exchanges(client: FedDetectClient) -> Exchanges:
    """Lists FedAvg's exchanges, with errors under the initial weights, and after every merger under the merged ones."""
    return with_exchanges(client, Errors(initial=True), rounds=(Train(MEANS), Errors()))
