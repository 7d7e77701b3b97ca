"""Methods, data and protected federations that tests build by hand, without a configuration."""

import sys
from pathlib import Path

import pytest
from lightning.fabric import Fabric

from lit_fedad.contracts import Exchanges, Method
from lit_fedad.contracts.state import state_of
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.privacy.protection import protect


class SameEveryRound:
    """What `ClientData` asks for, but for ``sizes`` and ``client_loader``."""

    milestones = frozenset()

    @property
    def stages(self):
        return dict.fromkeys(self.sizes, 0)

    def at(self, round):
        return self


def exchanges_of(client) -> Exchanges:
    """The exchanges that the file of a client's class, or of the nearest base that has some, builds for it."""
    for cls in type(client).__mro__:
        build = vars(sys.modules[cls.__module__]).get("exchanges")
        if build is not None:
            return build(client)
    raise AssertionError(f"{type(client).__name__} has no exchanges")


def method_of(client, server=None) -> Method:
    return Method(client, server, exchanges_of(client))


def federation_of(
    client, server, folder: Path, *, secure_sum=None, privacy=None, noise_key=b"", **parts
) -> Federation:
    """A federation on one CPU with its files in a folder, and with the protection that is asked for."""
    usual = {
        "fabric": Fabric(accelerator="cpu", devices=1),
        "seed": 0,
        "checkpoints": Checkpoints(folder / "checkpoints", "tiny"),
        "pool": ClientPool(state_of(client), folder / "personal"),
        "sampler": ClientSampler(),
        "channel": Channel(),
    }
    federation = Federation(method_of(client, server), **{**usual, **parts})
    return protect(federation, secure_sum, privacy, noise_key)


def outcome(federation: Federation):
    """All that a run leaves: the server's state, the clients' states, and what was measured."""
    personal = {client: federation.pool.get(client) for client in federation.clients}
    history = [(report.scalars, report.metrics, report.participants) for report in federation.history]
    return state_of(federation.server), personal, history


class Stop(Exception):  # noqa: N818
    """The end of a process, between a round and its checkpoint."""


def stopped(play, round: int) -> None:
    """Plays a run whose process ends after a round, before its checkpoint; `play` is as `restarted` takes it."""

    def stop(federation, report):
        if report.round == round:
            raise Stop

    with pytest.raises(Stop):
        play(folder="parts", after_round=stop)


def restarted(play, *rounds: int) -> Federation:
    """Plays a run whose process ends after each of these rounds, before its checkpoint, and returns its last part.

    `play` builds the run anew at each call, and takes `folder` and `after_round` as the fixture `federate` does.
    """
    for round in rounds:
        stopped(play, round)
    return play(folder="parts")
