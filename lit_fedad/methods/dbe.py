"""DBE: a personal bias takes each client's own part out of the shared representation (Zhang et al., NeurIPS 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message, Payload, Task, TensorSpec, Update
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.stateless import pooled

MEAN = "mean of features"


class PersonalBias(nn.Module):
    """Adds one trainable vector to all features.

    Args:
        width: Channels.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, features: Tensor) -> Tensor:
        """Features [..., width], shifted."""
        return features + self.bias


class DBEClient(FedAvgClient):
    """A client: keeps a bias on its features, and holds their mean, without it, near that of all clients.

    It minimises ``L + kappa mean_C (1/2 (r - g)^2)``, where r is a running mean of the batches' features and g the
    mean over all clients' features under the initial weights.

    Args:
        task: What the client learns.
        local_epochs: E.
        kappa: Weight of the regulariser; 0 leaves the personal bias alone.
        momentum: Share of the newest batch in r.
    """

    def __init__(self, task: Task, local_epochs: int = 1, kappa: float = 1.0, momentum: float = 1.0) -> None:
        super().__init__(task, local_epochs)
        self.kappa, self.momentum = kappa, momentum
        task.offset = self.offset = PersonalBias(task.width)
        self.common = self.running = torch.zeros(task.width)

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """As FedAvg's, and then the mean of all clients' features."""
        return (*super().setup_phases, "mean")

    def shared_keys(self) -> list[str]:
        """All that FedAvg shares, less the bias."""
        return [name for name in super().shared_keys() if not name.startswith("offset.")]

    def receive(self, broadcast: Message) -> None:
        """Takes over weights and g."""
        weights = dict(broadcast)
        self.common = weights.pop(MEAN, self.common)
        super().receive(weights)

    def on_train_start(self) -> None:
        """Brings both means to where training runs."""
        self.common, self.running = self.common.to(self.device), self.running.to(self.device)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """The task's loss on shifted features, and the mean regularisation of those without the bias."""
        view = self.task.view(batch)
        features = self.task.features(view)
        outputs = self.task.objective(features, view)
        newest = pooled(features).mean(0) - self.offset.bias
        running = (1 - self.momentum) * self.running + self.momentum * newest
        self.running = running.detach()
        drift = 0.5 * (running - self.common).square().mean()
        return {**outputs, "loss": outputs["loss"] + self.kappa * drift, "drift": drift}

    @torch.no_grad()
    def send(self, loader: DataLoader) -> Message:
        """The trained weights; in the exchange before round 1, the mean of the client's features."""
        if self.phase != "mean":
            return super().send(loader)
        total, images = torch.zeros(self.task.width, dtype=torch.float64), 0
        for batch in loader:
            features = pooled(self.task.features(self.task.transfer_batch_to_device(batch, self.device, 0)))
            total += features.double().sum(0).cpu()
            images += len(features)
        self.running = (total / images).float()
        return {MEAN: self.running}

    def personal_state(self) -> dict[str, Any]:
        """The running mean; the bias is part of the task."""
        return {**super().personal_state(), "running": self.running}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client in."""
        super().load_personal_state(state)
        self.running = state["running"]


class DBEServer(FedAvgServer):
    """The server: FedAvg, and once the mean g of all clients' features.

    Args:
        client: A client, for the initial weights.
    """

    def __init__(self, client: DBEClient) -> None:
        super().__init__(client)
        self.common = client.common

    def upload_payload(self) -> Payload:
        """As FedAvg's; the mean of a client's features in the exchange named so."""
        return {MEAN: TensorSpec((self.width,))} if self.phase == "mean" else super().upload_payload()

    def broadcast(self, client_id: int) -> Message:
        """The weights and g."""
        common = {MEAN: self.common} if self.phase == "train" else {}
        return {**super().broadcast(client_id), **common}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """As FedAvg, or averages means."""
        if self.phase == "mean":
            self.common = weighted_mean(updates)[MEAN]
        super().aggregate(updates)

    def state_dict(self) -> dict[str, Any]:
        """Weights and g."""
        return {**super().state_dict(), "common": self.common}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        super().load_state_dict(state)
        self.common = state["common"]
