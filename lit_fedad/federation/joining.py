"""Clients that were not there before round 1 take part in later rounds, where the method lets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lit_fedad.contracts import Context, Exchanges, Server
from lit_fedad.federation.collecting import Collecting
from lit_fedad.federation.processes import on_first
from lit_fedad.federation.round_report import RoundReport


def catch_up(
    collecting: Collecting,
    exchanges: Exchanges,
    server: Server,
    context: Context,
    holders: Sequence[int],
    history: Sequence[RoundReport],
) -> dict[int, str]:
    """Has clients do what later rounds need of the exchanges before round 1 that they were not in.

    Afterwards all clients take part but those that fail in it, which try again before the next round.

    Returns:
        Causes by client that failed, in every process.

    Raises:
        UserError: If the policy for failures is to stop.
    """
    failed: dict[int, str] = {}
    fabric, sender = collecting.fabric, collecting.sender
    played = [report for report in history if report.round <= 0]
    there = {report.round: {*report.participants, *report.refused} for report in played}
    # The first process alone has the history of this command.
    for round, known in fabric.broadcast(there).items():
        exchange, past = exchanges.of_round(round)[0], replace(context, round=round)
        late = [client for client in holders if client not in {*known, *failed}]
        if not late or exchange.joining != "play":
            continue
        server.context = past
        blobs = sender.messages(exchange, late, past)
        outcome = collecting.transport.play(exchange, past, blobs, ())
        sender.forget()
        done, causes = fabric.broadcast((list(outcome.values), outcome.failures))
        collecting.transport.settle(done)
        failed |= causes
        for report in played:
            report.participants += done if report.round == round else []
    named = collecting.names.titled(failed)
    on_first(fabric, partial(collecting.sampler.check_failures, named, context.round))
    return failed
