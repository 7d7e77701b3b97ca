"""FedAvg: clients train shared weights, which the server averages by data size (McMahan et al., AISTATS 2017).

All methods that share parameters extend FedAvg.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Client,
    Evidence,
    Exchange,
    Exchanges,
    Message,
    MessageSpec,
    Predictors,
    Server,
    Sums,
    Task,
    Update,
    WeightedMeans,
    nothing_to_attack,
    spec_of,
)
from lit_fedad.contracts.compute import check_optimizer
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, Disclosures
from lit_fedad.contracts.state import detached
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.parts.functional import trainable
from lit_fedad.methods.parts.pooled_statistics import Prepare, pool_channels, standardised, statistics_spec
from lit_fedad.methods.parts.weight_evidence import (
    invertible_model,
    lacks_bank,
    weights_received,
    weights_sent,
)
from lit_fedad.tasks.patches import CHANNEL_STATISTICS

Buffers = Literal["mean", "local"]

MEANS = Sums(lambda client: WeightedMeans())
"""Merges messages to their mean, weighted by data size."""

EQUAL_MEANS = Sums(lambda client: WeightedMeans(equal=True))
"""Merges messages to their mean, in which all clients have equal weights."""


class FedAvgClient(Client):
    """A client that trains the received weights, on any task, and sends them back.

    What the task prepares from local data (a memory bank) stays personal. It is recomputed whenever the received
    weights differ from those that it was computed with, so that a client never scores with a bank of old weights.

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data per round (E).
        keep_optimizer: Whether the optimiser's state is kept between rounds; the server still overwrites the weights.
        aggregate_buffers: Whether running statistics of normalisation layers are averaged, or stay local.

    Attributes:
        shares_weights: Whether the method shares weights, and so refuses a task that trains none.
        auxiliary: The tensors that were received beside the weights, as `auxiliary_spec` declares them.

    Raises:
        UserError: If no weight trains, and the method shares weights.
        TypeError: When a subclass is defined that overrides ``deploy`` and does not set ``own_model``.
    """

    state_names: ClassVar[tuple[str, ...]] = ("own_entries", "refreshed_in")
    shares_weights: ClassVar[bool] = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuses a subclass that overrides ``deploy`` and does not say whether each client has its own predictor.

        Without the declaration one client would be scored for all.
        """
        super().__init_subclass__(**arguments)
        declared = cls.own_model or {"own_model", "predictors"} & vars(cls).keys()
        if "deploy" in vars(cls) and not declared:
            raise TypeError(
                f"{cls.__name__} overrides deploy: say own_model = True beside it, if it loads a model of the"
                " client's own, or own_model = False"
            )

    def __init__(
        self,
        task: Task,
        local_epochs: int = 1,
        keep_optimizer: bool = False,
        aggregate_buffers: Buffers = "mean",
    ) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        if self.shares_weights and not trainable(task):
            raise UserError(
                f"task {type(task).__name__} has no weights to share as it is set; give it a head, or"
                " METHOD=federated_bank or METHOD=local"
            )
        self.aggregate_buffers = aggregate_buffers
        self.auxiliary: Message = {}
        self.refreshed_in = 1
        """The round of the weights that the task's bank was computed with; `Prepare` uses the initial weights."""

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Checks that a task class has weights, if the method shares weights."""
        super().check_task(task)
        if cls.shares_weights and not task.trains:
            raise UserError(f"task {task.__name__} has no weights to share; give METHOD={task.methods}")

    @property
    def predictors(self) -> Predictors:
        """The same model for all clients where no state is personal, besides the statistics that the server pools."""
        personal = {*self.own_keys(learned_state(self.task))} - {*CHANNEL_STATISTICS}
        return Predictors(shared=not personal and not self.own_model, server_shared=not personal)

    def shared_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists which of the entries that training changes are shared: all but the personal ones.

        Args:
            learned: Names of the entries of the task's state that training changes.
        """
        personal = {*self.task.local_buffers}
        if self.aggregate_buffers == "local":
            personal |= {name for name, _ in self.task.named_buffers()}
        return [name for name in learned if name not in personal]

    def _shared_entries(self) -> dict[str, Tensor]:
        learned = learned_state(self.task)
        return {name: learned[name] for name in self.shared_keys(learned)}

    def shared_state(self) -> Message:
        """Returns copies of the shared entries on the CPU, by name."""
        shared: Message = detached(self._shared_entries())
        return shared

    def shared_spec(self) -> MessageSpec:
        """Declares the shared entries."""
        spec = spec_of(self._shared_entries())
        # A negative variance would make every prediction NaN.
        return {n: replace(entry, low=0) if n.endswith("running_var") else entry for n, entry in spec.items()}

    def own_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists which of the entries that training changes are personal: those that are not shared."""
        names = list(learned)
        shared = set(self.shared_keys(names))
        return [name for name in names if name not in shared]

    @property
    def own_entries(self) -> dict[str, Tensor]:
        """The personal entries of the task's state, by name."""
        learned = learned_state(self.task)
        return {name: learned[name] for name in self.own_keys(learned)}

    @own_entries.setter
    def own_entries(self, entries: Mapping[str, Tensor]) -> None:
        if entries:
            self.task.load_state_dict(entries, strict=False)

    def auxiliary_spec(self) -> MessageSpec:
        """Declares what the server sends beside the weights, such as a common centre; by default nothing."""
        return {}

    def receive(self, message: Message) -> None:
        """Loads the entries of the message that the task has, such as the weights; keeps those of `auxiliary_spec`."""
        self.auxiliary = {name: message[name] for name in self.auxiliary_spec()}
        self.task.load_state_dict(message, strict=False)

    def broadcast_spec(self) -> MessageSpec:
        """Declares the shared entries, the auxiliary tensors and the pooled statistics."""
        return {**self.shared_spec(), **self.auxiliary_spec(), **statistics_spec(self.task)}

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Recomputes the task's bank under the weights of the last round, if it is used; at most once a round."""
        used = self.task.prepares and (predicts or self.task.trains_on_bank)
        if used and self.refreshed_in < self.context.round:
            self.task.refresh(loader, replace(self.context, round=self.context.round - 1))
            self.refreshed_in = self.context.round

    discloses: Disclosures = (TRAINED_WEIGHTS,)

    def send(self, loader: DataLoader) -> Message:
        """Returns the trained weights."""
        return self.shared_state()

    def upload_spec(self) -> MessageSpec:
        """Declares the shared entries."""
        return self.shared_spec()


