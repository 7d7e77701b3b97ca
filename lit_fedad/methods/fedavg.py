"""FedAvg: clients train the same weights, the server averages them by data size (McMahan et al., AISTATS 2017).

All methods that share parameters are FedAvg with something changed, and say only what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Message, Payload, Server, Task, TensorSpec, Update
from lit_fedad.federation.aggregation import pool_statistics, weighted_mean
from lit_fedad.methods.statistics import channel_statistics, statistics_payload

Buffers = Literal["mean", "local"]


class FedAvgClient(Client):
    """A client: trains the weights it was sent, on any task, and sends them back.

    What the task prepared from local data (a memory bank) stays personal. It is renewed whenever weights arrive that
    it was not made with, so that a client never scores with a bank of other weights.

    Args:
        task: What the client learns.
        local_epochs: E.
        keep_optimizer: Whether the optimiser's state lives on although the server overwrites the weights.
        aggregate_buffers: Whether running statistics of normalisation layers are averaged, or stay local.
    """

    def __init__(
        self,
        task: Task,
        local_epochs: int = 1,
        keep_optimizer: bool = False,
        aggregate_buffers: Buffers = "mean",
    ) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        self.aggregate_buffers = aggregate_buffers
        self._adapted_to = 0

    def shared_keys(self) -> list[str]:
        """Which entries of the task's state cross: all that training changes, less what belongs to the client."""
        own = {
            *self.task.local_buffers,
            *(dict(self.task.named_buffers()) if self.aggregate_buffers == "local" else ()),
        }
        return [name for name in self.task.learned_state() if name not in own]

    def shared_state(self) -> Message:
        """Copies of the shared entries, on the CPU."""
        state = self.task.state_dict()
        return {name: state[name].detach().to("cpu", copy=True) for name in self.shared_keys()}

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """Pooled channel statistics and local preparation, where the task wants them."""
        task = self.task
        statistics = ("statistics",) if task.standardise else ()
        return (*statistics, "prepare") if statistics or task.prepares else ()

    @property
    def uniform(self) -> bool:
        """Where nothing is personal, clients predict alike."""
        return len(self.shared_keys()) == len(self.task.learned_state())

    def receive(self, broadcast: Message) -> None:
        """Takes over the averaged weights; before round 1, pooled statistics."""
        if self.phase == "train":
            self.task.load_state_dict(broadcast, strict=False)
        elif broadcast:
            self.task.load_statistics(broadcast["mean"], broadcast["scale"])

    def adapt(self, loader: DataLoader) -> None:
        """Renews the task's bank under the weights of the last round, once a round."""
        if self.task.prepares and self._adapted_to < self.context.round:
            self.task.refresh(loader, replace(self.context, round=self.context.round - 1))
            self._adapted_to = self.context.round

    def send(self, loader: DataLoader) -> Message:
        """The trained weights; before round 1 statistics, then nothing: the task prepares with the initial weights."""
        if self.phase == "train":
            return self.shared_state()
        if self.phase == "statistics":
            return channel_statistics(self.task, loader)
        self.task.prepare(loader, self.context)
        self._adapted_to = 1
        return {}

    def personal_state(self) -> dict[str, Any]:
        """What does not cross."""
        shared = set(self.shared_keys())
        own = {name: entry for name, entry in self.task.learned_state().items() if name not in shared}
        return {**super().personal_state(), "task": own, "adapted_to": self._adapted_to}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client in."""
        super().load_personal_state(state)
        self.task.load_state_dict(state["task"], strict=False)
        self._adapted_to = state["adapted_to"]


class FedAvgServer(Server):
    """The server: averages weights by data size.

    Args:
        client: A client, for the initial weights.
    """

    def __init__(self, client: FedAvgClient) -> None:
        super().__init__(client.setup_phases, client.exchanges)
        self.weights = client.shared_state()
        self.width = client.task.width
        self.statistics: Message = {}

    def download_payload(self) -> Payload:
        """The weights; before round 1 no more than pooled statistics, since all clients draw the same weights."""
        return form(self.broadcast(0))

    def upload_payload(self) -> Payload:
        """The weights; before round 1 at most statistics."""
        if self.phase == "train":
            return form(self.weights)
        return statistics_payload(self.width) if self.phase == "statistics" else {}

    def broadcast(self, client_id: int) -> Message:
        """The same to every client."""
        if self.phase == "train":
            return self.weights
        return self.statistics if self.phase == "prepare" else {}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges weights, or pools statistics."""
        if self.phase == "train":
            self.merge(updates)
        elif self.phase == "statistics":
            self.statistics = pool_statistics(updates)

    def merge(self, updates: Mapping[int, Update]) -> None:
        """``W = sum_n z_n W_n``."""
        self.weights = weighted_mean(updates)

    def observe(self, update: Update, client: Client) -> None:
        """The uploaded weights.

        Raises:
            UserError: If no weights cross, or they predict with what never crosses (a bank, densities).
        """
        task, known = client.task, self.broadcast(client.context.client or 0)
        if not update.message or (task.prepares and known.keys().isdisjoint(task.local_buffers)):
            super().observe(update, client)
        task.load_state_dict(update.message, strict=False)

    def state_dict(self) -> dict[str, Any]:
        """The weights; statistics."""
        return {"weights": self.weights, "statistics": self.statistics}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.weights, self.statistics = dict(state["weights"]), dict(state["statistics"])


def form(message: Mapping[str, Tensor]) -> Payload:
    """The payload that a message fits."""
    return {name: TensorSpec(tuple(entry.shape), entry.dtype) for name, entry in message.items()}
