"""What outsiders hear of a federation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lit_fedad.contracts import Context, Update
from lit_fedad.federation.round_report import RoundReport

if TYPE_CHECKING:
    from lit_fedad.federation.loop import Federation


class FederationCallback:
    """Hooks that a federation calls by ``fabric.call``; pass callbacks as ``Fabric(callbacks=[...])``.

    All but `on_client_end` are called on the first process only. Their names are none of Lightning's hooks: Fabric
    calls those of the client, too, once it has set it up.
    """

    def on_updates(self, federation: Federation, context: Context, updates: Mapping[int, Update]) -> None:
        """Called with what clients sent, before the server merges it: its state is still the one that it broadcast.

        `Federation.adversary_view` may be called here. Nothing else sees single uploads.
        """

    def on_round_end(self, federation: Federation, report: RoundReport) -> None:
        """Called after each round and its evaluation, before its checkpoint."""

    def on_checkpoint(self, federation: Federation, report: RoundReport) -> None:
        """Called once the round's checkpoint is complete: an exception raised here ends a run that can be resumed."""

    def on_client_end(self, done: int, total: int) -> None:
        """Called in every process after each turn of a client, to train or to be scored.

        Args:
            done: Turns that this process has played.
            total: Turns that it plays in the whole run.
        """
