"""The hooks by which callbacks follow the rounds of a federation."""

from collections.abc import Mapping

from lit_fedad.contracts import Context, Update
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport


class FederationCallback:
    """The hooks that a federation calls by ``fabric.call``; pass callbacks as ``Fabric(callbacks=[...])``.

    All but `on_client_end` are called on the first process only. Their names differ from Lightning's hooks, because
    Fabric also calls hooks of the client once it has set the client up.
    """

    def on_updates(self, federation: Federation, context: Context, updates: Mapping[int, Update]) -> None:
        """Receives the clients' updates before the server merges them, while it still has the state that it broadcast.

        `lit_fedad.audits.shadow_runs` reads uploads here. No other hook receives single uploads.
        """

    def on_round_end(self, federation: Federation, report: RoundReport) -> None:
        """Receives the report of each round after its evaluation and before its checkpoint."""

    def on_checkpoint(self, federation: Federation, report: RoundReport) -> None:
        """Receives the report when the round's checkpoint is complete; a run that an exception ends can be resumed."""

    def on_client_end(self, done: int, total: int) -> None:
        """Receives the progress after each turn of a client, in training or evaluation; called in every process.

        Args:
            done: Number of turns that this process has finished.
            total: Number of turns of this process in the whole run.
        """
