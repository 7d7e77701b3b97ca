"""Fifty faults at random moments of one run: kills, joins, leaves, revocations, renewals, cut lines, full disks."""

import errno
import random
from collections import Counter

import pytest
import torch
from helpers.sites import DEBUG, HERE, NAMES, Here, paint, settings

from lit_fedad.core.errors import UserError
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.messages import Request
from lit_fedad.sites.remote import NoReply
from lit_fedad.sites.site import Site
from lit_fedad.sites.states import States

pytestmark = pytest.mark.slow
ROUNDS, FAULTS = 40, 50
KINDS = ("site killed", "leave", "revoke", "renewed", "line cut", "full disk", "coordinator killed")


class KilledError(Exception):
    """The coordinator's process ends here."""


class Faults(Here):
    """A carrier to three sites, the third of which comes late, with faults at random requests."""

    def __init__(self, folder, seed, monkeypatch):
        self.make = lambda client: Site(settings(folder, NAMES[client]), Display(quiet=True))
        super().__init__([self.make(client) for client in range(2)])
        self.random, self.patch = random.Random(seed), monkeypatch
        self.away, self.counted = {2: 30}, Counter()

    def present(self):
        return {client: NAMES[client] for client in range(3) if client not in self.away}

    def carry(self, requests, most):
        self.away = {client: left - 1 for client, left in self.away.items() if left > 1}
        for client, blob in requests.items():
            assert len(blob) < 1 << 24
            yield client, self.reply(client, blob)

    def reply(self, client, blob):
        self.sites.setdefault(client, self.make(client))
        if client in self.away:
            return NoReply("has signed off")
        kind = ""
        # Who fails before round 1 is left out of the run: faults come after.
        if (
            Request.from_bytes(blob).round > 0
            and sum(self.counted.values()) < FAULTS
            and self.random.random() < 0.6
        ):
            kind = self.random.choice(KINDS)
            self.counted[kind] += 1
        if kind in ("leave", "revoke"):
            self.away[client] = self.random.randrange(1, 20)
            return NoReply(
                "its key was taken away: it gets no request" if kind == "revoke" else "has signed off"
            )
        if kind in ("site killed", "renewed"):
            self.sites[client] = self.make(client)
            return (
                NoReply("did not answer in time")
                if kind == "site killed"
                else self.sites[client].answer(blob)
            )
        if kind == "full disk":
            with self.patch.context() as patch:
                patch.setattr(States, "put", full)
                return self.sites[client].answer(blob)
        found = self.sites[client].answer(blob)
        if kind == "coordinator killed":
            raise KilledError
        return NoReply("the line was cut") if kind == "line cut" else found


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def play(folder, seed, monkeypatch):
    """Plays the run until it is complete, as an operator would who gives the same command again."""
    paint(folder)
    carrier = Faults(folder, seed, monkeypatch)
    overrides = ["method=fedavg", *DEBUG, f"rounds={ROUNDS}", "evaluation.every=10", "task.standardise=true"]
    overrides.append("federation.sampler.on_failure=skip")
    plan, begun = Plan(overrides, NAMES[:2], str(folder / "run"), HERE), 0
    while True:
        begun += 1
        assert begun <= FAULTS
        try:
            result = coordinate(plan, carrier, quiet=True, present=carrier.present)
        except (KilledError, UserError):
            plan = Plan(overrides, NAMES if 2 in carrier.sites else NAMES[:2], str(folder / "run"), HERE)
            continue
        checkpoints = Checkpoints(folder / "run" / "checkpoints")
        return carrier, result, checkpoints.load(checkpoints.latest())[1]


@pytest.mark.nightly
@pytest.mark.long
def test_a_run_with_fifty_faults_completes_with_the_same_digits_twice(tmp_path, monkeypatch, differences):
    carrier, result, state = play(tmp_path / "one", 0, monkeypatch)
    assert sum(carrier.counted.values()) == FAULTS
    assert set(carrier.counted) == set(KINDS)
    assert [report.round for report in state["history"]] == list(range(-1, ROUNDS + 1))
    assert all(torch.isfinite(entry).all() for entry in state["server"]["weights"].values())
    assert set(result["sites"]) == set(NAMES)
    assert all(own["rounds"] > 10 for own in result["status"].values())
    for site in carrier.sites.values():
        said = site.log.entries()  # every line follows from the one before
        assert {line["verdict"] for line in said} <= {"answered", "refused"}
        assert all(line["code"] == 1 for line in said if line["verdict"] == "refused")
    _, _, again = play(tmp_path / "two", 0, monkeypatch)
    assert differences(state["server"], again["server"]) == []
