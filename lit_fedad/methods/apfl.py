"""APFL: each client predicts with a mixture of a personal and the shared model (Deng et al., 2020; APFL Alg. 1)."""

from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import at_least, within
from lit_fedad.methods.parts.client_bases import PersonalModelClient
from lit_fedad.methods.parts.functional import trainable, with_weights


class APFLClient(PersonalModelClient):
    """A client that trains shared weights w as FedAvg does, and personal weights v by the loss of a mixture.

    The mixture is ``alpha v + (1 - alpha) w``. Its weight alpha is updated in every step by gradient descent too,
    ``alpha -= eta (<v - w, grad L(mixture)> + decay alpha)``, and clipped to [0, 1]. The decay is taken from the
    authors' code. In that code eta is the learning rate of the plain SGD, alpha is updated only in the first step of a
    round, and alpha is constant by default. A client predicts with the mixture of v and the averaged w; that code tests
    the mixture with the client's own w. A client that has not taken part yet mixes in the initial weights.

    Args:
        alpha: Initial share of the personal model, in [0, 1].
        adaptive: Whether alpha is learnt.
        alpha_learning_rate: Step size eta of alpha. It is not the task's learning rate, which may be chosen for Adam.
        alpha_decay: Weight of alpha in its own gradient.

    Raises:
        UserError: If a number is out of range.
    """

    state_names = ("alpha",)

    def __init__(
        self,
        task: Task,
        local_epochs: int = 1,
        alpha: float = 0.5,
        adaptive: bool = True,
        alpha_learning_rate: float = 0.1,
        alpha_decay: float = 0.02,
    ) -> None:
        super().__init__(task, local_epochs)
        within("method.client", 0, 1, alpha=alpha)
        at_least("method.client", 0, alpha_learning_rate=alpha_learning_rate, alpha_decay=alpha_decay)
        self.alpha_learning_rate, self.alpha_decay = alpha_learning_rate, alpha_decay
        self.adaptive = adaptive
        self.alpha = torch.tensor(float(alpha), requires_grad=adaptive)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds one optimiser for w, v and alpha; it holds alpha so that mixed precision unscales its gradient too."""
        optimizer = super().configure_optimizers()
        self.alpha = self.alpha.detach().clone().requires_grad_(self.adaptive)
        optimizer.add_param_group({"params": [self.alpha]})
        return optimizer

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
                slope = self.alpha.grad + self.alpha_decay * self.alpha
                self.alpha.sub_(self.alpha_learning_rate * slope).clamp_(0, 1)
            self.alpha.grad = None  # the optimiser skips parameters without a gradient

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the mixture into the task, with the personal model's running statistics."""
        if which == "server":
            return
        mixed = {**self.personal_entries, **self._mixture()}
        self.task.load_state_dict({name: entry.detach() for name, entry in mixed.items()}, strict=False)

    def _mixture(self) -> dict[str, Tensor]:
        shared = trainable(self.task)
        return {
            name: self.alpha * v + (1 - self.alpha) * shared[name].detach()
            for name, v in trainable(self.personal).items()
        }
