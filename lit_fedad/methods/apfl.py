"""APFL: each client predicts with a mixture of a personal and the shared model (Deng et al., 2020; APFL Alg. 1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.contracts import Predictors, Task
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.functional import trainable, with_weights


class APFLClient(FedAvgClient):
    """A client that trains shared weights w as FedAvg does, and personal ones v at ``alpha v + (1 - alpha) w``.

    The mixture weight is updated by gradient descent too, ``alpha -= eta <v - w, grad L(mixture)>``, and clipped to
    [0, 1] (APFL Alg. 1).

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data per round (E).
        alpha: Initial share of the personal model, in [0, 1].
        adaptive: Whether alpha is learnt.

    Raises:
        UserError: If alpha is not in [0, 1].
    """

    state_names = ("personal_entries", "alpha")

    def __init__(self, task: Task, local_epochs: int = 1, alpha: float = 0.5, adaptive: bool = True) -> None:
        super().__init__(task, local_epochs)
        backbone = getattr(task, "backbone", None)
        # The frozen backbone is shared; all trainable parameters exist twice.
        self.personal: Task = copy.deepcopy(task, {id(backbone): backbone})
        self.adaptive = adaptive
        if not 0 <= alpha <= 1:
            raise UserError(f"method.client.alpha={alpha} must be in [0, 1]")
        self.alpha = torch.tensor(float(alpha), requires_grad=adaptive)

    @property
    def predictors(self) -> Predictors:
        """The mixture of each client; the server's model is the same for all."""
        return replace(super().predictors, shared=False)

    @property
    def personal_entries(self) -> dict[str, Tensor]:
        """Weights and running statistics of the personal model, by name."""
        return {**self._personal_buffers(), **trainable(self.personal)}

    @personal_entries.setter
    def personal_entries(self, entries: Mapping[str, Tensor]) -> None:
        self.personal.load_state_dict(entries, strict=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds one optimiser for w and v; it holds alpha too, whose gradient is then unscaled with theirs."""
        optimizer = self.task.configure_optimizers()
        for group in self.personal.configure_optimizers().param_groups:
            own = [
                parameter for parameter in group["params"] if parameter.requires_grad
            ]  # without the backbone, which the first group holds
            optimizer.add_param_group({**group, "params": own})
        self.alpha = self.alpha.detach().clone().requires_grad_(self.adaptive)
        optimizer.add_param_group({"params": [self.alpha]})
        return optimizer

    def on_train_start(self) -> None:
        """Prepares the personal model for training, with the local buffers (a bank) of the shared model."""
        self.personal.train()
        own = {name: self.task.state_dict()[name] for name in self.task.local_buffers}
        self.personal.load_state_dict(own, strict=False)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the shared model's loss plus that of the mixture, in which the shared weights are constants."""
        view = self.task.view(batch)
        shared = self.task.objective(self.task(view), view)
        mixture = self._mixture()
        mixed = with_weights(self.personal, mixture, lambda task: task.objective(task(view), view)["loss"])
        return {**shared, "loss": shared["loss"] + mixed, "mixture_loss": mixed, "alpha": self.alpha}

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Updates alpha by one step of plain gradient descent."""
        if self.alpha.grad is not None:
            with torch.no_grad():
                self.alpha.sub_(optimizer.param_groups[0]["lr"] * self.alpha.grad).clamp_(0, 1)
            self.alpha.grad = None  # so that the optimiser, whose rule is another, leaves it alone

    def on_train_end(self) -> None:
        """Sets the personal model to evaluation mode."""
        self.personal.eval()

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the mixture into the task, with the personal model's running statistics."""
        if which == "server":
            return
        mixed = {**self._personal_buffers(), **self._mixture()}
        self.task.load_state_dict({name: entry.detach() for name, entry in mixed.items()}, strict=False)

    def _mixture(self) -> dict[str, Tensor]:
        shared = trainable(self.task)
        return {
            name: self.alpha * v + (1 - self.alpha) * shared[name].detach()
            for name, v in trainable(self.personal).items()
        }

    def _personal_buffers(self) -> dict[str, Tensor]:
        kept = set(self.shared_keys())
        return {name: buffer for name, buffer in self.personal.named_buffers() if name in kept}
