"""FedRep: a common representation under personal heads (Collins et al., ICML 2021, Alg. 1)."""

from __future__ import annotations

from lit_fedad.contracts import Predictors, Task
from lit_fedad.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient


class FedRepClient(FedAvgClient):
    """A client: trains its own head on the fixed representation, and the representation under the fixed head.

    The server's model is the representation under the mean of the clients' heads, which are lent for evaluation.

    Args:
        task: What the client learns; it needs a head, that is modules between its features and its output.
        head_epochs: Passes that train the head.
        base_epochs: Passes that train the representation.
        base_first: Whether these come before those of the head.

    Raises:
        UserError: If the task has no head.
    """

    def __init__(
        self, task: Task, head_epochs: int = 10, base_epochs: int = 1, base_first: bool = False
    ) -> None:
        super().__init__(task, head_epochs + base_epochs)
        self.head_epochs, self.base_epochs, self.base_first = head_epochs, base_epochs, base_first
        self.epoch = 0
        head = tuple(f"{module}." for module in task.output_modules)
        self.head = [p for name, p in task.named_parameters() if name.startswith(head)]
        self.base = [
            p for name, p in task.named_parameters() if p.requires_grad and not name.startswith(head)
        ]

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """A head is needed."""
        super().check_task(task)
        if not task.output_modules:
            raise UserError(
                f"method fedrep keeps heads personal, and task {task.__name__} has none;"
                " give task=classifier or task=autoencoder"
            )

    def shared_keys(self) -> list[str]:
        """The representation."""
        head = tuple(f"{module}." for module in self.task.output_modules)
        return [name for name in super().shared_keys() if not name.startswith(head)]

    @property
    def predictors(self) -> Predictors:
        """Each client's own head; the server's model is the representation under the mean of all heads."""
        return Predictors(server_shared=True, lent=tuple(self.own_entries))

    @property
    def trains_base(self) -> bool:
        """Whether this epoch trains the representation, not the head."""
        first = self.base_epochs if self.base_first else self.head_epochs
        return (self.epoch < first) == self.base_first

    def on_train_start(self) -> None:
        """Begins to count epochs."""
        self.epoch = -1

    def on_train_epoch_start(self) -> None:
        """Frees the part whose turn it is, and fixes the other."""
        self.epoch += 1
        self._free(head=not self.trains_base, base=self.trains_base)

    def on_train_end(self) -> None:
        """Leaves nothing fixed."""
        self._free(head=True, base=True)

    def _free(self, head: bool, base: bool) -> None:
        for parameter in self.head:
            parameter.requires_grad_(head)
        for parameter in self.base:
            parameter.requires_grad_(base)
