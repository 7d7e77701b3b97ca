"""APPLE: each client learns the weights of all clients' core models (Luo & Wu, IJCAI 2022; APPLE Alg. 1)."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Free, Message, MessageSpec, Predictors, Task, TensorSpec, Update
from lit_fedad.contracts.compute import full_precision
from lit_fedad.contracts.evidence import Invertible, SentWeights
from lit_fedad.contracts.randomness import generator
from lit_fedad.core.bounds import at_least, below_one
from lit_fedad.methods.fedavg import WEIGHTS, FedAvgClient, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.functional import trainable, with_weights
from lit_fedad.methods.parts.weight_evidence import invertible_model

CLIENTS, SHARES = "clients", "shares"


class AppleClient(FedAvgClient):
    """A client n that trains its core model c_n and its relations p_n at the mixture ``w_n = sum_m p_nm c_m``.

    The other clients' cores are constants in training. Relations begin at p_0, the clients' shares of the data. In the
    first ``L = floor(early T)`` rounds the term ``lambda mu |p_n - p_0|^2`` keeps the relations near p_0. With r the
    round, counted from 0, lambda is ``0.001^(r / L)`` or ``(1 + cos(pi r / L)) / 2``. The initial relations, the
    schedules and the relations' optimiser are those of the authors' code. Running statistics of normalisation layers
    belong to the mixture and are not sent.

    Args:
        rounds: Training rounds T.
        relation_learning_rate: Step size of p_n, by SGD.
        relation_momentum: Momentum of p_n's SGD, which starts anew in each round.
        mu: Weight of the proximal term.
        early: L as a share of all rounds T.
        schedule: How lambda falls.
    """

    state_names = ("relations",)

    def __init__(
        self,
        task: Task,
        rounds: int,
        local_epochs: int = 1,
        relation_learning_rate: float = 1e-3,
        relation_momentum: float = 0.9,
        mu: float = 0.1,
        early: float = 0.2,
        schedule: Literal["exponential", "cosine"] = "exponential",
    ) -> None:
        super().__init__(task, local_epochs, aggregate_buffers="local")
        at_least("method.client", 0, rounds=rounds, mu=mu, early=early)
        at_least("method.client", 0, relation_learning_rate=relation_learning_rate)
        below_one("method.client", relation_momentum=relation_momentum)
        self.relation_learning_rate, self.relation_momentum = relation_learning_rate, relation_momentum
        self.mu, self.early_rounds, self.schedule = mu, int(early * rounds), schedule
        self.relations = torch.empty(0)
        self.shares = torch.empty(0)
        self.received_cores: Message = {}
        self.row = 0

    @property
    def predictors(self) -> Predictors:
        """The mixture of each client; the server has no model besides the clients' cores."""
        return Predictors()

    def broadcast_spec(self) -> MessageSpec:
        """Declares N core models, the clients' numbers [N] and their shares of the images [N]."""
        clients = Free("clients")
        cores = {
            name: replace(core, shape=(clients, *core.shape)) for name, core in self.shared_spec().items()
        }
        numbers = TensorSpec((clients,), torch.int64, low=0, distinct=True)
        return {**cores, CLIENTS: numbers, SHARES: TensorSpec((clients,), low=0, high=1)}

    def receive(self, message: Message) -> None:
        """Loads all clients' core models."""
        self.row = message[CLIENTS].tolist().index(self.context.client)
        self.shares = message[SHARES]
        if not len(self.relations):
            self.relations = self.shares.clone()
        self.received_cores = {name: message[name] for name in trainable(self.task)}
        super().receive({name: cores[self.row] for name, cores in self.received_cores.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the task's optimiser; it holds the relations so that mixed precision unscales their gradient too."""
        optimizer = super().configure_optimizers()
        self.relations = self.relations.detach().clone().requires_grad_()
        optimizer.add_param_group({"params": [self.relations]})
        self._relation_optimizer = torch.optim.SGD(
            [self.relations], lr=self.relation_learning_rate, momentum=self.relation_momentum
        )
        return optimizer

    def on_train_start(self) -> None:
        """Moves the cores to the client's device."""
        self.received_cores = {name: cores.to(self.device) for name, cores in self.received_cores.items()}

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss at the mixture plus the proximal term of the relations."""
        outputs = with_weights(self.task, self._mixture(), lambda task: task.training_step(batch, batch_idx))
        distance = (self.relations - self.shares).square().sum().to(outputs["loss"].device)
        return {**outputs, "loss": outputs["loss"] + self.anchoring() * self.mu * distance}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates the relations by their gradient ``<grad, c_m> + 2 lambda mu (p_m - p0_m)``."""
        self._relation_optimizer.step()
        self.relations.grad = None  # the task's optimiser skips parameters without a gradient

    def on_train_end(self) -> None:
        """Replaces the client's own core, as received, by the trained one."""
        self.received_cores = {
            name: self._cores(name, core.detach()) for name, core in trainable(self.task).items()
        }

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the mixture into the task."""
        if which == "server":
            return
        self.load_mixture(self.relations.detach())

    def load_mixture(self, relations: Tensor) -> None:
        """Loads the mixture of the received cores by some relations [N] into the task."""
        mixture = {
            name: torch.tensordot(relations.to(cores), cores, dims=1)
            for name, cores in self.received_cores.items()
        }
        self.task.load_state_dict(mixture, strict=False)

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Recomputes the task's bank under the mixture, since training computes the loss at the mixture too."""
        core = self.shared_state()
        self.deploy()
        super().refresh(loader, predicts)
        self.task.load_state_dict(core, strict=False)

    def anchoring(self) -> float:
        """Computes lambda, which holds relations near the shares of the data in early rounds."""
        completed_rounds = self.context.round - 1
        if completed_rounds >= self.early_rounds:
            return 0.0
        progress = completed_rounds / self.early_rounds
        return 1e-3**progress if self.schedule == "exponential" else (1 + math.cos(math.pi * progress)) / 2

    def _mixture(self) -> dict[str, Tensor]:
        """Computes ``sum_m p_m c_m``, differentiable in p and in the client's own core."""
        own_core = trainable(self.task)
        with full_precision(next(iter(own_core.values()))):  # mixed precision keeps weights in float32
            return {
                name: torch.tensordot(self.relations.to(weight), self._cores(name, weight), dims=1)
                for name, weight in own_core.items()
            }

    def _cores(self, name: str, own_weight: Tensor) -> Tensor:
        """Returns one weight of all clients' cores [N, ...], with the client's own row replaced by ``own_weight``."""
        cores = self.received_cores[name].to(own_weight)
        return torch.cat([cores[: self.row], own_weight[None], cores[self.row + 1 :]])


def invertible_mixture(client: AppleClient, received: MessageSpec, sent: MessageSpec) -> Invertible | None:
    """Says that an attack can reconstruct images from the change of a core, taken as a gradient at the mixture.

    The attack mixes the cores by the clients' shares of the data, which the server knows. Relations begin at these
    shares; the relations that a client has learnt never leave it.
    """
    evidence = invertible_model(client, received, sent)
    if isinstance(evidence, SentWeights):
        return replace(evidence, settle=lambda: client.load_mixture(client.shares))
    return evidence


def exchanges(client: AppleClient) -> Exchanges:
    """Lists FedAvg's exchanges; audits reconstruct images at the mixture (`invertible_mixture`)."""
    return with_exchanges(client, evidence=replace(WEIGHTS, invertible=invertible_mixture))


class AppleServer(FedAvgServer):
    """The server, which keeps every client's core model and sends all of them to every client.

    Args:
        client: A client, for the initial core model.
        independent_init: Whether clients begin with independent random cores, as in the authors' code. Each core is
            then the initial model with the entries of every tensor permuted at random. With False, all cores begin as
            the initial model.
        start: The run that the initial weights come from; all cores then begin with these weights, whatever
            `independent_init` says. None if the initial weights are random.
    """

    merges_sums = False
    state_names = ("known",)

    def __init__(self, client: AppleClient, independent_init: bool = True, start: str | None = None) -> None:
        super().__init__(client)
        self.independent_init = independent_init and start is None
        self.known: Message = {}

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Sets the initial core of every client, before the first round."""
        if self.known:
            return
        shares = torch.tensor([float(size) for size in sizes.values()])
        cores = {name: torch.stack([core] * len(sizes)) for name, core in self.weights.items()}
        if self.independent_init:
            for row, client in enumerate(sizes):
                draw = generator(0, "core", client=client)  # the initial model depends on the seed already
                for name, core in self.weights.items():
                    order = torch.randperm(core.numel(), generator=draw)
                    cores[name][row] = core.flatten()[order].view(core.shape)
        self.known = {**cores, CLIENTS: torch.tensor(list(sizes)), SHARES: shares / shares.sum()}

    def broadcast(self, client_id: int) -> Message:
        """Returns N core models, the clients' numbers and their shares of the images: N times the bytes of FedAvg."""
        return self.known

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Replaces the cores of the round's clients; nothing is averaged."""
        rows = {client: row for row, client in enumerate(self.known[CLIENTS].tolist())}
        changed = {name: self.known[name].clone() for name in self.weights}
        for client, update in updates.items():
            for name, core in update.message.items():
                changed[name][rows[client]] = core
        self.known |= changed
