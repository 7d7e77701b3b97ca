"""The client side of a method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts.disclosure import Discloses, Disclosures
from lit_fedad.contracts.message import Message, MessageSpec
from lit_fedad.contracts.randomness import Context
from lit_fedad.contracts.task import Prediction, Task, cosine_decay
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError, not_there


@dataclass(frozen=True)
class Predictors:
    """The models that a method predicts with.

    Attributes:
        shared: Whether all clients predict with the same model, so that scoring one client scores all.
        shared_at_first: Whether all clients predict with the same model before round 1, when none has trained weights
            of its own yet.
        server_shared: Whether the server's model is the same for all clients.
        own: Whether a client's trained weights are a model that can predict; False where only the server builds models
            that predict.
        merged: Whether a client predicts with the server's weights and its personal weights, not with the weights that
            it trained last.
        heads: Names of the method's classifiers beside the main one; predictions carry the logits of each.
        lent: Names of entries of the task's state that the server's model lacks. Only for the evaluation of the
            server's model, the mean of the clients' entries, weighted by data size, takes their place.
    """

    shared: bool = False
    shared_at_first: bool = False
    server_shared: bool = False
    own: bool = True
    merged: bool = False
    heads: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()


class Client(Discloses, L.LightningModule):
    """The client side of one method, which wraps a task and adds what the method needs.

    One live object serves every client of a process. The personal state of a single client consists of the attributes
    that ``state_names`` lists. It is loaded before the client plays an exchange (`load_state`), read after the exchange
    (`state_of`), and checkpointed; it never leaves the client.

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data a round (E).
        keep_optimizer: Whether the optimiser's state is kept between rounds. Correct only where the server never
            overwrites the optimised weights.

    Attributes:
        needs: Class of task that the method requires.
        own_model: Whether each client predicts with a model of its own, in addition to the server's model.
        context: Seed, round, client, exchange and stage; set before the client plays an exchange.
        decay_rounds: Number of rounds over which learning rates fall (`cosine_decay`); None where they stay.
        state_names: Names of the attributes that hold a single client's state, in addition to those of base classes.
        discloses: What the message of `send` reveals about the client's images. A class that overrides `send` must
            declare it again.

    Raises:
        UserError: If the method cannot work with this task, or there is no epoch to train.
    """

    needs: ClassVar[type[Task]] = Task
    own_model: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("optimizer_state", "loss_scale")
    discloses: Disclosures = ()
    decay_rounds: int | None = None

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = False) -> None:
        super().__init__()
        self.check_task(type(task))
        at_least("method.client", 1, local_epochs=local_epochs)
        self.task = task
        self.local_epochs = local_epochs
        self.keep_optimizer = keep_optimizer
        if absent := [*{*task.local_buffers, *task.free_buffers} - {*dict(task.named_buffers())}]:
            raise TypeError(
                f"{type(task).__name__}: local_buffers or free_buffers names {sorted(absent)}, which are no buffers"
            )
        self.optimizer_state: dict[str, Any] | None = None
        self.loss_scale: dict[str, Any] | None = None  # gradient scaler of 16-mixed; set after training
        self.context = Context(seed=0, round=0)

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Checks that the method supports a class of task.

        Args:
            task: The class of task.

        Raises:
            UserError: If the method does not support it.
        """
        if not issubclass(task, cls.needs):
            raise UserError(
                f"{cls.__name__} works with task {cls.needs.__name__}, not with {task.__name__}; leave task= out"
            )

    @property
    def predictors(self) -> Predictors:
        """The models that predict; by default each client has its own."""
        return Predictors()

    def receive(self, message: Message) -> None:
        """Loads the server's message before training."""
        raise not_there(self, "receive")

    def broadcast_spec(self) -> MessageSpec:
        """Declares the form of the message that `receive` takes."""
        raise not_there(self, "broadcast_spec")

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Recomputes everything that depends on received weights and local data, before training and after `deploy`.

        Args:
            loader: The client's training batches in a fixed order.
            predicts: Whether predictions follow; otherwise training does.
        """

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the loss of one local step; by default the task's loss."""
        return self.task.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the optimiser of local steps; by default the task's optimiser."""
        return self.task.configure_optimizers()

    def optimizer_of_round(self) -> torch.optim.Optimizer:
        """Builds the optimiser of local steps, at this round's learning rates.

        Raises:
            UserError: If `configure_optimizers` returns anything but one optimiser.
        """
        optimizer = self.configure_optimizers()
        if not isinstance(optimizer, torch.optim.Optimizer):  # Lightning takes lists and schedules too
            raise UserError(
                f"{type(self.task).__name__}: configure_optimizers gives a {type(optimizer).__name__}: return one"
                " optimiser; learning rates fall by round with learning_rate_decay=cosine"
            )
        if self.decay_rounds is not None:
            for group in optimizer.param_groups:
                group["lr"] *= cosine_decay(self.context.round, self.decay_rounds)
        return optimizer

    def send(self, loader: DataLoader) -> Message:
        """Returns the message to the server after training.

        Args:
            loader: The client's training batches in a fixed order.
        """
        raise not_there(self, "send")

    def upload_spec(self) -> MessageSpec:
        """Declares the form of the message that `send` returns."""
        raise not_there(self, "upload_spec")

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads the model that predicts into the task, where it differs from the received model.

        Not called before training.

        Args:
            which: The client's own predictor, or the server's model.
        """

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Predicts a batch; by default with the task's prediction."""
        return self.task.predict_step(batch, batch_idx)
