"""The office through which messages between a coordinator and its sites go, and where faults happen."""

from __future__ import annotations

import heapq
import itertools
import queue
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from helpers.site_faults.garbage import garbled
from helpers.site_faults.processes import Event, Life, play_coordinator, play_site
from helpers.sites import NAMES
from lit_fedad.core.errors import UserError
from lit_fedad.sites.coordinator import Plan
from lit_fedad.sites.messages import Reply, Request
from lit_fedad.sites.remote import NoReply

Kind = Literal[
    "site killed, back at once",
    "site killed, back two rounds later",
    "site stopped for two rounds",
    "reply after the deadline",
    "garbage in a reply",
    "coordinator killed",
]

_PATIENCE_S = 0.5
"""How long others wait for a site that is away. Only its request has a deadline: others take what the machine needs."""

_MOST_S = 300.0
_MOST_STARTS = 8


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run.

    Attributes:
        kind: What.
        step: From which request on.
        client: At which site; without a meaning where the coordinator is killed.
        delay: How many seconds after the request was given.
    """

    kind: Kind
    step: int
    client: int
    delay: float

    def __str__(self) -> str:
        where = "" if self.kind == "coordinator killed" else f", {NAMES[self.client]}"
        return f"{self.kind}{where}, {self.delay:.2f} s after request {self.step}"


@dataclass
class Desk:
    """What the office knows of a site.

    Attributes:
        life: Its process; None while it is gone.
        stopped: Whether it is stopped.
        back: Round in which it comes back; None while it is there.
        busy: Number of the request that it works on.
        waiting: A request that it has not been given yet: number and payload.
        owed: Number of the request that the coordinator waits for.
        late: Whether its reply to that comes after the deadline.
        garbled: Draws what its reply to that becomes; None where that is left alone.
    """

    life: Life | None = None
    stopped: bool = False
    back: int | None = None
    busy: int | None = None
    waiting: tuple[int, bytes] | None = None
    owed: int | None = None
    late: bool = False
    garbled: Random | None = None


@dataclass
class Office:
    """Plays one run of a federation with faults.

    Attributes:
        plan: The run.
        folder: Folder of the sites.
        faults: What goes wrong.
        draw: Draws garbage.
        lost: Step and client of the requests to which the coordinator got no reply of the site's own.
        refused: Those to which a payload without a message came, in exchanges before round 1: such a site has played,
            and goes on.
        garbled: Those to which garbage came: their site is there, and is asked again in the same round.
        causes: Why the coordinator ended early, each time that it did.
        starts: How often it was started.
        fired: Faults that came to be.
    """

    plan: Plan
    folder: Path
    faults: list[Fault]
    draw: Random
    lost: set[tuple[int, int]] = field(default_factory=set)
    refused: set[tuple[int, int]] = field(default_factory=set)
    garbled: set[tuple[int, int]] = field(default_factory=set)
    causes: list[str] = field(default_factory=list)
    starts: int = 0
    fired: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._events: queue.Queue = queue.Queue()
        self._desks = {client: Desk() for client in range(len(NAMES))}
        self._numbers, self._ties = itertools.count(1), itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._round = self._step = 0
        self._kind = ""
        self._head: Life | None = None

    def run(self) -> bool:
        """Plays until the coordinator has finished; returns whether it has."""
        end = time.monotonic() + _MOST_S
        try:
            for client in self._desks:
                self._start_site(client)
            self._start_coordinator()
            while time.monotonic() < end:
                for event in self._next():
                    if event.life is self._head:
                        if event.said == ("complete", ""):
                            return True
                        if not self._of_coordinator(event.said):
                            return False
                    else:
                        self._of_site(event)
            self.causes.append(f"nothing came of it in {_MOST_S:g} seconds")
            return False
        finally:
            for life in (self._head, *(desk.life for desk in self._desks.values())):
                if life is not None:
                    life.end()

    def _next(self) -> Iterable[Event]:
        """Does what is due, and returns what was said."""
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
        due = self._timers[0][0] - time.monotonic() if self._timers else 1.0
        try:
            return [self._events.get(timeout=max(0.0, min(due, 1.0)))]
        except queue.Empty:
            return []

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._ties), action))

    def _start_site(self, client: int) -> None:
        desk = self._desks[client]
        desk.life, desk.busy = Life(play_site, (self.folder, client), self._events), None

    def _start_coordinator(self) -> None:
        self.starts += 1
        for desk in self._desks.values():
            desk.owed, desk.waiting, desk.late, desk.garbled = None, None, False, None
        self._head = Life(play_coordinator, (self.plan,), self._events)

    def _of_coordinator(self, said: Any) -> bool:
        """Takes what the coordinator said; returns whether the run goes on."""
        if said is None or said[0] == "ended":
            if said is not None:
                self.causes.append(said[1])
            if self.starts >= _MOST_STARTS:
                return False
            self._start_coordinator()
        else:
            self._take(said[1])
        return True

    def _take(self, requests: dict[int, bytes]) -> None:
        """Gives every site its request."""
        first = Request.from_bytes(next(iter(requests.values())))
        self._step, self._round = first.step, first.round
        self._kind = first.kind
        for missed in (self.lost, self.refused, self.garbled):
            # Of a coordinator that has gone back to its checkpoint; a message that a site had lost comes in one more
            # request of the same step.
            anew = {(self._step, client) for client in requests}
            missed -= anew | {(step, client) for step, client in missed if 0 < self._step < step}
        for client in self._desks:
            self._welcome(client)
        for client, blob in requests.items():
            desk = self._desks[client]
            desk.owed = next(self._numbers)
            desk.waiting = (desk.owed, blob)
        for fault in [fault for fault in self.faults if self._step and fault.step == self._step]:
            self.faults.remove(fault)
            self._begin(fault)
        for client in requests:
            self._hand(client)
        self._give_up()

    def _begin(self, fault: Fault) -> None:
        """Has a fault come to be, unless something is wrong with its site already."""
        desk = self._desks[fault.client]
        if fault.kind == "coordinator killed":
            self._after(fault.delay, lambda: self._kill_coordinator(fault))
        elif desk.back is None and desk.owed is not None and not desk.late and desk.garbled is None:
            if fault.kind == "reply after the deadline":
                desk.late = True
                self.fired.append(fault)
            elif fault.kind == "garbage in a reply":
                desk.garbled = self.draw
                self.fired.append(fault)
            else:
                self._after(fault.delay, lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        """Kills or stops a site, unless it is away."""
        desk = self._desks[fault.client]
        if desk.life is None or desk.back is not None:
            return
        self.fired.append(fault)
        if fault.kind == "site stopped for two rounds":
            desk.life.signal(signal.SIGSTOP)
            desk.stopped, desk.back = True, self._round + 2
        else:
            desk.life.end()
            desk.life, desk.busy = None, None
            if fault.kind == "site killed, back at once":
                self._start_site(fault.client)
                self._hand(fault.client)
            else:
                desk.back = self._round + 2
        self._give_up()

    def _kill_coordinator(self, fault: Fault) -> None:
        assert self._head is not None
        self.fired.append(fault)
        self._head.end()

    def _welcome(self, client: int) -> None:
        """Has a site come back whose time has come."""
        desk = self._desks[client]
        if desk.back is None or self._round < desk.back:
            return
        desk.back = None
        if desk.life is None:
            self._start_site(client)
        elif desk.stopped:
            desk.life.signal(signal.SIGCONT)
            desk.stopped = False

    def _hand(self, client: int) -> None:
        """Gives a site the request that waits for it, unless it is gone, stopped or works on another."""
        desk = self._desks[client]
        if desk.life is None or desk.stopped or desk.busy is not None or desk.waiting is None:
            return
        desk.busy, _ = desk.waiting
        desk.life.tell(desk.waiting)

    def _of_site(self, event: Event) -> None:
        client = next((c for c, desk in self._desks.items() if desk.life is event.life), None)
        if client is None or event.said is None:
            return
        desk, (number, reply) = self._desks[client], event.said
        desk.busy = None
        if desk.owed == number:
            desk.waiting = None
        if desk.owed == number and not desk.late:
            if desk.garbled is not None:
                reply, desk.garbled = garbled(reply, desk.garbled), None
                early = self._kind == "play" and self._round <= 0 and _is_letter(reply, self._step)
                (self.refused if early else self.garbled).add((self._step, client))
            self._reply(client, reply)
        self._hand(client)

    def _reply(self, client: int, found: bytes | NoReply) -> None:
        desk = self._desks[client]
        desk.owed, desk.waiting = None, None
        assert self._head is not None
        self._head.tell((client, found))
        self._give_up()

    def _give_up(self) -> None:
        """Begins to wait for the last time, once only sites that are away or late have not answered."""
        owing = {client: desk.owed for client, desk in self._desks.items() if desk.owed is not None}
        if owing and all(self._desks[client].late or self._away(client) for client in owing):
            self._after(_PATIENCE_S, lambda: self._lose(owing))

    def _away(self, client: int) -> bool:
        desk = self._desks[client]
        return desk.back is not None and (desk.life is None or desk.stopped)

    def _lose(self, owing: dict[int, int | None]) -> None:
        for client, number in owing.items():
            desk = self._desks[client]
            if desk.owed == number:
                desk.late = False
                if self._step:
                    self.lost.add((self._step, client))
                self._reply(client, NoReply("did not answer in time"))


def _is_letter(blob: bytes, step: int) -> bool:
    try:
        return Reply.from_bytes(blob).step == step
    except UserError:
        return False
