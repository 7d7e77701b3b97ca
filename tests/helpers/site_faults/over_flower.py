"""Runs over Flower with faults at random moments, by the commands that operators give.

Every run ends early where something is missing (``on_failure=fail``): its operator reads one line and gives the same
command again. So each must end with the digits of a run in which nothing went wrong.
"""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml

from helpers.ports import free_ports
from helpers.site_faults.campaign import outcome
from helpers.site_faults.relay import Relay
from helpers.sites import DEBUG, HERE, NAMES, OPEN, Here, paint, three_sites
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.site_folder import SiteFolder
from lit_fedad.sites.coordinator import Plan, coordinate

METHODS = {"fedavg": 2, "federated_bank": 3, "federated_subspace": 3}
"""Methods, and with how many sites a run begins; the third joins later."""

ROUNDS = 24
_GIVEN = (*DEBUG, f"rounds={ROUNDS}", "evaluation.every=8", "task.standardise=true")
_MOST_S = 1500.0
_SMALL = 2048
"""Bytes that a file may have on a full disk."""

_WRONG_CLOCK = """
import datetime, sys, lit_fedad
from flwr.supernode import node_auth_http_interceptor as signer
from lit_fedad.cli.main import main
right = signer.now
signer.now = lambda: right() + datetime.timedelta(hours=1)
sys.exit(main())
"""


