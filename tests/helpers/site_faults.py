"""Faults of three sites and their coordinator at random moments, and what must hold all the same.

Coordinator and sites are processes of their own, which share nothing but letters in folders: orders, replies, states
and checkpoints are those of real sites. A process is killed by SIGKILL and stopped by SIGSTOP. Every federation is
played again by sites that were absent exactly where an order was lost: both must end alike.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from helpers.sites import HERE, NAMES, Here, paint, settings, three_sites
from lit_fedad.errors import UserError
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.letters import Order, Reply
from lit_fedad.sites.remote import Lost
from lit_fedad.sites.site import Site
from lit_fedad.sites.states import digest_of

KINDS = (
    "kill site",
    "kill coordinator",
    "stop site for two rounds",
    "delay beyond deadline",
    "garbage bytes",
)
METHODS = ("apfl", "scaffold", "fedavg")
"""With and without states at the sites."""

WORDS = (
    "task=autoencoder", "features=frozen", "features.hidden=8", "task.bottleneck=4", "debug=seconds", "rounds=6",
    "evaluation.alpha=0.3", "evaluation.every=2", "evaluation.pictures=0", "federation.sampler.on_failure=skip",
)  # fmt: skip
PATIENCE = 900.0  # seconds that a coordinator waits for a site that nothing was done to
SHORT = 0.5  # and for one that is stopped or delayed
STARTS = 5  # of one coordinator in a row without a fault between them


@dataclass
class Found:
    """What a campaign found.

    Attributes:
        faults: Number of faults by kind.
        runs: Number of federations.
        orders: Number of orders, hello included.
        lost: Number of orders whose site counts as absent.
        refused: Number of garbage replies, none of which was taken.
        causes: What ended a coordinator early, apart from kills, by cause.
        bad: What should not be, a line each.
    """

    faults: Counter = field(default_factory=Counter)
    runs: int = 0
    orders: int = 0
    lost: int = 0
    refused: int = 0
    causes: Counter = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


class Folders:
    """A carrier to site processes on this machine, which writes down what became of every order.

    An order that waits for a site that was killed is there when it is back, as over Flower, which sends it again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def carry(self, orders):
        return ((client, self._carry(client, blob)) for client, blob in orders.items())

    def _carry(self, client, blob):
        found = self._ask(self.folder / NAMES[client], blob)
        order = Order.from_bytes(blob)
        lost = isinstance(found, Lost)
        line = {"kind": order.kind, "round": order.round, "step": order.step, "client": client, "lost": lost}
        line["reply"] = None if lost else hashlib.sha256(found).hexdigest()
        with (self.folder / "journal").open("a") as journal:
            journal.write(json.dumps(line) + "\n")
        return found

    def _ask(self, site, blob):
        name, began = f"{time.time_ns():020d}", time.monotonic()
        _post(site / "orders" / name, blob)
        reply = site / "replies" / name
        while not reply.exists():
            waited = time.monotonic() - began
            if waited > PATIENCE or (waited > SHORT and (site / "slow").exists()):
                return Lost("did not answer in time")
            time.sleep(0.02)
        return reply.read_bytes()


class Absent(Here):
    """A carrier to sites that are absent where the orders of another run were lost."""

    def __init__(self, sites, lost):
        super().__init__(sites)
        self.lost = lost

    def carry(self, orders):
        for client, blob in orders.items():
            lost = (Order.from_bytes(blob).step, client) in self.lost
            yield client, Lost("absent") if lost else self.sites[client].answer(blob)


def garbage(draw: random.Random, reply: bytes) -> bytes:
    """Turns a reply into bytes that must be refused."""
    letter = Reply.from_bytes(reply).letter
    forms = [draw.randbytes(draw.randrange(2000)), reply[: draw.randrange(len(reply))]]
    if letter:  # numbers that are none, in a message of the right form
        head = 8 + int.from_bytes(letter[:8], "little")
        forms.append(reply[: len(reply) - len(letter) + head] + b"\xff" * (len(letter) - head))
    return draw.choice(forms)


def _post(path: Path, blob: bytes) -> None:
    """Writes a letter that is complete or absent."""
    partial = path.with_name(f".{path.name}")
    partial.write_bytes(blob)
    partial.replace(path)


