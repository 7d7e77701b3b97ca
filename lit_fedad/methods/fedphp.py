"""FedPHP: clients inherit a personal model from round to round (Li et al., ECML-PKDD 2021; FedPHP Alg. 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message, Predictors, Task
from lit_fedad.core.bounds import at_least, within
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.functional import evaluating, pooled, with_weights

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


def rbf_mmd(one: Tensor, other: Tensor) -> Tensor:
    """Computes the squared maximum mean discrepancy under a sum of Gaussian kernels (biased estimate).

    Args:
        one: Features [n, C].
        other: Features [m, C].
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squares = (a[:, None] - b[None]).square().sum(-1)
        return sum(
            (torch.exp(-squares / (2 * width)) for width in BANDWIDTHS), torch.zeros_like(squares)
        ).mean()

    return kernel(one, one) + kernel(other, other) - 2 * kernel(one, other)


class FedPHPClient(FedAvgClient):
    """A client that trains the received weights near the features of its inherited model, then updates that model.

    It minimises ``(1 - lambda) L(w) + lambda MMD(h(w), h(p))``, sends w, and keeps ``p = mu_t p + (1 - mu_t) w`` with
    ``mu_t = mu t / T``. It predicts with p.

    Args:
        task: What the client learns.
        rounds: Training rounds T.
        local_epochs: Passes over the client's data per round (E).
        mu: Weight of the old personal model in the last round.
        weight: Weight lambda of the discrepancy; with 0 training is FedAvg's.
    """

    state_names = ("inherited",)

    def __init__(
        self, task: Task, rounds: int, local_epochs: int = 1, mu: float = 0.9, weight: float = 0.05
    ) -> None:
        super().__init__(task, local_epochs)
        within("method.client", 0, 1, mu=mu)
        at_least("method.client", 0, weight=weight)
        self.rounds, self.mu, self.weight = rounds, mu, weight
        self.inherited = self.shared_state()

    @property
    def predictors(self) -> Predictors:
        """The inherited model of each client; the server's model is the same for all."""
        return replace(super().predictors, shared=False)

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the inherited model into the task; the server's model is the received one."""
        if which == "own":
            self.task.load_state_dict(self.inherited, strict=False)

    def on_train_start(self) -> None:
        """Moves the inherited model to the client's device."""
        self.inherited = {name: entry.to(self.device) for name, entry in self.inherited.items()}

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss plus the discrepancy to the inherited model's features."""
        view = self.task.view(batch)
        features = self.task(view)
        outputs = self.task.objective(features, view)
        with torch.no_grad(), evaluating(self.task):
            target = with_weights(self.task, self.inherited, lambda task: pooled(task(view)))
        discrepancy = rbf_mmd(pooled(features), target)
        loss = (1 - self.weight) * outputs["loss"] + self.weight * discrepancy
        return {**outputs, "loss": loss, "discrepancy": discrepancy}

    def send(self, loader: DataLoader) -> Message:
        """Returns the trained weights, after the update of the inherited model."""
        message = super().send(loader)
        kept = self.mu * self.context.round / self.rounds
        for name, entry in message.items():
            old = self.inherited[name].to(entry.device)
            self.inherited[name] = torch.lerp(entry, old, kept) if entry.is_floating_point() else entry
        return message
