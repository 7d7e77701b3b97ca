"""HTTP connections of an open port: who sends nothing is let go, so that nobody locks others out by waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""Longest wait for the first request of a connection, in seconds."""

MOST = 256
"""Connections of a server; for one more the one that has waited longest without a request is closed."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a limit on the time that a connection may wait, and on the number of those that do."""

    _timer: asyncio.TimerHandle | None = None
    _seen: Any = None
    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for the connection where there is none, and begins to wait for its request."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > MOST:
            waiting = [one for one in self.connections if isinstance(one, PatientProtocol) and one.waits]
            others = [one for one in waiting if one is not self]
            if others:
                min(others, key=lambda one: one.since).transport.close()
        self._timer = self.loop.call_later(HEAD_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops to wait."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """Closes the connection where no new request came since the last look."""
        if self.transport.is_closing():
            return
        if self.waits and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._timer = self.loop.call_later(max(HEAD_S, self.timeout_keep_alive), self._look)
