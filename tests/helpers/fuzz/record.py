"""Honest runs, recorded exchange by exchange as the server meets them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from helpers.pairs import IN_STAGES, OWN, STREAM, of_method
from lit_fedad.contracts import Context, Exchange
from lit_fedad.contracts.state import state_of
from lit_fedad.core.building import call
from lit_fedad.core.config import compose
from lit_fedad.experiment.local_clients import build_run
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.message_check import outliers
from lit_fedad.federation.processes import launched, make_fabric
from lit_fedad.federation.receiver import FAR, Receiver
from lit_fedad.report.console import Display


@dataclass(frozen=True)
class Moment:
    """An exchange just before the server opens the messages of its clients.

    Attributes:
        exchange: The exchange.
        context: Its round and place.
        before: The server's kept state.
        blobs: What clients sent.
        sizes: Their numbers of images.
        personal: Their personal states afterwards.
        clients: All clients that the server may send to.
    """

    exchange: Exchange
    context: Context
    before: dict[str, Any]
    blobs: dict[int, bytes]
    sizes: dict[int, int]
    personal: dict[int, dict[str, Any]]
    clients: list[int]


@dataclass
class Recording:
    """An honest run: its parts as they are after it, and its moments.

    Attributes:
        name: Method and task.
        federation: The federation, whose server moments are played on again.
        moments: In the order of the run.
        refused: Causes of messages that the server refused: honest ones, so there should be none.
        far: Causes of messages that the server would have refused had it been six times as strict about sizes.
    """

    name: str
    federation: Federation
    moments: list[Moment] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    far: list[str] = field(default_factory=list)


class _Recorder:
    """A receiver that stores what it is given before it passes it on."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.receiver: Receiver = recording.federation.receiver
        self.blobs: dict[int, bytes] = {}
        self.sizes: dict[int, int] = {}

    def open(self, exchange, client, blob, num_samples):
        self.blobs[client], self.sizes[client] = blob, num_samples
        return self.receiver.open(exchange, client, blob, num_samples)

    def note(self):
        """Notes the personal states after the last moment: they are kept once its messages are merged."""
        pool = self.recording.federation.pool
        for last in self.recording.moments[-1:]:
            last.personal.update({client: pool.get(client) for client in last.blobs})

    def merge(self, exchange, updates, clients, exchanges, context):
        server = self.receiver.server
        self.note()
        self.recording.moments.append(
            Moment(
                exchange,
                context,
                deepcopy(state_of(server)),
                dict(sorted(self.blobs.items())),
                self.sizes,
                {},
                list(clients),
            )
        )
        self.blobs, self.sizes = {}, {}
        previous = exchange.broadcast(server, next(iter(updates)))
        spec = exchange.upload_spec(self.receiver.client)
        self.recording.far += outliers(updates, previous, FAR / 6, spec).values()
        return self.receiver.merge(exchange, updates, clients, exchanges, context)


def overrides(method: str, task: str, tasks: dict[str, list[str]], folder, *own: str) -> list[str]:
    """Overrides of a small run of a method on a task: three rounds of four clients."""
    alone = method in ("centralised", "nearest_neighbour")
    clients = ["partition=pooled", "~partition.clients"] if alone else ["partition.clients=4"]
    stream = STREAM if method in IN_STAGES else []
    data = [o for o in tasks[task] if o.startswith(("data=", "data.root="))]
    root = [] if any("motif" in o or ".root" in o for o in data) else [f"data.root={folder / 'data'}"]
    return [
        "debug=seconds", f"out={folder / 'run'}", f"cache.folder={folder}", *root, "tracking=off",
        "fabric.accelerator=cpu", f"method={method}", *of_method(method, tasks[task]), *clients, "rounds=3", *stream,
        *OWN.get(method, []), "evaluation.pictures=0", *own,
    ]  # fmt: skip


def record(name: str, given: list[str]) -> Recording:
    """Plays all rounds of a run without evaluating them, and records it."""
    config = compose(given)
    fabric = call(make_fabric, {**config["fabric"], "callbacks": []}, "fabric")
    found: list[Recording] = []

    def play(fabric) -> None:
        federation = build_run(fabric, config, Display(quiet=True)).federation
        recording = Recording(name, federation)
        receiver, collecting = federation.receiver, federation.collecting
        federation.receiver = _Recorder(recording)
        federation.collecting = replace(collecting, receiver=federation.receiver)
        federation.server.register_clients({c: federation.data.sizes[c] for c in federation.clients})
        for round in range(federation.exchanges.first_round, federation.rounds + 1):
            report = federation.play(round)
            recording.refused += [f"{name}: {line}" for line in report.refused.values()]
            federation.history.append(report)
        federation.receiver.note()
        federation.receiver, federation.collecting = receiver, collecting
        found.append(recording)

    launched(fabric, play)()
    return found[0]
