"""Ditto: each client predicts with a model of its own, held near the averaged one (Li et al., ICML 2021, Alg. 1)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import at_least
from lit_fedad.methods.parts.functional import trainable
from lit_fedad.methods.parts.personal_model import PersonalModelClient


class DittoClient(PersonalModelClient):
    """A client that trains shared weights w as FedAvg does, and its own v by ``grad L(v) + lam (v - w^t)``.

    Both look at the same batches, and the personal model is trained by the task's optimiser too. A client that has not
    taken part yet has the initial weights for v.

    Args:
        lam: Weight lambda that holds v near the received weights ``w^t``; 0 is training alone.
    """

    def __init__(self, task: Task, local_epochs: int = 1, lam: float = 0.1) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, lam=lam)
        self.lam = lam
        self._received: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        """Stores ``w^t``."""
        super().on_train_start()
        self._received = {name: p.detach().clone() for name, p in trainable(self.task).items()}

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

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the personal model into the task."""
        if which == "own":
            self.task.load_state_dict(self.personal_entries, strict=False)
