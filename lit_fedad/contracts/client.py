"""The client side of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts.context import Context, phase
from lit_fedad.contracts.message import Message
from lit_fedad.contracts.task import Prediction, Task
from lit_fedad.errors import UserError


class Client(L.LightningModule):
    """The client side of one method: wraps a task and adds what the method needs.

    One live object serves every client of a process. What belongs to a single client is its `personal_state`, which
    is swapped in before a visit and out after it.

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data a round (E).
        keep_optimizer: Whether the optimiser's state lives on between rounds. Only right where the server never
            overwrites the weights that it optimises.

    Attributes:
        needs: What kind of task the method works with.
        own_model: Whether what a client has just trained is a model of its own; False where only the server makes
            models that are meant to predict (CReFF, FEDIC).
        classifiers: Names of the method's classifiers beside the main one; predictions carry the logits of each.

    Raises:
        UserError: If the method cannot work with this task, or there is no epoch to train.
    """

    needs: type[Task] = Task
    own_model: bool = True
    classifiers: tuple[str, ...] = ()

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = False) -> None:
        super().__init__()
        self.check_task(type(task))
        if local_epochs < 1:
            raise UserError(f"local_epochs={local_epochs} must be at least 1")
        self.task = task
        self.local_epochs = local_epochs
        self.keep_optimizer = keep_optimizer
        self.context = Context(seed=0, round=0)
        self.epoch = 0
        self._optimizer_state: dict[str, Any] | None = None

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Says why the method cannot work with a kind of task.

        Raises:
            UserError: If it cannot.
        """
        if not issubclass(task, cls.needs):
            raise UserError(
                f"{cls.__name__} works with task {cls.needs.__name__}, not with {task.__name__}; leave task= out"
            )

    def begin(self, context: Context) -> None:
        """Starts a visit: says which client this is now, and in which round."""
        self.context = context
        self.task.round = context.round

    def receive(self, broadcast: Message) -> None:
        """Takes over what the server sent."""
        raise NotImplementedError

    def deploy(self) -> None:
        """Makes the task what predicts, where that is not what trains. Called after `receive`, never before `fit`."""

    def lend(self) -> Message:
        """What the server's model lacks to predict, lent for evaluation alone: not a message of the method."""
        return {}

    def deploy_shared(self, lent: Message) -> None:
        """Makes the task the server's model. Called after `receive`, never before `fit`.

        Args:
            lent: The mean, by data size, over what all clients `lend`.
        """
        self.task.load_state_dict(lent, strict=False)

    def adapt(self, loader: DataLoader) -> None:
        """Renews what depends on weights just taken over and on local data. Called before `fit`, and after `deploy`.

        Args:
            loader: The client's training batches in a fixed order.
        """

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """Names of the exchanges before round 1, in order."""
        return ()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Names of the exchanges of every round from 1, in order; clients are trained in the first, ``"train"``."""
        return ("train",)

    @property
    def phase(self) -> str:
        """The name of this exchange: one of `setup_phases` or of `exchanges`."""
        return phase(self.context, self.setup_phases, self.exchanges)

    @property
    def uniform(self) -> bool:
        """Whether all clients predict alike, so that scoring one of them scores all."""
        return False

    @property
    def uniform_server(self) -> bool:
        """Whether the server's model is the same for all clients (`deploy_shared`)."""
        return self.uniform

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """One local step; the task's, unless the method adds to it."""
        return self.task.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser of local steps; the task's, unless the method asks for another."""
        return self.task.configure_optimizers()

    def fit(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains locally: E epochs of `training_step`, with Lightning's hooks of client and task.

        Args:
            loader: The client's training batches.
            fabric: Moves batches, scales precision and runs the backward pass.

        Returns:
            Means over all steps of the loss and of the other scalars that ``training_step`` returned; nothing
            where the task has nothing to train.

        Raises:
            UserError: If training diverges.
        """
        task = self.task
        if not any(parameter.requires_grad for parameter in task.parameters()):
            return {}
        configured = self.configure_optimizers()
        if self._optimizer_state is not None:
            configured.load_state_dict(self._optimizer_state)
        module, optimizer = fabric.setup(self, configured)
        module.mark_forward_method("training_step")
        totals: dict[str, float] = {}
        steps = 0
        task.train()
        self.on_train_start()
        task.on_train_start()
        for epoch in range(self.local_epochs):
            self.epoch = epoch
            self.on_train_epoch_start()
            task.on_train_epoch_start()
            for index, batch in enumerate(loader):
                batch = fabric.to_device(batch)
                task.on_train_batch_start(batch, index)
                outputs = module.training_step(batch, index)
                if not torch.isfinite(outputs["loss"]):
                    raise UserError("the loss is not finite: training has diverged; lower the learning rate")
                optimizer.zero_grad()
                fabric.backward(outputs["loss"])
                self.on_before_optimizer_step(configured)
                optimizer.step()
                self.on_train_batch_end(outputs, batch, index)
                task.on_train_batch_end(outputs, batch, index)
                for name, value in outputs.items():
                    totals[name] = totals.get(name, 0.0) + float(value.detach())
                steps += 1
            task.on_train_epoch_end()
        task.on_train_end()
        self.on_train_end()
        task.eval()
        if self.keep_optimizer:
            self._optimizer_state = configured.state_dict()
        return {name: total / steps for name, total in totals.items()}

    def send(self, loader: DataLoader) -> Message:
        """What goes to the server.

        Args:
            loader: The client's training batches in a fixed order.
        """
        raise NotImplementedError

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """The client's own prediction; the task's, unless the method predicts otherwise."""
        return self.task.predict_step(batch, batch_idx)

    def personal_state(self) -> dict[str, Any]:
        """What lives between rounds, is checkpointed, and never leaves the client."""
        return {"optimizer": self._optimizer_state}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client's `personal_state` in."""
        self._optimizer_state = state["optimizer"]
