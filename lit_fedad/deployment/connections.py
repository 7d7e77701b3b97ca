"""HTTP connections of an open port: a client that sends or reads nothing is disconnected, so that it blocks nobody."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 20.0
"""Longest wait for the first request of a connection, in seconds."""

MAX_CONNECTIONS = 256
"""Most connections of a server; for a further one, the one that has waited longest is closed."""


class PatientProtocol(H11Protocol):
    """HTTP/1.1 with limits on the time that a connection may idle, and on the number of connections."""

    _timer: asyncio.TimerHandle | None = None
    _last_state: tuple[Any, int] = (None, 0)
    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Makes room for the connection if necessary, and begins to wait for its request."""
        super().connection_made(transport)
        self.since = self.loop.time()
        if len(self.connections) > MAX_CONNECTIONS:
            others = [one for one in self.connections if isinstance(one, PatientProtocol) and one is not self]
            waiting = [other for other in others if other.waits]
            if waiting:
                min(waiting, key=lambda other: other.since).close_now()
        self._timer = self.loop.call_later(HEAD_S, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting for a request."""
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Closes the connection if its request has not arrived completely; another one gets its answer first."""
        if self.waits or self.cycle.more_body:
            self.close_now()
        else:
            super().shutdown()

    @property
    def waits(self) -> bool:
        """Whether the server waits for the client: for a request, or until the client has read an answer."""
        return self._unread > 0 or self.cycle is None or self.cycle.response_complete

    @property
    def _unread(self) -> int:
        """Bytes of answers that the client has not read, without those in the buffers of the operating system."""
        return self.transport.get_write_buffer_size()

    def close_now(self) -> None:
        """Closes the connection at once: answers that the client has not read are lost, for they would keep it open."""
        if self._unread:
            self.transport.abort()
        else:
            self.transport.close()

    def _check_idle(self) -> None:
        """Closes the connection if it waits, and since the last check no request came and nothing was read."""
        state = self.cycle, self._unread
        if self.waits and state == self._last_state:
            self.close_now()
            return
        self._last_state = state
        self._timer = self.loop.call_later(max(HEAD_S, self.timeout_keep_alive), self._check_idle)
