"""A trained client for new images: from a run's checkpoint, or from what a site has kept of its own client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Context
from lit_fedad.contracts.state import detached, load_state, state_of
from lit_fedad.core.building import build
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.files import atomic, sha256
from lit_fedad.experiment.build import Model
from lit_fedad.experiment.federations import open_checkpoints
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.checkpoint import read_state, write_state
from lit_fedad.federation.client_pool import ClientPool, State
from lit_fedad.federation.client_runner import ClientRunner

OWN_CLIENT = "client.pt"
"""File in which a site keeps its client, in the folder of its own detector."""


@dataclass(frozen=True)
class TrainedClient:
    """What a client predicts with.

    Attributes:
        exchange: Index of the message's exchange in its round.
    """

    round: int
    exchange: int
    blob: bytes
    state: State

    def write(self, folder: Path) -> str:
        """Writes `OWN_CLIENT`, which is complete or absent; returns its SHA-256."""
        blob = torch.from_numpy(np.frombuffer(bytearray(self.blob), np.uint8))
        content = {"round": self.round, "exchange": self.exchange, "blob": blob, "state": self.state}
        with atomic(folder / OWN_CLIENT, durable=True) as partial:
            write_state(detached(content), partial)
        return sha256(folder / OWN_CLIENT)

    @classmethod
    def read(cls, folder: Path, digest: str) -> TrainedClient:
        """Reads `OWN_CLIENT`.

        Raises:
            UserError: If it is missing or was changed.
        """
        content = read_state(
            folder / OWN_CLIENT, digest, "restore it from a copy, or take part in another run"
        )
        return cls(**{**content, "blob": content["blob"].numpy().tobytes()})


def load_client(
    model: Model, folder: Path, config: Config, number: int, fabric: Fabric, own: str | None = None
) -> None:
    """Loads a trained client into the live client, without images.

    `own` is the SHA-256 of `OWN_CLIENT` in a site's folder, None for a run with checkpoints.

    Raises:
        UserError: If the run has no complete round, or a file does not fit its method.
    """
    channel = build(config["federation"]["channel"])
    try:
        found = TrainedClient.read(folder, own) if own else _of_run(model, folder, config, number, channel)
        context = Context(config["seed"], found.round, number, found.exchange)
        exchange = model.method.exchanges.at(context)
        # What clients did not keep yet when an earlier version wrote this is as before their first exchange.
        state = {**state_of(model.client), **found.state}
        ClientRunner(model.client, channel, fabric).activate(exchange, context, state, found.blob)
        model.client.deploy()
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        file = folder / (OWN_CLIENT if own else "checkpoints")
        raise UserError(f"{file}: its state does not fit the run's method ({first_line(error)})") from error


def _of_run(model: Model, folder: Path, config: Config, number: int, channel: Channel) -> TrainedClient:
    """Reads a client from a run's last checkpoint, with the message that the server would send next."""
    checkpoints = open_checkpoints(folder, config, model)
    latest = checkpoints.latest()
    if latest is None:
        raise UserError(f"{folder}: no round is complete yet; train first")
    round, state = checkpoints.load(latest)
    pool = ClientPool(state_of(model.client), folder / "personal")
    pool.restore(latest, {number})
    context = Context(config["seed"], round + 1, number)
    load_state(model.server, state["server"])
    model.server.context = context
    exchange = model.method.exchanges.at(context)
    message, spec = exchange.broadcast(model.server, number), exchange.broadcast_spec(model.client)
    blob = channel.down.pack(message, spec, context, "the server")
    return TrainedClient(round + 1, 0, blob, pool.get(number))
