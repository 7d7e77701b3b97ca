"""FADngs: noisy global densities, contrastive training, ensemble distillation (Dong et al., TNNLS 2024).

Every round has two exchanges. First clients train with the global model and densities, and send weights, which the
server merges. Then clients send the densities of their images under the merged model. Round 0 is a first exchange of
densities, under the initial weights. The order is that of FADngs Alg. 1, whose rounds begin with the densities.

docs/fadngs.md tells which of the paper's claims hold here, at a scale far below the paper's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import by_class
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods import fedavg
from lit_fedad.methods.fedavg import (
    MEANS,
    WEIGHTS,
    Buffers,
    FedAvgClient,
    LatestMessages,
    LatestMessagesServer,
)
from lit_fedad.methods.parts.ensemble_distillation import EnsembleDistillation, InstanceQueues
from lit_fedad.methods.parts.functional import copied
from lit_fedad.tasks.contrastive import Contrastive

MEAN, COVARIANCE = "densities.mean", "densities.covariance"

_MAX_ENTRY = 1.01
"""Largest entry of means and covariances of unit vectors, with a margin for rounding."""


class FADngsClient(FedAvgClient):
    """A client that trains with the densities of all clients, and sends densities of its own images.

    Args:
        local_epochs: Passes over the client's data per round (E_l).
        aggregate_buffers: As in `FedAvgClient`.
        share_densities: Whether clients share densities (NGDE); otherwise each scores by its own, as with FedAvg.
    """

    needs = Contrastive
    state_names = ("embedded",)
    task: Contrastive

    def __init__(
        self,
        task: Contrastive,
        local_epochs: int = 1,
        aggregate_buffers: Buffers = "mean",
        share_densities: bool = True,
    ) -> None:
        super().__init__(task, local_epochs, aggregate_buffers=aggregate_buffers)
        self.share_densities = share_densities
        self.embedded: tuple[tuple[int, int], Tensor, Tensor] | None = None
        """Round and stage of the last embedding, the embeddings [n, D], and the positions of their images."""

    def own_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists the personal entries: FedAvg's, without the task's buffers of densities where densities are shared."""
        shared = self.task.local_buffers if self.share_densities else ()
        return [name for name in super().own_keys(learned) if name not in shared]

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the densities of all clients, where they are shared; the task holds them."""
        return self.densities_spec() if self.share_densities else {}

    def densities_spec(self) -> MessageSpec:
        """Declares any number of densities of unit vectors: means [n, D] and covariances [n, D, D]."""
        width = self.task.densities.mean.shape[1]
        number = Free("densities")
        vectors = partial(TensorSpec, low=-_MAX_ENTRY, high=_MAX_ENTRY, unordered=True)
        return {
            MEAN: vectors((number, width)),
            COVARIANCE: vectors((number, width, width), definite=True),
        }

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Predicts which images are normal (FADngs Eq. 8), from the embeddings that the last densities were made of."""
        if not self.share_densities:
            super().refresh(loader, predicts)
            return
        last = self.context.round - 1
        # A client has no such embeddings yet if it took no part in the last round, or holds images of a new stage.
        if self.embedded is None or self.embedded[0] != (last, self.context.stage):
            self.embed(last, loader)
        assert self.embedded is not None
        _, z, index = self.embedded
        self.task.select(z, index)

    def embed(self, round: int, loader: DataLoader) -> Tensor:
        """Embeds the client's images [n, D] under the merged weights of a round; keeps embeddings and positions."""
        z, index = self.task.embed(loader)
        self.embedded = (round, self.context.stage), z.cpu(), index
        return self.embedded[1]


class LastMerge(NamedTuple):
    """The models that the global model of the last round was computed from.

    Attributes:
        averaged: Averaged weights before distillation.
        local: Uploaded weights by client.
    """

    averaged: Message
    local: dict[int, Message]


class FADngsServer(LatestMessagesServer):
    """The server, which keeps the clients' last densities, averages weights, and distils the clients' models.

    Args:
        distillation: Ensemble distillation (SED); None to average weights only.
        public: Public images uint8 [P, 3, S, S], or their frozen features [P, C]; required by ``distillation``.

    Attributes:
        last_merge: The models merged in the last round, once it is over, else None; not part of the state.

    Raises:
        UserError: If distillation is on, and running statistics stay with the clients.
    """

    merges_sums = False

    def __init__(
        self,
        client: FADngsClient,
        distillation: EnsembleDistillation | None = None,
        public: Tensor | None = None,
    ) -> None:
        super().__init__(client)
        if distillation is not None and client.aggregate_buffers == "local":
            raise UserError(
                "distillation looks at images with the clients' running statistics: give"
                " method.client.aggregate_buffers=mean, or method.server.distillation=null"
            )
        self.task: Contrastive = copied(client.task)
        self.distillation, self.public = distillation, public
        self.last_merge: LastMerge | None = None

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Checks that distillation is possible, with all clients as teachers.

        Raises:
            UserError: If there are no public images, or the queues do not fit into memory.
        """
        if self.distillation is None:
            return
        InstanceQueues.check(len(sizes), self.distillation.queue, self.task.projected, self.device)
        if self.public is None or len(self.public) < 2:
            raise UserError(
                "distillation needs public images: give public=natural, synthetic, folder or packed,"
                " or method.server.distillation=null"
            )

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages weights (FADngs Eq. 10), then distils into them (FADngs Eq. 11, FADngs Eq. 12, FADngs Eq. 13)."""
        super().aggregate(updates)
        self.task.round = self.context.round
        if self.context.round == self.task.rounds:  # only then, to save memory in training
            self.last_merge = LastMerge(self.weights, {client: u.message for client, u in updates.items()})
        self.report = {}
        if self.distillation is None or self.public is None or self.task.warming_up:
            return
        teachers = {client: update.message for client, update in updates.items()}
        self.task.load_state_dict(self.auxiliary, strict=False)
        with self.context.seeded("distillation"):  # dropout draws random numbers
            self.weights, self.report = self.distillation(
                self.task, self.weights, teachers, self.public, self.context, self.fabric
            )


class ShareDensities(LatestMessages):
    """The exchange in which clients send densities of their images under the merged weights; the server keeps them."""

    name = "densities"

    discloses = (by_class("mean and covariance of the features of groups of like images", images=2),)

    def send(self, client: FADngsClient, loader: DataLoader) -> Message:
        """Estimates densities of the client's images (FADngs Eq. 1, FADngs Eq. 2, FADngs Eq. 3)."""
        densities = client.task.estimate(client.embed(client.context.round, loader), client.context)
        return {MEAN: densities.mean, COVARIANCE: densities.covariance}

    def upload_spec(self, client: FADngsClient) -> MessageSpec:
        """Declares any number of densities."""
        return client.densities_spec()

    def validate(self, server: FADngsServer, client_id: int, update: Update) -> None:
        """Checks that no density has fewer than two images."""
        densities = len(update.message[MEAN])
        if 2 * densities > update.num_samples:
            raise UserError(f"the client sent {densities} densities of {update.num_samples} images")


def exchanges(client: FADngsClient) -> Exchanges:
    """Lists densities under the initial weights; then, in every round, training and densities under merged weights."""
    if not client.share_densities:
        return fedavg.exchanges(client)
    evidence = replace(
        WEIGHTS, densities=lambda server: {c: (m[MEAN], m[COVARIANCE]) for c, m in server.last.items()}
    )
    return Exchanges((ShareDensities(initial=True),), (Train(MEANS), ShareDensities()), evidence=evidence)
