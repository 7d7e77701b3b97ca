"""FedAvg: clients train the same weights, the server averages them by data size (McMahan et al., AISTATS 2017).

All methods that share parameters are FedAvg with something changed, and say only what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    AttackableServer,
    Client,
    Exchange,
    Exchanges,
    Message,
    MessageSpec,
    Predictors,
    Task,
    Update,
    nothing_to_attack,
    spec_of,
)
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.local_training import Train
from lit_fedad.methods.parts.pooled_statistics import PooledStatistics, Prepare, standardised

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

    kept: ClassVar[tuple[str, ...]] = ("own_entries", "refreshed_in")

    def __init__(
        self,
        task: Task,
        local_epochs: int = 1,
        keep_optimizer: bool = False,
        aggregate_buffers: Buffers = "mean",
    ) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        self.aggregate_buffers = aggregate_buffers
        self.refreshed_in = 1
        """The round whose received weights the task's bank was made with; `Prepare` makes it with the initial ones."""

    @property
    def exchanges(self) -> Exchanges:
        """Pooled statistics and local preparation where the task needs them; then training."""
        pooled = standardised(self.task)
        statistics: tuple[Exchange, ...] = (PooledStatistics(),) if pooled else ()
        prepare = (Prepare(pooled),) if pooled or self.task.prepares else ()
        return Exchanges((*statistics, *prepare), (Train(),))

    @property
    def predictors(self) -> Predictors:
        """Where nothing is personal, all clients predict alike."""
        shared = len(self.shared_keys()) == len(self.task.learned_state())
        return Predictors(shared=shared, server_shared=shared)

    def shared_keys(self) -> list[str]:
        """Lists the entries of the task's state that cross: all that training changes, less the client's own."""
        own = {
            *self.task.local_buffers,
            *(dict(self.task.named_buffers()) if self.aggregate_buffers == "local" else ()),
        }
        return [name for name in self.task.learned_state() if name not in own]

    def shared_state(self) -> Message:
        """Copies the shared entries to the CPU."""
        state = self.task.state_dict()
        return {name: state[name].detach().to("cpu", copy=True) for name in self.shared_keys()}

    def shared_spec(self) -> MessageSpec:
        """Declares the shared entries."""
        state = self.task.state_dict()
        return spec_of({name: state[name] for name in self.shared_keys()})

    @property
    def own_entries(self) -> dict[str, Tensor]:
        """What training changes and does not cross, by name."""
        shared = set(self.shared_keys())
        return {name: entry for name, entry in self.task.learned_state().items() if name not in shared}

    @own_entries.setter
    def own_entries(self, entries: Mapping[str, Tensor]) -> None:
        self.task.load_state_dict(entries, strict=False)

    def receive(self, message: Message) -> None:
        """Takes over the averaged weights."""
        self.task.load_state_dict(message, strict=False)

    def broadcast_spec(self) -> MessageSpec:
        """Declares the shared entries."""
        return self.shared_spec()

    def refresh(self, loader: DataLoader) -> None:
        """Renews the task's bank under the weights of the last round, once a round."""
        if self.task.prepares and self.refreshed_in < self.context.round:
            self.task.refresh(loader, replace(self.context, round=self.context.round - 1))
            self.refreshed_in = self.context.round

    def send(self, loader: DataLoader) -> Message:
        """Returns the trained weights."""
        return self.shared_state()

    def upload_spec(self) -> MessageSpec:
        """Declares the shared entries."""
        return self.shared_spec()


class FedAvgServer(AttackableServer):
    """The server: averages weights by data size.

    Args:
        client: A client, for the initial weights.

    Attributes:
        weights: The global model, as it is broadcast.
        statistics: ``mean`` and ``scale`` [C] by which clients standardise features; nothing where they do not.
    """

    kept: ClassVar[tuple[str, ...]] = ("weights", "statistics")

    def __init__(self, client: FedAvgClient) -> None:
        super().__init__()
        self.weights = client.shared_state()
        self.statistics: Message = {}

    def broadcast(self, client_id: int) -> Message:
        """Returns the weights, the same to every client."""
        return self.weights

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages: ``W = sum_n z_n W_n``."""
        self.weights = weighted_mean(updates)

    def adversary_view(self, update: Update, client: Client) -> None:
        """Loads the uploaded weights.

        Raises:
            UserError: If no weights cross, or they predict with what never crosses (a bank, densities).
        """
        task, known = client.task, self.broadcast(client.context.client or 0)
        if not update.message or (task.prepares and known.keys().isdisjoint(task.local_buffers)):
            raise nothing_to_attack(client)
        task.load_state_dict(update.message, strict=False)
