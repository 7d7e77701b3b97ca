"""What judges clients. It knows data and metrics, so that the federation need not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.federation.round_report import RoundReport

T = TypeVar("T")


class Interview(Protocol):
    """What evaluators, and figures, may ask of a federation.

    Attributes:
        client: The live client.
        clients: All clients that hold images.
        fabric: Device, precision and processes.
        history: One report a round, so far; complete on the first process only.
    """

    client: Client
    clients: list[int]
    fabric: Fabric

    @property
    def history(self) -> Sequence[RoundReport]:
        """One report a round, so far."""

    def ask(
        self,
        round: int,
        question: Callable[[Client, int], T],
        clients: list[int] | None = None,
        which: Literal["own", "server"] = "own",
    ) -> dict[int, T]:
        """Calls a function of every client, as it predicts after a round; see `Federation.ask`."""


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
        metrics: By name.
        trained: What stands in `RoundReport.trained` of the round from now on; None leaves it as it is.
    """

    metrics: dict[str, Any]
    trained: dict[int, Any] | None = None


class Evaluator:
    """Scores every client as it predicts after a round.

    Subclasses implement `score`, `spread` and `summarise`; or `evaluate`, to ask the clients something else.

    Attributes:
        metrics: Names of the metrics; the first says which round is best.
        after_fit: Whether clients are scored with the weights that they have just trained as well; what `score`
            then returns lies in the reports of the rounds, ``trained``.
    """

    metrics: tuple[str, ...]
    after_fit: bool = False

    def asked(self, client: Client, clients: list[int]) -> list[int]:
        """Lists the clients that an evaluation looks at: one of them where all predict alike."""
        return clients[:1] if client.predictors.shared else clients

    def evaluate(self, interview: Interview, round: int) -> Evaluation | None:
        """Computes metrics after a round; None on other processes than the first."""
        asked = self.asked(interview.client, interview.clients)
        states = interview.ask(round, self.score, asked)
        if not interview.fabric.is_global_zero:
            return None
        if interview.client.predictors.shared:
            states = self.spread(states[asked[0]], interview.clients)
        return Evaluation(self.summarise(states))

    def score(self, client: Client, number: int) -> Any:
        """Computes the mergeable metric state of one client."""
        raise NotImplementedError

    def spread(self, state: Any, clients: list[int]) -> dict[int, Any]:
        """Returns the states of clients that all predict as the one that was scored."""
        raise NotImplementedError

    def summarise(self, states: dict[int, Any]) -> dict[str, Any]:
        """Computes metrics from the states of all clients."""
        raise NotImplementedError