class ServerModelClient(FedAvgClient):
    """A FedAvg client that predicts with the server's model, which is the same for all clients."""

    @property
    def predictors(self) -> Predictors:
        """The server's model alone."""
        return replace(super().predictors, own=False)


class OneModelClient(FedAvgClient):
    """A FedAvg client without a personal state: all that predictions need comes from the server."""

    def own_keys(self, learned: Iterable[str]) -> list[str]:
        """Returns an empty list: no entry is personal."""
        return []

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Does nothing: there is no bank of local images."""


class FedAvgServer(Server):
    """The server, which averages weights by data size.

    Args:
        client: A client, for the initial weights.
        server_optimizer: Builds the optimiser that takes the clients' mean change for a gradient (FedAvgM, FedAdam,
            FedYogi, FedAdagrad); None replaces the weights by the mean. Entries that do not train are averaged.

    Attributes:
        report: Scalars of the last round to track; empty for servers that only average.
        weights: The global model, as broadcast.
        auxiliary: The tensors that are broadcast beside the weights (`FedAvgClient.auxiliary_spec`). A value changes by
            a new tensor, never in place, because a tensor is serialised once for all clients.
        statistics: ``mean`` and ``scale`` [C] by which clients standardise features; empty where they do not.

    Raises:
        UserError: If the optimiser refuses a number.
    """

    state_names: ClassVar[tuple[str, ...]] = ("weights", "auxiliary", "statistics", "server_optimizer_state")
    merges_sums = True

    def __init__(
        self,
        client: FedAvgClient,
        server_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        super().__init__()
        self.weights, self.auxiliary = client.shared_state(), dict[str, Tensor]()
        self.server_optimizer = server_optimizer
        if server_optimizer is not None:
            check_optimizer("method.server.server_optimizer", server_optimizer)
        self.server_optimizer_state: dict[str, Any] = {}
        learnt = trainable(client.task)
        self.trained = [name for name in self.weights if name in learnt]
        self.statistics: Message = {}
        self.report: dict[str, float] = {}

    def broadcast(self, client_id: int) -> Message:
        """Returns the weights, the auxiliary tensors and the statistics: all that a client needs to predict."""
        return {**self.weights, **self.auxiliary, **self.statistics}

    def diagnostics(self) -> dict[str, float]:
        """Returns the scalars of the round."""
        return self.report

    @property
    def launched(self) -> Fabric:
        """Device and precision of a server that trains; the federation has set them."""
        assert self.fabric is not None
        return self.fabric

    def mean_weights(self, updates: Mapping[int, Update], equal: bool = False) -> Message:
        """Averages the clients' weights, ``sum_n z_n W_n``; other entries of their messages are left out."""
        weights = {
            client: replace(update, message={name: update.message[name] for name in self.weights})
            for client, update in updates.items()
        }
        return weighted_mean(weights, equal)

    def moved(self, updates: Mapping[int, Update]) -> list[str]:
        """Lists the weights that any client has changed; a task may train some weights only in some rounds."""
        messages = [update.message for update in updates.values()]
        return [
            name
            for name in self.trained
            if any(not torch.equal(message[name], self.weights[name]) for message in messages)
        ]

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Moves W to the mean of the clients' weights, or towards it by an optimiser.

        Weights that no client has changed stay as they are: momentum must not move them.
        """
        merged = self.mean_weights(updates)
        if self.server_optimizer is not None:
            parameters = {name: nn.Parameter(self.weights[name].clone()) for name in self.trained}
            optimizer = self.server_optimizer(parameters.values())
            if self.server_optimizer_state:  # a copy, because the optimiser changes its state in place
                optimizer.load_state_dict(deepcopy(self.server_optimizer_state))
            for name in self.moved(updates):
                parameters[name].grad = self.weights[name] - merged[name]
            optimizer.step()
            merged |= {name: parameter.detach() for name, parameter in parameters.items()}
            self.server_optimizer_state = optimizer.state_dict()
        self.weights = merged


@dataclass(frozen=True)
class AfterMerger(Exchange[Any, Any]):
    """An exchange after the merger: clients send what they compute of their images under the merged weights.

    Attributes:
        initial: Whether the exchange comes before round 1. Then no weights are sent, since all clients have the same.
    """

    initial: bool = False

    def broadcast(self, server: FedAvgServer, client_id: int) -> Message:
        """Returns the merged weights; an empty message before round 1."""
        return {} if self.initial else server.weights

    def broadcast_spec(self, client: FedAvgClient) -> MessageSpec:
        """Declares the weights."""
        return {} if self.initial else client.shared_spec()

    def receive(self, client: FedAvgClient, message: Message) -> None:
        """Loads the weights."""
        client.task.load_state_dict(message, strict=False)


class LatestMessagesServer(FedAvgServer):
    """FedAvg's server, which also keeps the last message that each client sent in a `LatestMessages`.

    Attributes:
        last: These messages by client, in client order.
    """

    state_names: ClassVar[tuple[str, ...]] = ("last",)

    def __init__(self, client: FedAvgClient) -> None:
        super().__init__(client)
        self.last: dict[int, Message] = {}


class LatestMessages(AfterMerger):
    """An exchange after the merger; the server computes its auxiliary tensors from the last messages of all clients."""

    def aggregate(self, server: LatestMessagesServer, updates: Mapping[int, Update]) -> None:
        """Replaces the messages of the round's clients; those of other clients are kept."""
        new_messages = {client: update.message for client, update in updates.items()}
        server.last = dict(sorted({**server.last, **new_messages}.items()))
        messages = list(server.last.values())
        joined = {name: torch.cat([message[name] for message in messages]) for name in messages[0]}
        server.auxiliary = {**server.auxiliary, **self.auxiliary_of(server, joined)}

    def auxiliary_of(self, server: LatestMessagesServer, joined: Message) -> Message:
        """Computes the auxiliary tensors from all clients' last messages, joined along their first dimension."""
        return joined


