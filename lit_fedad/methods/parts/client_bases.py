"""Bases of FedAvg's clients that several methods share: with an anchor, with a personal model, with label counts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message, MessageSpec, Task, TensorSpec, Update
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, counted
from lit_fedad.contracts.state import detached
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.parts.functional import copied, trainable
from lit_fedad.tasks.classifier import Classifier

COUNTS = "label_counts"


class AnchoredClient(FedAvgClient):
    """A client that keeps the weights w^t that it received beside those that it trains.

    Attributes:
        anchor: The received values w^t of the trained weights, by name, on the client's device; empty before training.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.anchor: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        """Copies the received weights."""
        super().on_train_start()
        self.anchor = {name: weight.detach().clone() for name, weight in trainable(self.task).items()}

    def squared_distance(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Computes ``|w - w^t|^2`` of weights w by name, a scalar."""
        return torch.stack([(w - self.anchor[name]).square().sum() for name, w in weights.items()]).sum()


class PersonalModelClient(FedAvgClient):
    """A client that trains two models of one architecture on the same batches: the shared task's and a personal one."""

    own_model = True
    state_names = ("personal_entries",)

    def __init__(self, task: Task, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)
        self.personal = copied(task)

    @property
    def personal_entries(self) -> dict[str, Tensor]:
        """Weights and running statistics of the personal model, by name."""
        learned = learned_state(self.personal)
        return {name: learned[name] for name in self.shared_keys(learned)}

    @personal_entries.setter
    def personal_entries(self, entries: Mapping[str, Tensor]) -> None:
        self.personal.load_state_dict(entries, strict=False)

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Recomputes the task's bank; before training also the personal model's, under the weights it predicts with."""
        super().refresh(loader, predicts)
        if predicts:
            return
        self._copy_bank()
        if self.task.prepares and self.task.trains_on_bank and self.context.round > 1:
            shared = detached(learned_state(self.task))
            self.deploy()
            self.task.refresh(loader, replace(self.context, round=self.context.round - 1))
            self._copy_bank()
            self.task.load_state_dict(shared, strict=False)

    def _copy_bank(self) -> None:
        """Copies to the personal model what the task has computed from local data."""
        state = self.task.state_dict()
        self.personal.load_state_dict({name: state[name] for name in self.task.local_buffers}, strict=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds one optimiser of both models, with the learning rates of this round."""
        self.personal.round = self.task.round
        optimizer = self.task.configure_optimizers()
        for group in self.personal.configure_optimizers().param_groups:
            # Without the frozen backbone: both models share it, and the task's groups hold it already.
            trained = [parameter for parameter in group["params"] if parameter.requires_grad]
            optimizer.add_param_group({**group, "params": trained})
        return optimizer

    def on_train_start(self) -> None:
        """Sets the personal model to training mode."""
        super().on_train_start()
        self.personal.train()

    def on_train_end(self) -> None:
        """Sets the personal model to evaluation mode."""
        self.personal.eval()


class CountingClient(FedAvgClient):
    """A client that also sends its number of images of each class, int64 [K]."""

    needs = Classifier
    task: Classifier
    discloses = (TRAINED_WEIGHTS, counted("numbers of images of each class"))

    def send(self, loader: DataLoader) -> Message:
        """Returns weights and counts."""
        labels = torch.cat([batch["label"] for batch in loader])
        return {**super().send(loader), COUNTS: labels.bincount(minlength=self.task.classes)}

    def upload_spec(self) -> MessageSpec:
        """Declares weights and counts."""
        return {**super().upload_spec(), COUNTS: self.counts_spec()}

    def counts_spec(self) -> TensorSpec:
        """Declares a number of images for each class."""
        return TensorSpec((self.task.classes,), torch.int64, low=0, counted=True)


class CountingServer(FedAvgServer):
    """A server that also receives the clients' numbers of images of each class."""

    def validate(self, client_id: int, update: Update) -> None:
        """Checks that the counts of a client add up to its number of images."""
        images = int(update.message[COUNTS].sum())
        if images != update.num_samples:
            raise UserError(f"the client counts {images} images of its {update.num_samples}")
