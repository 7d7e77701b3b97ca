"""HTTP connections of an open port: who sends or reads nothing is let go, so that nobody is locked out by waiting."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""Longest wait for the first request of a connection, in seconds."""

MOST = 256
"""Connections of a server; for one more the one that has waited longest is let go."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with a limit on the time that a connection may wait, and on the number of those that do."""

    _timer: asyncio.TimerHandle | None = None
    _seen: tuple[Any, int] = (None, 0)
    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for the connection where there is none, and begins to wait for its request."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > MOST:
            waiting = [one for one in self.connections if isinstance(one, PatientProtocol) and one.waits]
            others = [one for one in waiting if one is not self]
            if others:
                min(others, key=lambda one: one.since).let_go()
        self._timer = self.loop.call_later(HEAD_S, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops to wait."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def waits(self) -> bool:
        """Whether no request is being answered, or an answer waits until the client reads it."""
        return self._unread > 0 or self.cycle is None or self.cycle.response_complete

    @property
    def _unread(self) -> int:
        """Bytes of answers that the client has not read, and that the system does not hold for it either."""
        return self.transport.get_write_buffer_size()

    def let_go(self) -> None:
        """Closes the connection; what the client does not read is lost, or it would stay open for that."""
        if self._unread:
            self.transport.abort()
        else:
            self.transport.close()

    def _check_idle(self) -> None:
        """Lets the connection go where since the last look no new request came and nothing was read."""
        now = self.cycle, self._unread
        if self.waits and now == self._seen:
            self.let_go()
            return
        self._seen = now
        self._timer = self.loop.call_later(max(HEAD_S, self.timeout_keep_alive), self._check_idle)
