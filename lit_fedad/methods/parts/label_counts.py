"""Clients that send how many images of each class they have, beside their weights."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, counted
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.tasks.classifier import Classifier

COUNTS = "label_counts"


class CountingClient(FedAvgClient):
    """A client of FedAvg that also sends its number of images of each class, int64 [K]."""

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
    """FedAvg's server, which is also told the clients' numbers of images of each class."""

    def validate(self, client_id: int, update: Update) -> None:
        """Checks that a client counts as many images as it has."""
        counted = int(update.message[COUNTS].sum())
        if counted != update.num_samples:
            raise UserError(f"the client counts {counted} images of its {update.num_samples}")
