"""Queries that a federation asks its clients, and evaluators; independent of any data format and any metric."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from lightning.fabric import Fabric

from lit_fedad.contracts import Client, Exchanges, Message, MessageSpec
from lit_fedad.contracts.disclosure import Discloses, Disclosures
from lit_fedad.core.errors import not_there
from lit_fedad.federation.round_report import RoundReport

T = TypeVar("T")


class ClientQuery(Discloses, Generic[T]):
    """A query that every client answers with its live model, on the machine that holds its images.

    In one process the answer is the returned value. A client on another machine builds the query from its own
    configuration: only the query's name and numbers are sent to it, and its answer is sent as a message of a declared
    form.

    Attributes:
        name: Name of the query, the same on both sides.
        numbers: Numbers that are part of the query, by name.
        local: Whether the answer has no declared form. Clients on other machines are not asked such a query.
        discloses: What the answer reveals about a client's images. A class that overrides `pack` must declare it again.
    """

    sends = "pack"
    name: str
    numbers: Mapping[str, float] = {}
    local: bool = False
    discloses: Disclosures = ()

    def __call__(self, client: Client, number: int) -> T:
        """Computes the answer of the client with this number, from the live client."""
        raise not_there(self, "__call__")

    def pack(self, answer: T) -> Message:
        """Returns an answer as a message."""
        raise not_there(self, "pack")

    def spec(self) -> MessageSpec:
        """Declares the form of the message."""
        raise not_there(self, "spec")

    def unpack(self, message: Message) -> T:
        """Builds an answer from a message of the declared form.

        Raises:
            UserError: If the message holds values that no answer can have.
        """
        raise not_there(self, "unpack")


class LocalQuery(ClientQuery[T]):
    """A query whose answer stays in the federation's processes, such as tensors for a figure."""

    local = True

    def __init__(self, name: str, answer: Callable[[Client, int], T]) -> None:
        self.name, self._answer = name, answer

    def __call__(self, client: Client, number: int) -> T:
        """Computes the answer of the client with this number, from the live client."""
        return self._answer(client, number)


class QueriedFederation(Protocol):
    """The part of a `lit_fedad.federation.loop.Federation` that evaluators and figures use."""

    client: Client
    clients: list[int]
    exchanges: Exchanges
    fabric: Fabric
    rounds: int

    @property
    def history(self) -> Sequence[RoundReport]:
        """One report per round so far."""

    def ask(
        self,
        round: int,
        query: ClientQuery[T],
        clients: list[int] | None = None,
        which: Literal["own", "server"] = "own",
        sums: bool = False,
        optional: bool = False,
    ) -> dict[int, T]:
        """Asks clients, prepared to predict as they do after a round; see `Federation.ask`."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: Metrics by name.
        trained: New value of the round's `RoundReport.trained`; None leaves it unchanged.
        predictions: Predictions of the test images by client (`Evaluator.predicted`).
    """

    metrics: dict[str, Any]
    trained: dict[int, Any] | None = None
    predictions: Mapping[int, Any] = field(default_factory=dict)


class Evaluator(ClientQuery[Any]):
    """An evaluator, which scores the predictions of every client after a round; it is the query for metric states.

    Subclasses implement `score` and `summarise`, or override `evaluate`. Subclasses whose metric states are sent
    between machines also implement `pack`, `spec` and `unpack`; the others are `local`.

    Attributes:
        metrics: Names of the metrics; the first selects the best round.
        common: Whether all clients are scored on the same test images. Otherwise each client has its own test images.
        after_fit: Whether clients are also scored with their weights directly after training; the value of `score` is
            then stored in `RoundReport.trained`.
    """

    name = "scores"
    metrics: tuple[str, ...]
    common: bool = True
    after_fit: bool = False

    def alike(self, client: Client, round: int) -> bool:
        """Returns whether all clients have the same metric state after a round: one model and the same test images."""
        predictors = client.predictors
        return self.common and (predictors.shared or (predictors.shared_at_first and round <= 0))

    def asked(self, client: Client, clients: list[int], round: int) -> list[int]:
        """Lists the clients that an evaluation scores: only one where all metric states are the same."""
        return clients[:1] if self.alike(client, round) else clients

    def evaluate(self, federation: QueriedFederation, round: int) -> Evaluation | None:
        """Computes the metrics after a round.

        Returns:
            The evaluation; None on all processes but the first.
        """
        states = self.collect(federation, round)
        if states is None:
            return None
        predictions = {client: self.predicted(state) for client, state in states.items()}
        return Evaluation(self.summarise(states), predictions=predictions)

    def collect(self, federation: QueriedFederation, round: int) -> dict[int, Any] | None:
        """Asks for the metric states of all clients after a round; None on all processes but the first."""
        states = federation.ask(round, self, self.asked(federation.client, federation.clients, round))
        if not federation.fabric.is_global_zero:
            return None
        if self.alike(federation.client, round):
            return self.spread(next(iter(states.values())), federation.clients)
        return states

    def __call__(self, client: Client, number: int) -> Any:
        """Computes the client's metric state."""
        return self.score(client, number)

    def score(self, client: Client, number: int) -> Any:
        """Computes the metric state of one client, from which `summarise` computes metrics."""
        raise not_there(self, "score")

    def predicted(self, answer: Any) -> Any:
        """Returns the predictions of the test images that a value of `score` includes; None if it includes none."""
        return getattr(answer, "predicted", None)

    def spread(self, state: Any, clients: list[int]) -> dict[int, Any]:
        """Returns the metric states of clients that all predict with the model of the one scored client.

        Args:
            state: Metric state of the scored client; by default all clients get this state.
            clients: All clients.
        """
        return dict.fromkeys(clients, state)

    def constants(self, report: RoundReport) -> dict[str, dict[str, float]]:
        """Computes the metrics of constant predictors, which look at no image: by name of the predictor, then metric.

        Empty where constant predictors make no sense, as for anomaly scores.
        """
        return {}

    def summarise(self, states: dict[int, Any]) -> dict[str, Any]:
        """Computes the metrics by name from the metric states of all clients."""
        raise not_there(self, "summarise")
