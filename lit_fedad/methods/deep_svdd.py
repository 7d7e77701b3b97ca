"""Federated Deep SVDD: one centre for all clients, after pre-training as an autoencoder (Ruff et al., ICML 2018).

A baseline of FADngs Table I. Pre-training rounds come before round 1: clients train the network as an autoencoder, and
the server averages its weights. Then each client sends once the mean of its images' features under the averaged
weights. The mean over all images is the centre; the server sends it with the weights of every round (512 bytes at 128
features).
"""

from collections.abc import Mapping

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import summed
from lit_fedad.core.bounds import at_least
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.client_runner import Train, fit
from lit_fedad.methods.fedavg import MEANS, WEIGHTS, AfterMerger, FedAvgServer, OneModelClient
from lit_fedad.tasks.deep_svdd import DeepSVDD, off_zero

CENTRE = "centre"


class DeepSVDDClient(OneModelClient):
    """A client that trains with the common centre of all clients' images.

    Args:
        pretraining: Rounds of pre-training as an autoencoder, before round 1.
    """

    needs = DeepSVDD
    task: DeepSVDD

    def __init__(self, task: DeepSVDD, local_epochs: int = 1, pretraining: int = 0) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, pretraining=pretraining)
        self.pretraining = pretraining

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the centre [D], which the task holds."""
        return {CENTRE: TensorSpec((self.task.num_features,))}


class DeepSVDDServer(FedAvgServer):
    """FedAvg's server, which also sends the centre."""

    def __init__(self, client: DeepSVDDClient) -> None:
        super().__init__(client)
        self.auxiliary, self.margin = {CENTRE: client.task.centre.clone()}, client.task.margin


class Pretrain(Train):
    """The set-up exchange in which clients train as an autoencoder."""

    name = "pre-training"

    def train(self, client: DeepSVDDClient, loader: DataLoader, fabric: Fabric) -> dict[str, float]:  # type: ignore[override]
        """Trains by reconstruction."""
        with client.task.reconstructing():
            return fit(client, loader, fabric)


class Centre(AfterMerger):
    """The set-up exchange in which clients send the mean of their features, which the server averages."""

    name = "centre"
    first_stage = True

    discloses = (summed("mean of the images' features"),)

    def send(self, client: DeepSVDDClient, loader: DataLoader) -> Message:
        """Returns the mean of the client's features."""
        return {CENTRE: client.task.feature_mean(loader)}

    def upload_spec(self, client: DeepSVDDClient) -> MessageSpec:
        """Declares one vector [D]."""
        return client.auxiliary_spec()

    def aggregate(self, server: DeepSVDDServer, updates: Mapping[int, Update]) -> None:
        """Averages the means, weighted by data size, and moves the centre's coordinates away from 0 (`off_zero`)."""
        server.auxiliary = {CENTRE: off_zero(weighted_mean(updates)[CENTRE], server.margin)}


def exchanges(client: DeepSVDDClient) -> Exchanges:
    """Lists pre-training and the exchange of the centre before round 1; then training."""
    return Exchanges(
        (*(Pretrain(MEANS) for _ in range(client.pretraining)), Centre()),
        (Train(MEANS),),
        evidence=WEIGHTS,
    )
