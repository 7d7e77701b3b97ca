"""What judges clients. It knows data and metrics, so that the federation need not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lit_fedad.contracts import Client

if TYPE_CHECKING:
    from lit_fedad.federation.loop import Federation


class Evaluator:
    """Scores every client as it predicts after a round.

    Subclasses implement `score`, `spread` and `summarise`; or `evaluate`, to ask the clients something else.

    Attributes:
        metrics: Names of the metrics; the first says which round is best.
        after_fit: Whether clients are scored with the weights that they have just trained as well; what `score`
            then gives lies in the reports of the rounds, ``trained``.
    """

    metrics: tuple[str, ...]
    after_fit: bool = False

    def asked(self, client: Client, clients: list[int]) -> list[int]:
        """Which clients an evaluation looks at: one of them where all predict alike."""
        return clients[:1] if client.uniform else clients

    def evaluate(self, federation: Federation, round: int) -> dict[str, Any] | None:
        """Metrics after a round, on the first process only."""
        asked = self.asked(federation.client, federation.clients)
        states = federation.ask(round, self.score, asked)
        if not federation.fabric.is_global_zero:
            return None
        if federation.client.uniform:
            states = self.spread(states[asked[0]], federation.clients)
        return self.summarise(states)

    def score(self, client: Client, number: int) -> Any:
        """Mergeable metric state of one client."""
        raise NotImplementedError

    def spread(self, state: Any, clients: list[int]) -> dict[int, Any]:
        """The states of clients that all predict as the one that was scored."""
        raise NotImplementedError

    def summarise(self, states: dict[int, Any]) -> dict[str, Any]:
        """Metrics from the states of all clients."""
        raise NotImplementedError
