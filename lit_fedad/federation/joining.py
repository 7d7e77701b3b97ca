"""Clients that were not there before round 1 take part in later rounds, where the method lets them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lit_fedad.contracts import Context
from lit_fedad.federation.processes import on_first

if TYPE_CHECKING:
    from lit_fedad.federation.loop import Federation


def catch_up(federation: Federation, before: int) -> dict[int, str]:
    """Has clients do what later rounds need of the exchanges before round 1 that they were not in.

    Afterwards all clients take part but those that fail in it, which try again before the next round.

    Args:
        federation: The federation.
        before: The round that is about to begin.

    Returns:
        Causes by client that failed, in every process.

    Raises:
        UserError: If the policy for failures is to stop.
    """
    failed: dict[int, str] = {}
    played = [report for report in federation.history if report.round <= 0]
    there = {report.round: {*report.participants, *report.refused} for report in played}
    # The first process alone has the history of this command.
    for round, known in federation.fabric.broadcast(there).items():
        exchange, context = federation.exchanges.of_round(round)[0], Context(federation.seed, round)
        late = [client for client in federation.holders if client not in {*known, *failed}]
        if not late or exchange.joining != "play":
            continue
        federation.server.context = context
        blobs = federation.sender.messages(exchange, late, context)
        outcome = federation.transport.play(exchange, context, blobs, ())
        federation.sender.forget()
        done, causes = federation.fabric.broadcast((list(outcome.values), outcome.failures))
        federation.transport.settle(done)
        failed |= causes
        for report in played:
            report.participants += done if report.round == round else []
    named = federation.names.titled(failed)
    on_first(federation.fabric, partial(federation.sampler.check_failures, named, before))
    federation.clients = [client for client in federation.holders if client not in failed]
    return failed
