"""Federated ELSA: prototypes that all clients share (Han et al., BMVC 2021).

A baseline of FADngs Table I. After every merger, and once before round 1, clients send spherical k-means centres of
their projections under the merged weights, with the number of images of each; the server clusters all centres, weighted
by these numbers, to as many prototypes, which go out with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import Disclosure, Kind
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import MEANS, WEIGHTS, AfterMerger, FedAvgServer, OneModelClient
from lit_fedad.tasks.elsa import Elsa, spherical_kmeans

PROTOTYPES, COUNTS = "prototypes", "counts"
_UNIT = 1.01
"""Largest value of vectors of length 1, and what rounding adds."""


class ElsaClient(OneModelClient):
    """A client that trains towards the prototypes of all clients, and sends centres of its own.

    Args:
        task: An `Elsa` task.
        local_epochs: Passes over the client's data per round (E).
    """

    needs = Elsa
    task: Elsa

    def __init__(self, task: Elsa, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)

    def broadcast_spec(self) -> MessageSpec:
        """Declares weights and prototypes."""
        return {**super().broadcast_spec(), PROTOTYPES: self.prototypes_spec()}

    def prototypes_spec(self) -> TensorSpec:
        """Declares directions [K, D]."""
        return TensorSpec(tuple(self.task.prototypes.shape), low=-_UNIT, high=_UNIT, unordered=True)


class ElsaServer(FedAvgServer):
    """FedAvg's server, which also keeps the last centres of each client, and the prototypes made of them.

    Args:
        client: A client, for the initial weights.
    """

    state_names = ("centres", "prototypes")

    def __init__(self, client: ElsaClient) -> None:
        super().__init__(client)
        self.centres: dict[int, Message] = {}
        self.prototypes: Tensor = client.task.prototypes.detach().to("cpu", copy=True)

    def broadcast(self, client_id: int) -> Message:
        """Returns weights and prototypes."""
        return {**super().broadcast(client_id), PROTOTYPES: self.prototypes}


class Centres(AfterMerger):
    """The exchange in which clients send centres under the merged weights."""

    name = "prototypes"

    discloses = (
        Disclosure(
            Kind.CLASS_STATISTICS, "centres of clusters of the images' features, with their counts", images=1
        ),
    )

    def send(self, client: ElsaClient, loader: DataLoader) -> Message:
        """Clusters the client's projections: ``prototypes`` [K, D], and images of each ``counts`` [K]."""
        found = client.task.cluster(loader, client.context)
        return {PROTOTYPES: found.centroids.float(), COUNTS: found.counts.long()}

    def upload_spec(self, client: ElsaClient) -> MessageSpec:
        """Declares centres [K, D] and counts [K]."""
        form = client.prototypes_spec()
        return {PROTOTYPES: form, COUNTS: TensorSpec(form.shape[:1], torch.int64, low=0, counted=True)}

    def validate(self, server: ElsaServer, client_id: int, update: Update) -> None:
        """Checks that the counts are those of a client with so many images."""
        counted = int(update.message[COUNTS].sum())
        if counted != update.num_samples:
            raise UserError(
                f"the client's centres stand for {counted} images, and it has {update.num_samples}"
            )

    def aggregate(self, server: ElsaServer, updates: Mapping[int, Update]) -> None:
        """Replaces the centres of the round's clients, and clusters those of all clients."""
        new = {client: update.message for client, update in updates.items()}
        server.centres = dict(sorted({**server.centres, **new}.items()))
        messages = server.centres.values()
        found = spherical_kmeans(
            torch.cat([message[PROTOTYPES] for message in messages]),
            len(server.prototypes),
            generator=server.context.generator("prototypes"),
            weights=torch.cat([message[COUNTS] for message in messages]).double(),
        )
        server.prototypes = found.centroids.float()


def exchanges(client: ElsaClient) -> Exchanges:
    """Centres under the initial weights; then training, and centres under the merged weights."""
    return Exchanges((Centres(initial=True),), (Train(MEANS), Centres()), evidence=WEIGHTS)
