"""The coordinator's open port: it lets Flower's Fleet API through, and nothing else.

A SuperLink serves sites and operators on one port, and its Control API knows no passwords: whoever reaches it can
register keys and start programs on every site. So the SuperLink listens on this machine alone, and sites come through
here.
"""

from __future__ import annotations

import asyncio
import datetime
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lit_fedad.deployment.connections import PatientProtocol
from lit_fedad.flower.keys import CLOCK, Authenticator
from lit_fedad.flower.signals import Signals

_PREFIX = "/v1/fleet/"
_POLL = f"{_PREFIX}pull-messages"
_ACTIVATE, _DEACTIVATE = f"{_PREFIX}activate-node", f"{_PREFIX}deactivate-node"
_LARGEST = 8 << 20  # bytes of a request; Flower sends messages in chunks of five
_SENDS = f"{_PREFIX}push-object"
_SHORT = 64 << 10  # bytes of any other, such as of one that lists a reply's parts: each takes a millisecond
_BODY_S = 60.0  # longest time that a request may take to arrive
_AT_ONCE = 32  # requests of one site at one time
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "te", "trailer"}
_UNREAD = {"content-encoding", "date", "server"}  # of answers: the first is undone, nobody reads the others

_BESIDE = 64 << 20
"""Bytes, with headers, that a site may send beside twice the longest reply, from one request of the run to the next or
in an hour: they lie on this machine's disk, some until the run is over. What is free has as many of its own."""
_EACH = 4 << 10  # bytes that a request may cost there beside its body
_FREE = (_POLL, f"{_PREFIX}send-node-heartbeat")  # which leave nothing there, unless they fail

_KEPT_S = 75
"""How long a connection is kept that nothing goes over, in seconds: longer than a site keeps it."""


class FleetProxy:
    """The proxy.

    Args:
        folder: The coordinator's folder, with the keys of its sites and the certificate that vouches for the SuperLink.
        link: Port of the SuperLink.
        over: Whether the proxy is about to end.

    Attributes:
        authenticator: Tells sites from others.
        signals: Tells of requests; until then the answer to a site for which there is none is held. Is told of sites
            that their operators end.
        app: The proxy as an app for a server.
    """

    def __init__(self, folder: Path, link: int, over: Callable[[], bool]) -> None:
        self.folder, self.link, self.over = folder, link, over
        self.authenticator, self.signals = Authenticator(folder / "keys"), Signals(folder)
        self.busy: Counter[bytes] = Counter()
        self.spent: Counter[tuple[bytes, bool]] = Counter()  # by key, and whether by what is free
        self.hour = 0.0
        self.client: httpx.AsyncClient
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
        self.app = Starlette(
            routes=[Route("/{path:path}", self._forward, methods=methods)], lifespan=self._lifespan
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        base = f"https://127.0.0.1:{self.link}"
        async with httpx.AsyncClient(verify=context, timeout=60, base_url=base) as self.client:
            yield

    async def _forward(self, request: Request) -> Response:
        """Lets requests of sites through, so many of each at a time."""
        key, in_time = self.authenticator.check(request.headers)
        if not key:
            return _stranger()
        if not in_time:
            clock = datetime.datetime.now(datetime.UTC).isoformat()
            return PlainTextResponse("another time\n", 401, {CLOCK: clock})
        if self.busy[key] >= _AT_ONCE:
            return PlainTextResponse("too many at once\n", status_code=429)
        self.busy[key] += 1
        try:
            answer = await self._of_site(request, key)
        except (ClientDisconnect, TimeoutError):
            return PlainTextResponse("the request did not arrive\n", status_code=408)
        finally:
            self.busy[key] -= 1
        # Its key may have been taken away since it asked.
        return answer if key in self.authenticator.known() else _stranger()

    async def _of_site(self, request: Request, key: bytes) -> Response:
        path = request.url.path
        if not path.startswith(_PREFIX) or ".." in path or "%" in request.scope["raw_path"].decode():
            return _stranger()
        if (body := await _body(request, _LARGEST if path == _SENDS else _SHORT)) is None:
            return PlainTextResponse("too large\n", status_code=413)
        told = sum(len(name) + len(value) for name, value in request.headers.raw)  # Flower's log repeats some
        account, cost = (key, path in _FREE), told + len(body) + _EACH
        if self._spent(account, cost) > 2 * self.signals.longest + _BESIDE:
            return PlainTextResponse("more than any reply\n", status_code=429)
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _HOP]
        seen = self.signals.count
        try:
            found = await self.client.request(request.method, path, content=body, headers=headers)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        if path in _FREE and found.is_success:
            self.spent[account] -= cost
        if path == _POLL and found.is_success and found.content:
            self.spent[key, False] = 0
        elif path == _POLL and found.is_success:
            await self.signals.wait(seen, self.over)
        elif path == _ACTIVATE and found.is_success:
            self.signals.sign_on(key)
        elif path == _DEACTIVATE and found.is_success:
            self.signals.sign_off(key)
        kept = {name: value for name, value in found.headers.items() if name not in _HOP | _UNREAD}
        return Response(found.content, found.status_code, kept)

    def _spent(self, account: tuple[bytes, bool], cost: int) -> int:
        """Adds to what a site has sent since the run's last request to it, or in this hour; returns the sum."""
        if (hour := time.monotonic() // 3600) != self.hour:
            self.hour, self.spent = hour, Counter()
        self.spent[account] += cost
        return self.spent[account]


def _stranger() -> Response:
    return PlainTextResponse("only sites may come in here\n", status_code=403)


async def _body(request: Request, most: int) -> bytes | None:
    """Reads a request's body; None where it has more bytes than `most`.

    Raises:
        TimeoutError: If it does not arrive in time.
    """
    body = bytearray()
    async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
            body += part
            if len(body) > most:
                return None
    return bytes(body)


def server(folder: Path, link: int, port: int) -> uvicorn.Server:
    """Builds a server of the proxy over TLS, on all addresses of this machine; call its ``run`` in a thread."""

    def over() -> bool:
        return proxy.should_exit

    config = uvicorn.Config(
        FleetProxy(folder, link, over).app,
        http=PatientProtocol,
        host="0.0.0.0",  # noqa: S104
        port=port,
        ssl_certfile=str(folder / "server.pem"),
        ssl_keyfile=str(folder / "server.key"),
        ws="none",
        log_level="error",  # not a line for each stranger
        access_log=False,
        timeout_keep_alive=_KEPT_S,
        server_header=False,
        date_header=False,
    )
    proxy = uvicorn.Server(config)
    return proxy
