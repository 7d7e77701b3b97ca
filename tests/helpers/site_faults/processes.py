"""A coordinator and sites as processes that can be killed and stopped; messages between them go through the office."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helpers.sites import NAMES, settings
from lit_fedad.core.errors import UserError
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.site import Site


@dataclass(frozen=True)
class Event:
    """What a process said.

    Attributes:
        life: The process.
        said: What it sent; None where it is gone.
    """

    life: Life
    said: Any


class Life:
    """A process from its start to its end; what it sends is put into a queue as an `Event`.

    Args:
        play: What it does, with its end of a pipe first.
        arguments: What follows.
        events: The queue.
    """

    def __init__(self, play: Callable[..., None], arguments: tuple[Any, ...], events: queue.Queue) -> None:
        context = multiprocessing.get_context("forkserver")
        # The package is imported once, and not by each process that takes the place of one that was killed.
        context.set_forkserver_preload(["lit_fedad", "helpers.site_faults.processes"])
        self._pipe, far = context.Pipe()
        self._process = context.Process(target=play, args=(far, *arguments), daemon=True)
        self._process.start()
        far.close()
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def tell(self, what: Any) -> None:
        """Sends something; a process that is gone does not hear it."""
        with contextlib.suppress(OSError):
            self._pipe.send(what)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if the process is not gone."""
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def end(self) -> None:
        """Kills the process, and waits until it is gone."""
        self.signal(signal.SIGKILL)
        self._process.join()

    def _listen(self, events: queue.Queue) -> None:
        while True:
            try:
                said = self._pipe.recv()
            except (EOFError, OSError):
                said = None
            events.put(Event(self, said))
            if said is None:
                return


class Mail:
    """A carrier whose messages the office takes."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def carry(self, requests, most):
        """Hands over all requests, and yields the replies as they come."""
        self.pipe.send(("requests", dict(requests)))
        for _ in requests:
            yield self.pipe.recv()


def play_coordinator(pipe: Any, plan: Plan) -> None:
    """Runs a federation, or what remains of it, and says how that ended."""
    try:
        coordinate(plan, Mail(pipe), quiet=True)
        pipe.send(("complete", ""))
    except UserError as error:
        pipe.send(("ended", str(error)))


def play_site(pipe: Any, folder: Any, client: int) -> None:
    """Answers requests one after the other."""
    site = Site(settings(folder, NAMES[client]), Display(quiet=True))
    while True:
        number, request = pipe.recv()
        pipe.send((number, site.answer(request)))
