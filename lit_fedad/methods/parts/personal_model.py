"""Clients that train a model of their own beside the shared one, on the same batches."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from lit_fedad.contracts import Task
from lit_fedad.methods.fedavg import FedAvgClient


class PersonalModelClient(FedAvgClient):
    """A client with two models of one form: the task's, which is shared, and a personal one."""

    own_model = True
    state_names = ("personal_entries",)

    def __init__(self, task: Task, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)
        backbone = getattr(task, "backbone", None)
        # The frozen backbone is shared; all trainable parameters exist twice.
        self.personal: Task = copy.deepcopy(task, {id(backbone): backbone})

    @property
    def personal_entries(self) -> dict[str, Tensor]:
        """Weights and running statistics of the personal model, by name."""
        state = self.personal.state_dict()
        return {name: state[name] for name in self.shared_keys()}

    @personal_entries.setter
    def personal_entries(self, entries: Mapping[str, Tensor]) -> None:
        self.personal.load_state_dict(entries, strict=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds one optimiser of both models."""
        optimizer = self.task.configure_optimizers()
        for group in self.personal.configure_optimizers().param_groups:
            # without the backbone, which the first group holds
            own = [parameter for parameter in group["params"] if parameter.requires_grad]
            optimizer.add_param_group({**group, "params": own})
        return optimizer

    def on_train_start(self) -> None:
        """Prepares the personal model for training, with what is prepared from local data (a bank)."""
        self.personal.train()
        self.personal.round = self.task.round
        state = self.task.state_dict()
        self.personal.load_state_dict({name: state[name] for name in self.task.local_buffers}, strict=False)

    def on_train_end(self) -> None:
        """Sets the personal model to evaluation mode."""
        self.personal.eval()
