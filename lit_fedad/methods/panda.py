"""Federated PANDA: one centre, and one bank of all clients' cluster centres (Reiss et al., CVPR 2021).

A baseline of FADngs Table I. Before round 1 clients send the mean and k-means centres of their pretrained features. So
the model before round 1 is DN2: nearest neighbours of pretrained features. In each round clients train, and after the
merger they send the k-means centres of their features under the merged weights.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import DisclosedBy, Disclosure, Disclosures, Kind, summed
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.client_runner import Train
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.methods.fedavg import MEANS, WEIGHTS, FedAvgClient, LatestMessages, LatestMessagesServer
from lit_fedad.tasks.panda import Panda

BANK, CENTRE, FISHER = "bank", "centre", "fisher."


class PandaClient(FedAvgClient):
    """A client that draws features to the common centre, and sends cluster centres of its own features.

    Args:
        vectors: Largest number of cluster centres that a client sends.
        bank: Whether scores are distances to the cluster centres of all clients (``shared``), or to the features of
            the client's ``own`` images.
        clip: Largest norm of the gradient; None for no limit.
    """

    needs = Panda
    task: Panda

    def __init__(
        self,
        task: Panda,
        local_epochs: int = 1,
        vectors: int = 100,
        bank: Literal["shared", "own"] = "shared",
        clip: float | None = 1e-3,
    ) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 1, vectors=vectors)
        above("method.client", 0, clip=clip)
        self.vectors, self.shared, self.clip = vectors, bank == "shared", clip

    def own_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists the client's own bank, where it is not shared."""
        return [] if self.shared else [BANK]

    def receive(self, message: Message) -> None:
        """Loads weights, centre, bank and Fisher information."""
        if self.task.ewc:
            self.task.fisher = {name: message[f"{FISHER}{name}"] for name in self.task.start}
        super().receive(message)

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the bank if it is shared, the centre and, with elastic weight consolidation, Fisher information."""
        return {**({BANK: self.bank_spec(None)} if self.shared else {}), **self.means_spec()}

    def means_spec(self) -> MessageSpec:
        """Declares centre and Fisher information, which clients send once and the server averages."""
        weights = self.task.start if self.task.ewc else {}
        fisher = {f"{FISHER}{name}": TensorSpec(tuple(w.shape), low=0) for name, w in weights.items()}
        return {CENTRE: TensorSpec((self.task.num_features,)), **fisher}

    def bank_spec(self, max_vectors: int | None) -> TensorSpec:
        """Declares at most ``max_vectors`` vectors, or any number of them (None)."""
        return TensorSpec((Free("vectors", max_vectors), self.task.num_features), unordered=True)

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Fills the client's own bank under the weights of the last round, if banks are not shared."""
        if not self.shared and self.context.round > 1:
            super().refresh(loader, predicts)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips the norm of the gradient."""
        if self.clip is not None:
            clip_grad_norm_([w for group in optimizer.param_groups for w in group["params"]], self.clip)


def _disclosed(client: PandaClient) -> Disclosures:
    what = "centres of clusters of the images' features, of few images or of one"
    mean = summed("mean of the images' features, and how they depend on the weights")
    return (*((Disclosure(Kind.PATCHES, what),) if client.shared else ()), mean)


class Banks(LatestMessages):
    """The exchange in which clients send cluster centres of their features under the merged weights.

    Before round 1 they also send the features' mean and Fisher information.
    """

    name = "banks"

    discloses = DisclosedBy(_disclosed)

    def send(self, client: PandaClient, loader: DataLoader) -> Message:
        """Returns the client's bank, if it is shared, and before round 1 its centre and Fisher information."""
        features = client.task.embed(loader)
        message: Message = {}
        if client.shared:
            vectors = min(client.vectors, len(features))
            clusters = kmeans(features, vectors, generator=client.context.generator("bank"))
            message[BANK] = clusters.centroids.float()
        else:
            client.task.bank = features.to(client.task.bank)
        if self.initial:
            message[CENTRE] = features.mean(0)
            if client.task.ewc:
                fisher = client.task.estimate_fisher(loader, client.context.generator("fisher"))
                message |= {f"{FISHER}{name}": entry for name, entry in fisher.items()}
        return message

    def upload_spec(self, client: PandaClient) -> MessageSpec:
        """Declares the form of `send`."""
        bank = {BANK: client.bank_spec(client.vectors)} if client.shared else {}
        return {**bank, **(client.means_spec() if self.initial else {})}

    def validate(self, server: LatestMessagesServer, client_id: int, update: Update) -> None:
        """Checks that a bank has no more vectors than the client has images, and at least one."""
        if BANK in update.message and not 1 <= len(update.message[BANK]) <= update.num_samples:
            raise UserError(
                f"the client sent {len(update.message[BANK])} vectors of {update.num_samples} images"
            )

    def aggregate(self, server: LatestMessagesServer, updates: Mapping[int, Update]) -> None:
        """Joins the last banks of all clients, and averages their centres and Fisher information."""
        banks, means = {}, {}
        for client, update in updates.items():
            means[client] = replace(update, message={n: e for n, e in update.message.items() if n != BANK})
            if BANK in update.message:
                banks[client] = replace(update, message={BANK: update.message[BANK]})
        if banks:
            super().aggregate(server, banks)
        if self.initial:
            server.auxiliary = {**server.auxiliary, **weighted_mean(means)}


def exchanges(client: PandaClient) -> Exchanges:
    """Lists centre and banks of pretrained features; then training and, if banks are shared, new banks every round."""
    return Exchanges(
        (Banks(initial=True),),
        (Train(MEANS), Banks()) if client.shared else (Train(MEANS),),
        evidence=WEIGHTS,
    )
