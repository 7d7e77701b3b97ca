"""Runs with faults, each compared with a run that had none, and in which those who failed were absent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, get_args

import torch

from helpers.site_faults.office import Fault, Kind, Office
from helpers.sites import DEBUG, HERE, NAMES, Here, paint, three_sites
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.report.html import markdown_table
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.messages import Reply, Request
from lit_fedad.sites.remote import NoReply
from lit_fedad.sites.states import digest_of

KINDS: tuple[Kind, ...] = get_args(Kind)
METHODS = ("federated_subspace", "fedavg", "federated_bank")
Missed = tuple[int, int]
"""Step and client."""

GIVEN = (*DEBUG, "rounds=3", "federation.sampler.on_failure=skip")


@dataclass
class Trial:
    """One run with faults.

    Attributes:
        number: Its number in the campaign.
        method: The method.
        faults: Faults that came to be.
        starts: How often the coordinator was started.
        causes: Why it ended early.
        wrong: What does not hold; empty where all does.
    """

    number: int
    method: str
    faults: list[Fault]
    starts: int = 1
    causes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = "; ".join(str(fault) for fault in self.faults)
        return f"trial {self.number}, {self.method}: {faults}: {'; '.join(self.wrong) or 'held'}"


class Absent(Here):
    """A carrier to sites in this process, some of whose replies do not come, or hold no message."""

    def __init__(self, sites, lost, refused, garbled):
        super().__init__(sites)
        self.lost, self.refused, self.garbled = lost, refused, garbled

    def carry(self, requests, most):
        for client, blob in requests.items():
            self.steps = Request.from_bytes(blob).step
            if (self.steps, client) in self.lost:
                yield client, NoReply("did not answer in time")
            elif (self.steps, client) in self.garbled:
                yield client, NoReply("sent garbage", away=False)
            elif (self.steps, client) in self.refused:
                reply = Reply.from_bytes(self.sites[client].answer(blob))
                yield client, replace(reply, payload=b"no message").to_bytes()
            else:
                yield client, self.sites[client].answer(blob)


class Campaign:
    """Runs of several methods with faults.

    Args:
        folder: Folder of all runs.
        seed: What goes wrong.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self._expected: dict[Any, dict[str, str]] = {}
        self._steps: dict[str, int] = {}

    def play(self, number: int, kinds: list[Kind]) -> Trial:
        """Plays a run with faults of some kinds, and compares it with the run without those who failed."""
        draw = Random(f"{self.seed}/{number}")
        method = METHODS[number % len(METHODS)]
        self._reference(method)
        faults = [
            Fault(
                kind,
                draw.randint(1, self._steps[method] - 1),
                draw.randrange(len(NAMES)),
                draw.uniform(0, 0.8),
            )
            for kind in kinds
        ]
        folder = self.folder / f"trial{number}"
        paint(folder)
        plan = _plan(method, folder)
        office = Office(plan, folder, faults, draw)
        complete = office.run()
        trial = Trial(number, method, office.fired, office.starts, office.causes)
        if not complete:
            trial.wrong.append(f"not complete ({office.causes[-1] if office.causes else 'killed'})")
            return trial
        expected = self._reference(method, office.lost, office.refused, office.garbled)
        found = outcome(folder, folder / "run")
        trial.wrong += [f"{part} differs" for part in found if found[part] != expected[part]]
        left = list(folder.rglob("*.partial"))
        trial.wrong += [f"{path.relative_to(folder)} was left behind" for path in left]
        return trial

    def _reference(
        self,
        method: str,
        lost: Collection[Missed] = (),
        refused: Collection[Missed] = (),
        garbled: Collection[Missed] = (),
    ) -> dict[str, str]:
        """The outcome of the run in which nothing goes wrong but that some replies are missing."""
        key = method, frozenset(lost), frozenset(refused), frozenset(garbled)
        if key not in self._expected:
            folder = self.folder / f"{method}{len(self._expected)}"
            paint(folder)
            carrier = Absent(three_sites(folder), lost, refused, garbled)
            coordinate(_plan(method, folder), carrier, quiet=True)
            self._steps.setdefault(method, carrier.steps)
            self._expected[key] = outcome(folder, folder / "run")
        return self._expected[key]


def outcome(folder: Path, run: Path) -> dict[str, str]:
    """What a run left behind, apart from times, places and the words of causes; each part as a hash or text."""
    checkpoints = Checkpoints(run / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    _, state = checkpoints.load(latest)
    bases = torch.load(latest / "sites.pt")["bases"]
    found = {"the server's state": digest_of(state["server"])}
    for report in state["history"]:
        said = asdict(report)
        said["failures"] = sorted({*said["failures"], *said.pop("refused")})
        said["unscored"] = sorted(said["unscored"])
        for circumstance in ("seconds", "warnings"):
            del said[circumstance]
        found[f"round {report.round}"] = json.dumps(said)
    for client, name in enumerate(NAMES):
        if not bases.get(client):
            found[f"the state of {name}"] = "initial"
            continue
        (states,) = (folder / name / "states").iterdir()
        found[f"the state of {name}"] = digest_of(torch.load(states / f"{bases[client]:012d}.pt"))
    result = json.loads((run / "result.json").read_text())
    found["calibration"] = (run / "calibration.json").read_text()
    found["decisions"] = json.dumps([result["decisions"], result["last"]])
    return found


def drawn(faults: int, seed: int) -> list[list[Kind]]:
    """Draws the kinds of faults of runs with one to three each; every kind equally often, up to one."""
    draw = Random(f"{seed}/kinds")
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)]
    draw.shuffle(kinds)
    runs = []
    while kinds:
        size = draw.randint(1, 3)
        runs.append(kinds[:size])
        kinds = kinds[size:]
    return runs


def tabulated(trials: list[Trial]) -> str:
    """The verdicts by kind of fault, as a Markdown table."""
    counts = Counter()
    for trial in trials:
        for fault in trial.faults:
            counts[fault.kind, "faults"] += 1
            counts[fault.kind, "complete"] += not any("not complete" in line for line in trial.wrong)
            counts[fault.kind, "equal"] += not trial.wrong
    rows = [[kind, *(str(counts[kind, what]) for what in ("faults", "complete", "equal"))] for kind in KINDS]
    return markdown_table(
        ["fault", "faults", "in runs that completed", "in runs with the expected digits"], rows
    )


def _plan(method: str, folder: Path) -> Plan:
    return Plan([f"method={method}", *GIVEN], NAMES, str(folder / "run"), HERE)
