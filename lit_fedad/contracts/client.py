"""The client side of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts.context import Context
from lit_fedad.contracts.exchange import Exchanges
from lit_fedad.contracts.kept_state import read_kept, write_kept
from lit_fedad.contracts.message import Message, MessageSpec
from lit_fedad.contracts.task import Prediction, Task
from lit_fedad.errors import UserError


@dataclass(frozen=True)
class Predictors:
    """Which models a method predicts with.

    Attributes:
        shared: Whether all clients predict alike, so that scoring one of them scores all.
        server_shared: Whether the server's model is the same for all clients.
        own: Whether what a client has just trained is a model of its own; False where only the server makes models
            that are meant to predict.
        heads: Names of the method's classifiers beside the main one; predictions carry the logits of each.
        lent: Entries of the task's state that the server's model lacks; for its evaluation alone they are the mean,
            by data size, of the clients' own.
    """

    shared: bool = False
    server_shared: bool = False
    own: bool = True
    heads: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()


class Client(L.LightningModule):
    """The client side of one method: wraps a task and adds what the method needs.

    One live object serves every client of a process. What belongs to a single client is its `personal_state`, which
    is loaded before its turn and kept after it.

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data a round (E).
        keep_optimizer: Whether the optimiser's state lives on between rounds. Only right where the server never
            overwrites the weights that it optimises.

    Attributes:
        needs: What kind of task the method works with.
        kept: Names of the attributes that belong to a single client, beside those of base classes.

    Raises:
        UserError: If the method cannot work with this task, or there is no epoch to train.
    """

    needs: ClassVar[type[Task]] = Task
    kept: ClassVar[tuple[str, ...]] = ("optimizer_state",)

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = False) -> None:
        super().__init__()
        self.check_task(type(task))
        if local_epochs < 1:
            raise UserError(f"local_epochs={local_epochs} must be at least 1")
        self.task = task
        self.local_epochs = local_epochs
        self.keep_optimizer = keep_optimizer
        self.optimizer_state: dict[str, Any] | None = None
        self.context = Context(seed=0, round=0)

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Refuses a kind of task that the method cannot work with.

        Raises:
            UserError: In one line that says why.
        """
        if not issubclass(task, cls.needs):
            raise UserError(
                f"{cls.__name__} works with task {cls.needs.__name__}, not with {task.__name__}; leave task= out"
            )

    @property
    def exchanges(self) -> Exchanges:
        """The method's exchanges, in set-up and in every round."""
        raise NotImplementedError

    @property
    def predictors(self) -> Predictors:
        """Which models predict; by default each client has its own."""
        return Predictors()

    def begin(self, context: Context) -> None:
        """Starts a turn: sets which client this is now, and in which round."""
        self.context = context
        self.task.round = context.round

    def receive(self, message: Message) -> None:
        """Takes over what the server sent in training."""
        raise NotImplementedError

    def broadcast_spec(self) -> MessageSpec:
        """Declares the form of what `receive` takes."""
        raise NotImplementedError

    def refresh(self, loader: DataLoader) -> None:
        """Renews what depends on weights just received and on local data: before training, and after `deploy`.

        Args:
            loader: The client's training batches in a fixed order.
        """

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes one local step's loss; the task's, unless the method adds to it."""
        return self.task.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the optimiser of local steps; the task's, unless the method wants another."""
        return self.task.configure_optimizers()

    def send(self, loader: DataLoader) -> Message:
        """Returns what goes to the server after training.

        Args:
            loader: The client's training batches in a fixed order.
        """
        raise NotImplementedError

    def upload_spec(self) -> MessageSpec:
        """Declares the form of what `send` returns."""
        raise NotImplementedError

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Makes the task what predicts, where that is not what was received. Never called before training.

        Args:
            which: The client's own predictor, or the server's model.
        """

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Predicts a batch; the task's prediction, unless the method predicts otherwise."""
        return self.task.predict_step(batch, batch_idx)

    def personal_state(self) -> dict[str, Any]:
        """Reads what lives between rounds, is checkpointed, and never leaves the client: all of ``kept``."""
        return read_kept(self)

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Loads another client's `personal_state`."""
        write_kept(self, state)
