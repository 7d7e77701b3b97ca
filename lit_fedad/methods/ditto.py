"""Ditto: each client predicts with a model of its own, held near the averaged one (Li et al., ICML 2021, Alg. 1)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.contracts import Predictors, Task
from lit_fedad.core.bounds import at_least
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.functional import trainable


class DittoClient(FedAvgClient):
    """A client that trains shared weights w as FedAvg does, and its own v by ``grad L(v) + lam (v - w^t)``.

    Both look at the same batches, and the personal model is trained by the task's optimiser too. A client that has not
    taken part yet has the initial weights for v.

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data per round (E).
        lam: Weight lambda that holds v near the received weights ``w^t``; 0 is training alone.
    """

    state_names = ("personal_entries",)

    def __init__(self, task: Task, local_epochs: int = 1, lam: float = 0.1) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, lam=lam)
        self.lam = lam
        backbone = getattr(task, "backbone", None)
        # The frozen backbone is shared; all trainable parameters exist twice.
        self.personal: Task = copy.deepcopy(task, {id(backbone): backbone})
        self._received: dict[str, Tensor] = {}

    @property
    def predictors(self) -> Predictors:
        """The personal model of each client; the server's model is the same for all."""
        return replace(super().predictors, shared=False)

    @property
    def personal_entries(self) -> dict[str, Tensor]:
        """Weights and running statistics of the personal model, by name."""
        state = self.personal.state_dict()
        return {name: state[name] for name in self.shared_keys()}

    @personal_entries.setter
    def personal_entries(self, entries: Mapping[str, Tensor]) -> None:
        self.personal.load_state_dict(entries, strict=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds one optimiser of w and v."""
        optimizer = self.task.configure_optimizers()
        for group in self.personal.configure_optimizers().param_groups:
            # without the backbone, which the first group holds
            mine = [parameter for parameter in group["params"] if parameter.requires_grad]
            optimizer.add_param_group({**group, "params": mine})
        return optimizer

    def on_train_start(self) -> None:
        """Stores ``w^t``, and gives the personal model what is prepared from local data (a bank)."""
        self._received = {name: p.detach().clone() for name, p in trainable(self.task).items()}
        self.personal.train()
        self.personal.round = self.task.round
        state = self.task.state_dict()
        self.personal.load_state_dict({name: state[name] for name in self.task.local_buffers}, strict=False)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the sum of both models' losses on one view; no weight has a gradient of both."""
        view = self.task.view(batch)
        shared = self.task.objective(self.task(view), view)
        own = self.personal.objective(self.personal(view), view)["loss"]
        distances = [
            (v - self._received[name]).square().sum() for name, v in trainable(self.personal).items()
        ]
        held = own + self.lam / 2 * torch.stack(distances).sum()
        return {**shared, "loss": shared["loss"] + held, "personal_loss": own}

    def on_train_end(self) -> None:
        """Sets the personal model to evaluation mode."""
        self.personal.eval()

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the personal model into the task."""
        if which == "own":
            self.task.load_state_dict(self.personal_entries, strict=False)
