"""Federated ELSA: prototypes that all clients share (Han et al., BMVC 2021).

A baseline of FADngs Table I. After every merger, and once before round 1, clients send spherical k-means centres of
their projections under the merged weights, with the number of images of each centre. The server clusters all centres,
weighted by these numbers, to as many prototypes as one client sends centres. It sends the prototypes with the weights.
"""

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import by_class
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.methods.fedavg import MEANS, WEIGHTS, LatestMessages, LatestMessagesServer, OneModelClient
from lit_fedad.tasks.elsa import STEPS, Elsa

PROTOTYPES, COUNTS = "prototypes", "counts"
_MAX_ENTRY = 1.01
"""Largest entry of a vector of length 1, with a margin for rounding."""


class ElsaClient(OneModelClient):
    """A client that trains towards the prototypes of all clients, and sends centres of its own."""

    needs = Elsa
    task: Elsa

    def __init__(self, task: Elsa, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the prototypes, directions [K, D], which the task holds."""
        shape = tuple(self.task.prototypes.shape)
        return {PROTOTYPES: TensorSpec(shape, low=-_MAX_ENTRY, high=_MAX_ENTRY, unordered=True)}


class Centres(LatestMessages):
    """The exchange in which clients send centres under the merged weights; the server clusters them to prototypes."""

    name = "prototypes"

    discloses = (by_class("centres of clusters of the images' features, with their counts"),)

    def send(self, client: ElsaClient, loader: DataLoader) -> Message:
        """Clusters the client's projections; returns centres ``prototypes`` [K, D] and their images ``counts`` [K]."""
        clusters = client.task.cluster(loader, client.context)
        return {PROTOTYPES: clusters.centroids.float(), COUNTS: clusters.counts.long()}

    def upload_spec(self, client: ElsaClient) -> MessageSpec:
        """Declares centres [K, D] and counts [K]."""
        counts = TensorSpec((len(client.task.prototypes),), torch.int64, low=0, counted=True)
        return {**client.auxiliary_spec(), COUNTS: counts}

    def validate(self, server: LatestMessagesServer, client_id: int, update: Update) -> None:
        """Checks that the counts add up to the client's number of images."""
        counted = int(update.message[COUNTS].sum())
        if counted != update.num_samples:
            raise UserError(
                f"the client's centres stand for {counted} images, and it has {update.num_samples}"
            )

    def auxiliary_of(self, server: LatestMessagesServer, joined: Message) -> Message:
        """Clusters the centres of all clients, to as many prototypes as one client sends centres."""
        generator, centres = server.context.generator("prototypes"), joined[PROTOTYPES]
        clusters = kmeans(
            centres,
            len(centres) // len(server.last),
            generator=generator,
            weights=joined[COUNTS].double(),
            max_steps=STEPS,
            tolerance=0,
            spherical=True,
        )
        return {PROTOTYPES: clusters.centroids.float()}


def exchanges(client: ElsaClient) -> Exchanges:
    """Lists centres under the initial weights; then, in every round, training and centres under the merged weights."""
    return Exchanges((Centres(initial=True),), (Train(MEANS), Centres()), evidence=WEIGHTS)
