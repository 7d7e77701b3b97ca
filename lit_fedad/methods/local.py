"""Local training without exchanges: a lower bound or, with one client that holds all data, an upper bound."""

from collections.abc import Iterable

from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, MessageSpec, Predictors, Task
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import WEIGHTS, FedAvgClient
from lit_fedad.methods.parts.functional import trainable
from lit_fedad.methods.parts.pooled_statistics import Prepare, standardised
from lit_fedad.tasks.memory_bank import MemoryBank


class LocalClient(FedAvgClient):
    """A client that trains without sharing.

    If the task trains no weights but fits something to images, it is fitted anew in every stage, to the stage's images.

    Args:
        local_epochs: Passes over the client's data per round (E), so that T rounds have T * E passes.
        keep_optimizer: Whether the optimiser's state is kept between rounds. No server overwrites the weights.
    """

    state_names = ("fitted_in",)
    shares_weights = False

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = True) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        self.fitted_in = 0
        """The stage to whose images the task was fitted; `Prepare` fits it to those of the first stage."""

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Checks that a task class learns without other clients."""
        super().check_task(task)
        if not (task.trains or task.prepares):
            raise UserError(
                f"task {task.__name__} neither trains nor prepares: a client alone learns nothing; give another method,"
                " or say prepares = True beside a refresh that learns"
            )

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Fits a task without trained weights to a stage that has begun; then refreshes it as `FedAvgClient` does."""
        if self.context.stage != self.fitted_in and self.task.prepares and not trainable(self.task):
            self.task.refresh(loader, self.context, first=True)
            self.fitted_in = self.context.stage
        super().refresh(loader, predicts)

    @property
    def predictors(self) -> Predictors:
        """A model of its own for each client."""
        return Predictors()

    def broadcast_spec(self) -> MessageSpec:
        """Declares an empty message."""
        return {}

    def shared_keys(self, learned: Iterable[str]) -> list[str]:
        """Returns an empty list: no entry is shared."""
        return []


class NearestNeighbourClient(LocalClient):
    """A client that holds all data and builds a bank without training: the centralised upper bound of memory banks."""

    needs = MemoryBank


def exchanges(client: LocalClient) -> Exchanges:
    """Lists local preparation where the task requires it; then training."""
    prepare = (Prepare(pooled=False),) if client.task.prepares or standardised(client.task) else ()
    return Exchanges(prepare, (Train(),), evidence=WEIGHTS)