def _site(folder: Path, name: str) -> None:
    """Answers orders until it is killed; files in its folder say what is wrong with it."""
    torch.set_num_threads(1)
    own = folder / name
    site = Site(settings(folder, name), Display(quiet=True))
    while True:
        time.sleep(0.02)
        for order in sorted((own / "orders").glob("[0-9]*")):
            reply = site.answer(order.read_bytes())
            while (own / "delay").exists():
                time.sleep(0.02)
            if (own / "garbage").exists():
                reply = garbage(random.Random((own / "garbage").read_text()), reply)
                with (folder / "forged").open("a") as forged:
                    forged.write(hashlib.sha256(reply).hexdigest() + "\n")
                (own / "garbage").unlink()
            _post(own / "replies" / order.name, reply)
            order.unlink()


def _coordinator(folder: Path, words: list[str]) -> None:
    """Plays the federation, or the rest of it."""
    torch.set_num_threads(1)
    try:
        coordinate(Plan(words, NAMES, str(folder / "run"), HERE), Folders(folder), Display(quiet=True))
    except UserError as error:
        (folder / "ended").write_text(str(error))
        sys.exit(2)


def _again(folder: Path, words: list[str], lost: set[tuple[int, int]]) -> None:
    """Plays a federation without faults, whose sites are absent where orders were lost."""
    torch.set_num_threads(1)
    carrier = Absent(three_sites(folder), lost)
    coordinate(Plan(words, NAMES, str(folder / "run"), HERE), carrier, Display(quiet=True))


class Campaign:
    """Federations one after another, until enough faults were done to them.

    Args:
        folder: Scratch folder.
        seed: What is drawn: kinds of faults in turns, sites, moments, bytes.
        say: Is told what happens, a line each.
    """

    def __init__(self, folder: Path, seed: int = 0, say=lambda line: None) -> None:
        self.folder, self.draw, self.say = folder, random.Random(seed), say
        self.found = Found()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["lit_fedad.sites.coordinator", "lit_fedad.sites.site", "lit_fedad.experiment.train"]
        )
        paint(folder / "images")

    def run(self, faults: int) -> Found:
        """Does faults until there are as many as given."""
        kinds: list[str] = []
        while len(kinds) < faults:
            kinds += self.draw.sample(KINDS, len(KINDS))
        kinds = kinds[:faults][::-1]
        while kinds:
            number = self.found.runs
            method = METHODS[number % len(METHODS)]
            Play(self, self.folder / str(number), [f"method={method}", *WORDS]).run(kinds)
            self.found.runs += 1
            shutil.rmtree(self.folder / str(number))
        return self.found