@dataclass
class Played:
    """What became of a run.

    Attributes:
        number: Its number in the campaign.
        method: The method.
        fired: Faults that came to be: when, in seconds from the run's beginning, and what.
        lines: The lines with which the command ended early.
        wrong: What does not hold.
        seconds: How long it took.
    """

    number: int
    method: str
    fired: list[tuple[float, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        faults = "; ".join(f"{when:.0f} s {what}" for when, what in self.fired)
        return (
            f"run {self.number}, {self.method}, {self.seconds:.0f} s, ended early {len(self.lines)} times: {faults}:"
            f" {'; '.join(self.wrong) or 'held'}"
        )


class Machine:
    """A coordinator and three sites on this machine, the third of which joins late, and what goes wrong with them."""

    def __init__(self, folder: Path, played: Played, draw: random.Random, faults: int) -> None:
        self.folder, self.played, self.draw, self.left = folder, played, draw, faults
        self.names = NAMES[: METHODS[played.method]]
        self.fed, self.log = folder / "fed", folder / "coordinator.log"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.busy = set[str]()
        self.kinds: dict[str, Callable[[str], None]] = {
            "site killed": self.kill_site,
            "site ended, started again": self.end_site,
            "site stopped": self.stop_site,
            "line cut": self.cut_line,
            "site revoked, let in again": self.revoke,
            "key renewed": self.renew_key,
            "disk of a site full": self.fill_site,
            "clock of a site wrong": self.turn_clock,
            "site joins": self.join,
            "certificates renewed": lambda _: self.run("federation", "renew", f"fed={self.fed}"),
            "coordinator killed": self.kill_coordinator,
            "disk of the coordinator full": self.fill_coordinator,
        }

    def make(self) -> None:
        """Makes the folders of the coordinator and of the sites."""
        paint(self.folder)
        port, link = free_ports()
        FederationFolder.create(
            self.fed, host="127.0.0.1", port=port, link=link, sites=list(self.names), timeout=400.0,
            overrides=[f"method={self.played.method}", *_GIVEN], own=[*HERE, "tracking=off"],
        )  # fmt: skip
        self.relays = {}
        for name in NAMES:
            self.relays[name] = Relay(port)
            data = ["data=mvtec_mixture", f"data.root={self.folder / name / 'images'}"]
            SiteFolder.create(
                self.folder / name, self.fed / "ca.crt", name=name,
                address=f"127.0.0.1:{self.relays[name].port}", data=data, own=list(HERE), policy=OPEN.content,
            )  # fmt: skip
        for name in self.names:
            self.enrol(name)
            self.start_site(name)

    def play(self) -> None:
        """Plays the run until its end; faults come once the first round has begun."""
        began, started = time.monotonic(), 0
        next_fault: float | None = None
        coordinator = None
        try:
            while time.monotonic() - began < _MOST_S:
                if coordinator is None:
                    started += 1
                    coordinator = self.start_coordinator()
                due = [(at, act) for at, act in self.later if at <= time.monotonic()]
                self.later = [(at, act) for at, act in self.later if at > time.monotonic()]
                for _, act in due:
                    act()
                if next_fault is None and any((self.fed / "run" / "checkpoints").glob("round_*")):
                    next_fault = time.monotonic() + self.draw.uniform(0, 4)
                if (status := coordinator.poll()) is not None:
                    if not status:
                        break
                    self.read_line(coordinator)
                    coordinator = None
                    time.sleep(1)
                elif next_fault is not None and self.left and time.monotonic() > next_fault:
                    self.fire(round(time.monotonic() - began, 1))
                    next_fault = time.monotonic() + self.draw.uniform(0, 6)
                time.sleep(0.1)
            else:
                self.played.wrong.append(f"not complete after {_MOST_S:g} s and {started} starts")
        finally:
            self.played.seconds = time.monotonic() - began
            self.end()

    def fire(self, when: float) -> None:
        """Has one thing go wrong."""
        free = [name for name in NAMES if name in self.processes and name not in self.busy]
        names = yaml.safe_load((self.fed / "federation.yaml").read_text())["sites"]
        joins = (
            len(names) < len(NAMES)
            and (Checkpoints(self.fed / "run" / "checkpoints").latest_round() or 0) > 0
        )
        if len(names) < len(NAMES) and self.left == 1 and not joins:
            return  # the last fault waits for the round from which on a site can join
        kinds = [kind for kind in self.kinds if kind != "site joins" or joins]
        kind = "site joins" if "site joins" in kinds and self.left == 1 else self.draw.choice(kinds)
        name = NAMES[2] if kind == "site joins" else ""
        if (kind != "site joins" and "site" in kind) or kind in ("line cut", "key renewed"):
            if not free:
                return
            name = self.draw.choice(free)
        self.kinds[kind](name)
        self.left -= 1
        self.played.fired.append((when, f"{kind}: {name}" if name else kind))

    def after(self, seconds: float, act: Callable[[], None], name: str = "") -> None:
        """Does something later; until then a site has no other fault."""
        self.busy.add(name)

        def done() -> None:
            self.busy.discard(name)
            act()

        self.later.append((time.monotonic() + seconds, done))

    def kill_site(self, name: str) -> None:
        self.processes.pop(name).kill()
        self.start_site(name)

    def end_site(self, name: str) -> None:
        self.processes[name].terminate()
        self.after(self.draw.choice([1, 5, 40]), lambda: self.start_site(name), name)

    def stop_site(self, name: str) -> None:
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        self.after(self.draw.uniform(1, 20), lambda: process.send_signal(signal.SIGCONT), name)

    def cut_line(self, name: str) -> None:
        self.relays[name].cut(self.draw.choice([0.0, 2.0, 8.0]))

    def revoke(self, name: str) -> None:
        (self.fed / "keys" / f"{name}.pub").unlink()
        self.after(self.draw.uniform(1, 15), lambda: self.enrol(name), name)

    def renew_key(self, name: str) -> None:
        self.run("site", "renew", f"site={self.folder / name}")
        self.enrol(name)

    def fill_site(self, name: str) -> None:
        process = self.processes[name]
        fill(process.pid)
        self.after(self.draw.uniform(1, 8), lambda: empty(process.pid), name)

    def turn_clock(self, name: str) -> None:
        """A site with a wrong clock is told so, and ends; with the right one it is started again."""
        self.processes.pop(name).terminate()
        site, log = self.folder / name, self.folder / f"{name}.clock"
        with log.open("wb") as file:
            command = [sys.executable, "-W", "ignore", "-c", _WRONG_CLOCK, "site", "start", f"site={site}"]
            process = self.processes[f"{name} with a wrong clock"] = subprocess.Popen(
                command, stdout=file, stderr=file
            )

        def right() -> None:
            if process.poll() is None:  # the coordinator, which may be away, has not told it yet
                self.after(1, right, name)
                return
            said = log.read_text()
            if process.returncode != 2 or "its clock says" not in said:
                self.played.wrong.append(f"a wrong clock is told as {said.strip()[-200:]!r}")
            self.start_site(name)

        self.after(10, right, name)

    def join(self, name: str) -> None:
        settings = self.fed / "federation.yaml"
        content = yaml.safe_load(settings.read_text())
        self.enrol(name)
        settings.write_text(yaml.safe_dump({**content, "sites": list(NAMES)}))
        self.start_site(name)

    def kill_coordinator(self, _: str) -> None:
        self.processes["coordinator"].kill()

    def fill_coordinator(self, _: str) -> None:
        first = psutil.Process(self.processes["coordinator"].pid)
        pids = [process.pid for process in (first, *first.children(recursive=True))]
        for pid in pids:
            fill(pid)
        self.after(self.draw.uniform(1, 6), lambda: [empty(pid) for pid in pids])

    def enrol(self, name: str) -> None:
        shutil.copyfile(self.folder / name / "key.pub", self.fed / "keys" / f"{name}.pub")

    def run(self, *words: str) -> None:
        done = subprocess.run(command(*words), capture_output=True, text=True)
        if done.returncode:
            self.played.wrong.append(f"{' '.join(words[:2])}: {done.stderr.strip()[-200:]}")

    def start_site(self, name: str) -> None:
        self.start(name, self.folder / f"{name}.out", "site", "start", f"site={self.folder / name}")

    def start_coordinator(self) -> subprocess.Popen[bytes]:
        self.position = self.log.stat().st_size if self.log.exists() else 0
        self.start("coordinator", self.log, "federation", "start", f"fed={self.fed}")
        return self.processes["coordinator"]

    def start(self, name: str, log: Path, *words: str) -> None:
        """Starts a process; what it says is written by this one, whose disk is never full."""
        process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.processes[name] = process

        def listen() -> None:
            with log.open("ab", buffering=0) as file:
                shutil.copyfileobj(process.stdout, file, 1)

        threading.Thread(target=listen, daemon=True).start()

    def read_line(self, coordinator: subprocess.Popen[bytes]) -> None:
        """Reads why the command ended; one that was killed says nothing."""
        if coordinator.returncode == -signal.SIGKILL:
            return
        said = self.log.read_text(errors="replace")[self.position :].strip().splitlines()
        self.played.lines.append(said[-1] if said else "")
        if coordinator.returncode != 2 or not said or not said[-1].strip():
            self.played.wrong.append(f"ended with status {coordinator.returncode}: {said[-1:]}")

    def end(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


def fill(pid: int) -> None:
    """Lets a process write no file longer than `_SMALL`, as if its disk was full."""
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (_SMALL, resource.RLIM_INFINITY))


def empty(pid: int) -> None:
    """Lets it write again."""
    with contextlib.suppress(OSError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def command(*words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "lit_fedad", *words]


class Joins(Here):
    """A carrier to two sites of this process, and from the end of a round on to a third."""

    def __init__(self, sites: list, begins: int, after: int, run: Path) -> None:
        super().__init__(sites[:begins])
        self.late, self.after, self.run = sites[2], after, run

    def present(self) -> dict[int, str]:
        reached = Checkpoints(self.run / "checkpoints").latest_round()
        if reached is not None and reached >= self.after:
            self.sites[2] = self.late
        return {client: NAMES[client] for client in self.sites}


def play(folder: Path, number: int, seed: int, faults: int) -> Played:
    """Plays a run with at most so many faults, and compares it with the one in which nothing went wrong."""
    played = Played(number, [*METHODS][number % len(METHODS)])
    machine = Machine(folder / "faults", played, random.Random(f"{seed}/flower/{number}"), faults)
    machine.make()
    machine.play()
    for path in (*machine.folder.glob("*.out"), machine.log):
        if "Traceback" in path.read_text(errors="replace"):
            played.wrong.append(f"{path.name} holds a traceback")
    for name in NAMES:
        if (machine.folder / name / "log.jsonl").exists():
            machine.run("site", "log", f"site={machine.folder / name}")
    played.wrong += [f"{path} was left behind" for path in machine.folder.rglob("*.partial")]
    if not (machine.fed / "run" / "result.json").exists():
        return played
    found = outcome(machine.folder, machine.fed / "run")
    expected = undisturbed(folder / "plain", played.method, machine.fed / "run")
    played.wrong += [
        f"{part} differs" for part in {**found, **expected} if found.get(part) != expected.get(part)
    ]
    return played


def undisturbed(folder: Path, method: str, run: Path) -> dict[str, str]:
    """Plays the run in this process, without faults; the third site joins in the round in which it joined."""
    paint(folder)
    checkpoints = Checkpoints(run / "checkpoints")
    history = checkpoints.load(checkpoints.latest())[1]["history"]
    # Who joins does what there was before round 1 then, and is noted there too.
    taken = [report.round for report in history if report.round > 0 and 2 in report.participants]
    begins, joined = METHODS[method], min(taken, default=ROUNDS + 1)
    carrier = Joins(three_sites(folder), begins, joined - 1, folder / "run")
    plan = Plan([f"method={method}", *_GIVEN], NAMES[:begins], str(folder / "run"), HERE)
    coordinate(plan, carrier, quiet=True, present=carrier.present)
    return outcome(folder, folder / "run")
