"""APPLE: each client learns the weights of all clients' core models (Luo & Wu, IJCAI 2022; APPLE Alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Free, Message, MessageSpec, Predictors, Task, TensorSpec, Update
from lit_fedad.core.bounds import at_least
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.parts.functional import trainable, with_weights

CLIENTS, SHARES = "clients", "shares"


class AppleClient(FedAvgClient):
    """A client n that trains its core model c_n and its relations p_n at the mixture ``w_n = sum_m p_nm c_m``.

    The other cores are constants. Up to round L the term ``lambda_t mu/2 |p_n - p_0|^2``, with
    ``lambda_t = (1 + cos(pi t / L)) / 2``, keeps the relations near the clients' shares of the data p_0 (APPLE Alg. 1).
    Running statistics of normalisation layers belong to the mixture and are not sent.

    Args:
        task: What the client learns.
        rounds: Training rounds T.
        local_epochs: Passes over the client's data per round (E).
        relation_learning_rate: Step size of p_n, by plain gradient descent.
        mu: Weight of the proximal term.
        early: L as a share of all rounds.
    """

    state_names = ("relations",)

    def __init__(
        self,
        task: Task,
        rounds: int,
        local_epochs: int = 1,
        relation_learning_rate: float = 1e-3,
        mu: float = 0.1,
        early: float = 0.2,
    ) -> None:
        super().__init__(task, local_epochs, aggregate_buffers="local")
        at_least("method.client", 0, relation_learning_rate=relation_learning_rate, mu=mu, early=early)
        self.relation_learning_rate, self.mu = relation_learning_rate, mu
        self.early_rounds = early * rounds
        self.relations = torch.empty(0)
        self.shares = torch.empty(0)
        self.others: Message = {}
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
            self.relations = torch.full_like(self.shares, 1 / len(self.shares))
        self.others = {name: message[name] for name in trainable(self.task)}
        super().receive({name: cores[self.row] for name, cores in self.others.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the task's optimiser; it holds the relations too, whose gradient is then unscaled with the core's."""
        optimizer = super().configure_optimizers()
        self.relations = self.relations.detach().clone().requires_grad_()
        optimizer.add_param_group({"params": [self.relations]})
        return optimizer

    def on_train_start(self) -> None:
        """Moves the cores to the client's device."""
        self.others = {name: cores.to(self.device) for name, cores in self.others.items()}

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss at the mixture plus the proximal term of the relations."""
        outputs = with_weights(self.task, self._mixture(), lambda task: task.training_step(batch, batch_idx))
        distance = (self.relations - self.shares).square().sum().to(outputs["loss"].device)
        return {**outputs, "loss": outputs["loss"] + self._early() * self.mu / 2 * distance}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates the relations by their gradient ``<grad, c_m> + lambda_t mu (p_m - p0_m)``."""
        assert self.relations.grad is not None
        with torch.no_grad():
            self.relations.sub_(self.relation_learning_rate * self.relations.grad)
        self.relations.grad = None  # so that the optimiser, whose rule is another, leaves them alone

    def on_train_end(self) -> None:
        """Replaces the client's own core, as received, by the trained one."""
        self.others = {name: self._cores(name, core.detach()) for name, core in trainable(self.task).items()}

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the mixture into the task."""
        if which == "server":
            return
        relations = self.relations.detach()
        mixture = {
            name: torch.tensordot(relations.to(cores), cores, dims=1) for name, cores in self.others.items()
        }
        self.task.load_state_dict(mixture, strict=False)

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Recomputes the task's bank under the mixture, at which the loss is computed too."""
        own = self.shared_state()
        self.deploy()
        super().refresh(loader, predicts)
        self.task.load_state_dict(own, strict=False)

    def _early(self) -> float:
        t = self.context.round
        return (1 + math.cos(math.pi * t / self.early_rounds)) / 2 if t < self.early_rounds else 0.0

    def _mixture(self) -> dict[str, Tensor]:
        """Computes ``sum_m p_m c_m``, differentiable in p and in the client's own core."""
        relations = self.relations
        return {
            name: torch.tensordot(relations.to(core), self._cores(name, core), dims=1)
            for name, core in trainable(self.task).items()
        }

    def _cores(self, name: str, own: Tensor) -> Tensor:
        cores = self.others[name].to(own)
        return torch.cat([cores[: self.row], own[None], cores[self.row + 1 :]])


class AppleServer(FedAvgServer):
    """The server, which keeps every client's core model and sends all of them to every client.

    Args:
        client: A client, for the initial core model.
    """

    merges_sums = False
    state_names = ("known",)

    def __init__(self, client: AppleClient) -> None:
        super().__init__(client)
        self.known: Message = {}

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Sets the same initial core for every client."""
        shares = torch.tensor([float(size) for size in sizes.values()])
        cores = {name: core.expand(len(sizes), *core.shape).clone() for name, core in self.weights.items()}
        self.known = {**cores, CLIENTS: torch.tensor(list(sizes)), SHARES: shares / shares.sum()}

    def broadcast(self, client_id: int) -> Message:
        """Returns N core models, the clients' numbers and their shares of the images: N times FedAvg's bytes."""
        return self.known

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Replaces the cores of the round's clients; nothing is averaged."""
        rows = {client: row for row, client in enumerate(self.known[CLIENTS].tolist())}
        changed = {name: self.known[name].clone() for name in self.weights}
        for client, update in updates.items():
            for name, core in update.message.items():
                changed[name][rows[client]] = core
        self.known |= changed