class Play:
    """One federation, the faults that are done to it, and the same without them."""

    def __init__(self, campaign: Campaign, folder: Path, words: list[str]) -> None:
        self.campaign, self.folder, self.words = campaign, folder, words
        self.draw, self.found = campaign.draw, campaign.found
        self.again = folder / "again"
        for name in NAMES:
            for copy in (folder, self.again):
                shutil.copytree(campaign.folder / "images" / name, copy / name)
            for letters in ("orders", "replies"):
                (folder / name / letters).mkdir()
        self.processes: dict[str, multiprocessing.process.BaseProcess] = {}

    def run(self, kinds: list[str]) -> None:
        """Plays the federation to its end; faults that are done are taken from the end of the list."""
        try:
            for name in NAMES:
                self._start(name)
            self._start("coordinator")
            seen = 0
            while kinds and self._reach(seen + self.draw.randint(1, 12)):
                time.sleep(self.draw.uniform(0, 0.3))
                self._do(kinds.pop(), self.draw.choice(NAMES))
                seen = len(self._journal())
            self._reach(None)
        finally:
            for process in self.processes.values():
                process.kill()
                process.join()
        self._compare()

    def _start(self, name: str) -> None:
        role = (
            (_coordinator, (self.folder, self.words))
            if name == "coordinator"
            else (_site, (self.folder, name))
        )
        process = self.campaign.context.Process(target=role[0], args=role[1])
        process.start()
        self.processes[name] = process

    def _reach(self, orders: int | None) -> bool:
        """Waits until so many orders were given, or all; False once the federation is complete."""
        starts = 0
        while orders is None or len(self._journal()) < orders:
            process = self.processes["coordinator"]
            process.join(0.05)
            if process.exitcode is None:
                continue
            if (self.folder / "run" / "result.json").exists():
                return False
            ended = self.folder / "ended"
            cause = ended.read_text() if ended.exists() else f"exit status {process.exitcode}"
            self.found.causes[cause.partition(": ")[0]] += 1
            starts += 1
            if starts > STARTS:
                raise AssertionError(f"{self.folder}: the same command does not continue: {cause}")
            self._start("coordinator")
        return True

    def _do(self, kind: str, name: str) -> None:
        """Does a fault, to the coordinator or to one site."""
        self.campaign.say(f"run {self.found.runs}, order {len(self._journal())}: {kind} ({name})")
        self.found.faults[kind] += 1
        if kind.startswith("kill"):
            victim = "coordinator" if kind == "kill coordinator" else name
            self.processes[victim].kill()
            self.processes[victim].join()
            self._start(victim)
        elif kind == "garbage bytes":
            (self.folder / name / "garbage").write_text(str(self.draw.random()))
        elif kind == "stop site for two rounds":
            os.kill(self.processes[name].pid, signal.SIGSTOP)
            self._slow(name, self._round() + 2)
            os.kill(self.processes[name].pid, signal.SIGCONT)
        else:
            (self.folder / name / "delay").touch()
            self._slow(name, None)
            (self.folder / name / "delay").unlink()

    def _slow(self, name: str, round: int | None) -> None:
        """Has the coordinator give a site up soon, until a round; or until one order was lost."""
        (self.folder / name / "slow").touch()
        done, lost, ended = len(self._journal()), len(self._lost()), self.found.causes.total()
        while self._reach(done := done + 1):
            over = len(self._lost()) > lost if round is None else self._round() > round
            # A coordinator that begins without one of its sites ends in a line, and continues when it is back.
            if over or self.found.causes.total() > ended:
                break
        (self.folder / name / "slow").unlink()

    def _journal(self) -> list[dict]:
        path = self.folder / "journal"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def _round(self) -> int:
        return max((line["round"] for line in self._journal()), default=0)

    def _lost(self) -> list[dict]:
        return [line for line in self._journal() if line["lost"]]

    def _compare(self) -> None:
        """Plays the federation again, and compares what both ended with."""
        forged = self.folder / "forged"
        bad = set(forged.read_text().split()) if forged.exists() else set()
        # An order that a killed coordinator had given is given again: what counts is what became of it last.
        last = {(line["step"], line["client"]): line for line in self._journal() if line["kind"] != "hello"}
        lost = {key for key, line in last.items() if line["lost"] or line["reply"] in bad}
        self.found.orders += len(self._journal())
        self.found.lost += len(lost)
        self.found.refused += sum(line["reply"] in bad for line in self._journal())
        process = self.campaign.context.Process(target=_again, args=(self.again, self.words, lost))
        process.start()
        process.join()
        if process.exitcode:
            self.found.bad.append(f"run {self.found.runs}: without its faults it fails")
            return
        for what, (here, there) in _differences(self.folder, self.again).items():
            self.found.bad.append(
                f"run {self.found.runs} ({self.words[0]}): {what} differs: {here} and {there}"
            )


def _differences(one: Path, other: Path) -> dict[str, tuple]:
    """Returns what two federations ended with, where it differs."""
    ends = [_end(one), _end(other)]
    return {what: (ends[0][what], ends[1][what]) for what in ends[0] if ends[0][what] != ends[1][what]}


def _end(folder: Path) -> dict[str, object]:
    """Describes what a federation ended with, apart from times and causes."""
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    latest = checkpoints.latest()
    round, state = checkpoints.load(latest)
    bases = torch.load(latest / "sites.pt")["bases"]
    result = json.loads((folder / "run" / "result.json").read_text())
    end: dict[str, object] = {"last round": round, "server": digest_of(state["server"]), "bases": bases}
    for report in state["history"]:
        told = {**asdict(report), "seconds": 0, "warnings": []}
        told |= {kind: sorted(told[kind]) for kind in ("failures", "refused", "unscored")}
        end[f"report of round {report.round}"] = json.dumps(told)
    for client, name in enumerate(NAMES):
        path = next((folder / name / "states").glob(f"*/{bases[client]:012d}.pt"), None)
        end[f"state of {name}"] = digest_of(torch.load(path)) if path else "initial"
    end["calibration"] = (folder / "run" / "calibration.json").read_text()
    end["metrics"] = json.dumps([result["last"], result["decisions"]])
    return end
