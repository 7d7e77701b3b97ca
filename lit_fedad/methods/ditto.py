"""Ditto: each client predicts with a model of its own, held near the averaged one (Li et al., ICML 2021, Alg. 1)."""

from typing import Any, Literal

from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import at_least
from lit_fedad.methods.parts.client_bases import AnchoredClient, PersonalModelClient
from lit_fedad.methods.parts.functional import trainable


class DittoClient(AnchoredClient, PersonalModelClient):
    """A client that trains shared weights w as FedAvg does, and personal weights v by ``grad L(v) + lam (v - w^t)``.

    Both models see the same batches, and the task's optimiser trains the personal model too. A client that has not
    taken part yet has the initial weights for v.

    Args:
        lam: Weight lambda of the term that holds v near the received weights ``w^t``; with 0, v is trained on the
            client's images alone.
    """

    def __init__(self, task: Task, local_epochs: int = 1, lam: float = 0.1) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, lam=lam)
        self.lam = lam

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the sum of both models' losses on one view; every weight gets a gradient from one of them only."""
        view = self.task.view(batch)
        shared = self.task.objective(self.task(view), view)
        personal = self.personal.objective(self.personal(view), view)["loss"]
        proximal = self.lam / 2 * self.squared_distance(trainable(self.personal))
        return {**shared, "loss": shared["loss"] + (personal + proximal), "personal_loss": personal}

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the personal model into the task."""
        if which == "own":
            self.task.load_state_dict(self.personal_entries, strict=False)
