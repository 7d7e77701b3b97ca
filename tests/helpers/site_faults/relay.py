"""A line to an open port, which a test can cut."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time


class Relay:
    """A line to the open port, which can be cut."""

    def __init__(self, port: int) -> None:
        self.target, self.down_until = port, 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = set[socket.socket]()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Cuts all connections, and lets none through for a while."""
        self.down_until = time.monotonic() + seconds
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            if time.monotonic() < self.down_until:
                return
            with socket.create_connection(("127.0.0.1", self.target), timeout=10) as far:
                far.settimeout(None)
                self._open |= {near, far}
                try:
                    self._pump(near, far)
                finally:
                    self._open -= {near, far}

    @staticmethod
    def _pump(near: socket.socket, far: socket.socket) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(near, selectors.EVENT_READ, far)
            ready.register(far, selectors.EVENT_READ, near)
            while True:
                for key, _ in ready.select():
                    if not (part := key.fileobj.recv(1 << 16)):
                        return
                    key.data.sendall(part)