def exchanges(client: FedAvgClient) -> Exchanges:
    """Lists pooled statistics and local preparation where the task requires them; then training."""
    return with_exchanges(client)


def with_exchanges(
    client: FedAvgClient,
    *setup: Exchange,
    rounds: tuple[Exchange, ...] = (Train(MEANS),),
    evidence: Evidence | None = None,
) -> Exchanges:
    """Lists FedAvg's exchanges, with further ones at the end of the set-up, and other ones in a round if given."""
    pooled = standardised(client.task)
    statistics: tuple[Exchange, ...] = (pool_channels(client.task),) if pooled else ()
    prepare = (Prepare(pooled),) if pooled or client.task.prepares else ()
    return Exchanges((*statistics, *prepare, *setup), rounds, evidence=evidence or WEIGHTS)


def predict_with_weights(server: FedAvgServer, client: Client, update: Update) -> None:
    """Loads the uploaded weights; see `Evidence`.

    Raises:
        UserError: If no weights are sent, or prediction requires state that is never sent (a bank, densities).
    """
    task, broadcast = client.task, server.broadcast(client.context.client or 0)
    if not update.message or lacks_bank(task, broadcast):
        raise nothing_to_attack(client)
    task.load_state_dict(update.message, strict=False)


WEIGHTS = Evidence(weights_sent, weights_received, predict_with_weights, invertible_model)
"""What weights show of single images."""
