"""FedProx: FedAvg with a proximal term that keeps clients near the received weights (Li et al., MLSys 2020)."""

from typing import Any

from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import at_least
from lit_fedad.methods.parts.client_bases import AnchoredClient
from lit_fedad.methods.parts.functional import trainable


class FedProxClient(AnchoredClient):
    """A client that minimises ``L(w) + mu/2 |w - w^t|^2``.

    Args:
        mu: Weight of the proximal term; 0 gives FedAvg.
    """

    def __init__(self, task: Task, local_epochs: int = 1, mu: float = 0.01) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, mu=mu)
        self.mu = mu

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss plus the proximal term."""
        outputs = self.task.training_step(batch, batch_idx)
        proximal = self.squared_distance(trainable(self.task))
        return {**outputs, "loss": outputs["loss"] + self.mu / 2 * proximal, "proximal": proximal}
