"""FADngs: noisy global densities, contrastive training, ensemble distillation (Dong et al., TNNLS 2024).

Every round takes two exchanges, in the order of the paper's Algorithm 1 from its second line on: clients train under
the global model and densities and send weights; the server merges them, and clients send the densities of their images
under the merged model. Round 0 is a first exchange of densities, under the initial weights.

What holds on real images, at a scale far below the paper's (docs/fadngs.md): distillation is worth some two points of
AUROC on CIFAR-100 over the average, as the paper claims, although it undoes much of what the clients' contrast has
learnt; the gain of contrast over SimCLR is within a point or two. The paper's figures are out of reach there.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Message, Payload, TensorSpec, Update
from lit_fedad.errors import UserError
from lit_fedad.methods.ensemble_distillation import EnsembleDistillation, InstanceQueues
from lit_fedad.methods.fedavg import Buffers, FedAvgClient, FedAvgServer, form
from lit_fedad.tasks.contrastive import Contrastive

MEAN, COVARIANCE = "densities.mean", "densities.covariance"


class FADngsClient(FedAvgClient):
    """A client: trains under the densities of all clients, and sends its own.

    Args:
        task: A `Contrastive` task.
        local_epochs: E_l.
        aggregate_buffers: As in `FedAvgClient`.
        share_densities: Whether densities cross (NGDE); otherwise clients judge by their own, as under FedAvg.
    """

    needs = Contrastive
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
        self._embedded: tuple[int, Tensor, Tensor] | None = None

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """A first exchange of densities."""
        return ("densities",) if self.share_densities else super().setup_phases

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Training, then densities under the merged weights."""
        return ("train", "densities") if self.share_densities else super().exchanges

    @property
    def uniform(self) -> bool:
        """With weights and densities in common, clients predict alike."""
        return self.share_densities and self.aggregate_buffers == "mean"

    def receive(self, broadcast: Message) -> None:
        """Takes over weights, and densities."""
        self.task.load_state_dict(broadcast, strict=False)

    def adapt(self, loader: DataLoader) -> None:
        """Predicts which images are normal (Eq. 8), from the embeddings that the last densities were made of."""
        if not self.share_densities:
            super().adapt(loader)
            return
        if self._embedded is None or self._embedded[0] != self.context.round - 1:
            self._embedded = self._embed(self.context.round - 1, loader)
        _, z, index = self._embedded
        self.task.select(z, index)

    def send(self, loader: DataLoader) -> Message:
        """The trained weights; or densities (Eq. 1-3)."""
        if self.phase != "densities":
            return super().send(loader)
        self._embedded = self._embed(self.context.round, loader)
        found = self.task.estimate(self._embedded[1], self.context)
        return {MEAN: found.mean, COVARIANCE: found.covariance}

    def _embed(self, round: int, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """The client's embeddings and their positions, with the round whose merged weights made them."""
        z, index = self.task.embed(loader)
        return round, z.cpu(), index

    def personal_state(self) -> dict[str, Any]:
        """Embeddings under the weights of the last exchange of densities."""
        state = super().personal_state()
        if self.share_densities:  # all clients' densities come with every message, and what follows from them
            state["task"] = {
                n: entry for n, entry in state["task"].items() if n not in self.task.local_buffers
            }
        return {**state, "embedded": self._embedded}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client in."""
        super().load_personal_state(state)
        self._embedded = state["embedded"]


class LastMerge(NamedTuple):
    """The models that the last round's global model was made of.

    Attributes:
        averaged: Weights before distillation.
        local: Weights by client.
    """

    averaged: Message
    local: dict[int, Message]


class FADngsServer(FedAvgServer):
    """The server: keeps the clients' last densities, averages weights, and distils.

    Args:
        client: A client, for the initial weights.
        distillation: SED; None for the average alone.
        public: Public images uint8 [P, 3, S, S]; needed by ``distillation``.

    Attributes:
        densities: Those last known of each client, in client order.
        density_set: All of them, as they are broadcast.
        last_merge: After the last round, what was merged in it; not part of the state.
    """

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
        self.task: Contrastive = deepcopy(client.task)
        self.distillation, self.public = distillation, public
        self.densities: dict[int, Message] = {}
        self.density_set: Message = {}
        self.last_merge: LastMerge | None = None
        self._clients = 0
        self._report: dict[str, float] = {}

    def enrol(self, sizes: Mapping[int, int]) -> None:
        """Learns how many may teach at once."""
        self._clients = len(sizes)

    def begin(self, context: Context) -> None:
        """Starts a round; before anything is trained, makes sure that it can be distilled.

        Raises:
            UserError: If there are no public images, or the queues do not fit into memory.
        """
        super().begin(context)
        # In the set-up alone: a trained server answers without public images.
        if self.distillation is None or context.round > 0:
            return
        device = self.fabric.device if self.fabric else torch.device("cpu")
        InstanceQueues.check(
            self._clients, self.distillation.queue, self.task.densities.mean.shape[1], device
        )
        if self.public is None or len(self.public) < 2:
            raise UserError(
                "distillation needs public images: give public=synthetic, folder or packed,"
                " or method.server.distillation=null"
            )

    def download_payload(self) -> Payload:
        """Weights, and in training the densities of all clients."""
        return form(self.broadcast(0))

    def upload_payload(self) -> Payload:
        """Weights, or any number of densities."""
        if self.phase != "densities":
            return super().upload_payload()
        width = self.task.densities.mean.shape[1]
        return {
            MEAN: TensorSpec((None, width)),
            COVARIANCE: TensorSpec((None, width, width)),
        }

    def broadcast(self, client_id: int) -> Message:
        """The same to every client; before round 1 nothing, since all draw the same weights."""
        if self.phase == "densities":
            return self.weights if self.context.round > 0 else {}
        return {**super().broadcast(client_id), **self.density_set}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Takes in densities, or weights."""
        if self.phase == "densities":
            self._know({**self.densities, **{client: update.message for client, update in updates.items()}})
        else:
            super().aggregate(updates)

    def _know(self, densities: Mapping[int, Message]) -> None:
        """Keeps densities by client, and joins them once: equal messages must be the same tensors to be packed once."""
        self.densities = dict(sorted(densities.items()))
        messages = self.densities.values()
        self.density_set = {
            name: torch.cat([message[name] for message in messages]) for name in (MEAN, COVARIANCE)
        }

    def merge(self, updates: Mapping[int, Update]) -> None:
        """The average (Eq. 10), from which distillation starts (Eq. 11-13)."""
        super().merge(updates)
        self.task.round = self.context.round
        if self.context.round == self.task.rounds:  # of no other round, so that none is held through training
            self.last_merge = LastMerge(self.weights, {client: u.message for client, u in updates.items()})
        self._report = {}
        if self.distillation is None or self.public is None or self.task.warming_up:
            return
        teachers = {client: update.message for client, update in updates.items()}
        self.task.load_state_dict(self.density_set, strict=False)
        self.weights, self._report = self.distillation(
            self.task, self.weights, teachers, self.public, self.context, self.fabric
        )

    def diagnostics(self) -> dict[str, float]:
        """What distillation reports."""
        return self._report

    def state_dict(self) -> dict[str, Any]:
        """Weights and densities."""
        return {**super().state_dict(), "densities": self.densities}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        super().load_state_dict(state)
        if state["densities"]:
            self._know(state["densities"])
