"""FedRep: a shared representation with personal heads (Collins et al., ICML 2021; FedRep Alg. 1)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Predictors, Task
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient


class FedRepClient(FedAvgClient):
    """A client that trains its own head with a fixed representation, and the shared representation with a fixed head.

    The server's model is the representation with the mean of the clients' heads (`Predictors.lent`).

    Args:
        task: What the client learns. It must have a head: modules between its features and its output.
        head_epochs: Passes that train the head.
        base_epochs: Passes that train the representation.
        base_first: Whether the representation is trained before the head.

    Raises:
        UserError: If the task trains nothing but its head or lacks a module of it, or there is no epoch.
    """

    def __init__(
        self, task: Task, head_epochs: int = 10, base_epochs: int = 1, base_first: bool = False
    ) -> None:
        at_least("method.client", 0, head_epochs=head_epochs, base_epochs=base_epochs)
        if head_epochs == base_epochs == 0:
            raise UserError("method.client.head_epochs=0 base_epochs=0 train nothing; raise one of them")
        super().__init__(task, head_epochs + base_epochs)
        if absent := sorted({*task.output_modules} - {*dict(task.named_modules())}):
            raise UserError(
                f"{type(task).__name__}: output_modules names {absent}, which are no modules; without them heads would"
                " be shared"
            )
        self.head_epochs, self.base_epochs, self.base_first = head_epochs, base_epochs, base_first
        self.epoch = 0
        head = tuple(f"{module}." for module in task.output_modules)
        self.head = [p for name, p in task.named_parameters() if name.startswith(head)]
        self.base = [
            p for name, p in task.named_parameters() if p.requires_grad and not name.startswith(head)
        ]
        if not self.base:
            raise UserError(
                f"task {type(task).__name__} trains nothing but its head as it is set, and heads are not shared; give"
                " features.hidden of at least 1, or method=local"
            )

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Checks that a task class has a head."""
        super().check_task(task)
        if not task.output_modules:
            raise UserError(
                f"method fedrep keeps heads personal, and task {task.__name__} has none;"
                " give task=classifier or task=autoencoder"
            )

    def shared_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists the entries of the representation."""
        head = tuple(f"{module}." for module in self.task.output_modules)
        return [name for name in super().shared_keys(learned) if not name.startswith(head)]

    @property
    def predictors(self) -> Predictors:
        """Each client's own head on the merged representation; the server's model has the mean of all heads on it."""
        return Predictors(
            server_shared=True, merged=True, lent=tuple(self.own_keys(learned_state(self.task)))
        )

    @property
    def trains_base(self) -> bool:
        """Whether the current epoch trains the representation, not the head."""
        first = self.base_epochs if self.base_first else self.head_epochs
        return (self.epoch < first) == self.base_first

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the task's optimiser of both parts, after enabling gradients: a failed client left some disabled."""
        self._set_trained(head=True, base=True)
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        """Resets the count of epochs."""
        self.epoch = -1

    def on_train_epoch_start(self) -> None:
        """Enables gradients for the part that the epoch trains, and disables them for the other."""
        self.epoch += 1
        self._set_trained(head=not self.trains_base, base=self.trains_base)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss, which may not depend on the part in training, as that of AE-1SVM in late rounds."""
        outputs = super().training_step(batch, batch_idx)
        if not outputs["loss"].requires_grad:
            outputs["loss"].requires_grad_()  # so that backward passes, and changes no weight
        return outputs

    def on_train_end(self) -> None:
        """Enables gradients for both parts."""
        self._set_trained(head=True, base=True)

    def _set_trained(self, head: bool, base: bool) -> None:
        """Sets which parts get gradients."""
        for parameter in self.head:
            parameter.requires_grad_(head)
        for parameter in self.base:
            parameter.requires_grad_(base)
