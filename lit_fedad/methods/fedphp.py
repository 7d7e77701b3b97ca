"""FedPHP: clients inherit a personal model from round to round (Li et al., ECML-PKDD 2021; FedPHP Alg. 1)."""

from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.condensation.kernels import mmd
from lit_fedad.contracts import Task
from lit_fedad.core.bounds import at_least, within
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.functional import evaluating, pooled, with_weights


class FedPHPClient(FedAvgClient):
    """A client that keeps the features of the weights in training near its inherited model's, then updates that model.

    It minimises ``(1 - lambda) L(w) + lambda MMD(h(w), h(p))`` with the Gaussian `mmd`, and sends w. Then it updates
    its inherited weights to ``p = m p + (1 - m) w``, with which it predicts. The share m is
    ``mu k / max(1, floor(fraction T))``, at most mu, where k is the number of earlier rounds that the client has taken
    part in. So p equals w after its first round, as in the authors' code; before it p holds the initial weights.

    Args:
        rounds: Training rounds T.
        fraction: Share of the clients that take part in a round.
        mu: Largest weight of the old personal model.
        weight: Share lambda of the discrepancy in the loss; with 0 the client trains as in FedAvg.
    """

    own_model = True
    state_names = ("inherited", "participations")

    def __init__(
        self,
        task: Task,
        rounds: int,
        fraction: float = 1.0,
        local_epochs: int = 1,
        mu: float = 0.9,
        weight: float = 0.05,
    ) -> None:
        super().__init__(task, local_epochs)
        within("method.client", 0, 1, mu=mu, fraction=fraction, weight=weight)
        at_least("method.client", 0, rounds=rounds)
        self.mu, self.weight = mu, weight
        self.expected_participations = max(int(fraction * rounds), 1)
        self.participations = 0
        self.inherited = self.shared_state()

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
        discrepancy = mmd(pooled(features), target, "gaussian")
        loss = (1 - self.weight) * outputs["loss"] + self.weight * discrepancy
        return {**outputs, "loss": loss, "discrepancy": discrepancy}

    def on_train_end(self) -> None:
        """Updates the inherited model."""
        kept_share = self.mu * min(self.participations / self.expected_participations, 1)
        self.participations += 1
        for name, entry in self.shared_state().items():
            old = self.inherited[name].to(entry.device)
            self.inherited[name] = torch.lerp(entry, old, kept_share) if entry.is_floating_point() else entry
