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
_LARGEST_PUSH = 8 << 20  # bytes of the body of a push; Flower sends a message in chunks of 5 MB
_PUSH = f"{_PREFIX}push-object"
_LARGEST_OTHER = 64 << 10  # of other bodies: a list of a reply's parts costs a millisecond for each part
_BODY_S = 60.0  # longest time that a request's body may take to arrive
_MAX_OPEN = 32  # requests of one site that are answered at the same time
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "te", "trailer"}
_UNREAD = {"content-encoding", "date", "server"}  # of answers: httpx decodes them; nobody reads the others

_ALLOWANCE = 64 << 20
"""Bytes that a site may send, headers included, in addition to twice the longest reply, until it gets the run's next
request or the hour ends. The SuperLink keeps them on this machine's disk, some until the run is over. Polls and
heartbeats that fail have a second allowance of the same size."""
_PER_REQUEST = 4 << 10  # bytes that a request may take on that disk in addition to its headers and body
_UNMETERED = (_POLL, f"{_PREFIX}send-node-heartbeat")  # the SuperLink stores them only if they fail

_KEPT_S = 75
"""How long an idle connection is kept open, in seconds: longer than a site keeps it."""


class FleetProxy:
    """A reverse proxy in front of the SuperLink, which forwards requests of registered sites to its Fleet API.

    Args:
        folder: The coordinator's folder, with the keys of its sites and the certificate that vouches for the SuperLink.
        superlink_port: Port of the SuperLink.
        stopping: Returns whether the proxy is shutting down.

    Attributes:
        authenticator: Checks that a request comes from a registered site.
        signals: Tells when the run has sent requests: a poll that finds no request is held back until then. Takes note
            when a site signs on or off.
        app: The proxy as an app for a server.
    """

    def __init__(self, folder: Path, superlink_port: int, stopping: Callable[[], bool]) -> None:
        self.folder, self.superlink_port, self.stopping = folder, superlink_port, stopping
        self.authenticator, self.signals = Authenticator(folder / "keys"), Signals(folder)
        self.open_requests: Counter[bytes] = Counter()  # by key
        self.sent_bytes: Counter[tuple[bytes, bool]] = Counter()  # by key and whether by polls and heartbeats
        self.hour = 0.0  # number of the hour in which they were sent
        self.client: httpx.AsyncClient
        methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
        self.app = Starlette(
            routes=[Route("/{path:path}", self._forward, methods=methods)], lifespan=self._lifespan
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        context = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        base = f"https://127.0.0.1:{self.superlink_port}"
        async with httpx.AsyncClient(verify=context, timeout=60, base_url=base) as self.client:
            yield

    async def _forward(self, request: Request) -> Response:
        """Answers a request: only those of registered sites pass, and of each site `_MAX_OPEN` at a time."""
        key, in_time = self.authenticator.check(request.headers)
        if not key:
            return _forbidden()
        if not in_time:
            clock = datetime.datetime.now(datetime.UTC).isoformat()
            return PlainTextResponse("another time\n", 401, {CLOCK: clock})
        if self.open_requests[key] >= _MAX_OPEN:
            return PlainTextResponse("too many at once\n", status_code=429)
        self.open_requests[key] += 1
        try:
            response = await self._forward_of_site(request, key)
        except (ClientDisconnect, TimeoutError):
            return PlainTextResponse("the request did not arrive\n", status_code=408)
        finally:
            self.open_requests[key] -= 1
        # The operator may have removed the site's key while the request was open.
        return response if key in self.authenticator.known() else _forbidden()

    async def _forward_of_site(self, request: Request, key: bytes) -> Response:
        """Forwards a registered site's request to the SuperLink, if it is for the Fleet API and not too long."""
        path = request.url.path
        if not path.startswith(_PREFIX) or ".." in path or "%" in request.scope["raw_path"].decode():
            return _forbidden()
        if (body := await _body(request, _LARGEST_PUSH if path == _PUSH else _LARGEST_OTHER)) is None:
            return PlainTextResponse("too large\n", status_code=413)
        header_bytes = sum(len(name) + len(value) for name, value in request.headers.raw)  # Flower logs some
        account, cost = (key, path in _UNMETERED), header_bytes + len(body) + _PER_REQUEST
        if self._charge(account, cost) > 2 * self.signals.longest + _ALLOWANCE:
            return PlainTextResponse("more than any reply\n", status_code=429)
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _HOP]
        seen_count = self.signals.count
        try:
            answer = await self.client.request(request.method, path, content=body, headers=headers)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        if path in _UNMETERED and answer.is_success:
            self.sent_bytes[account] -= cost
        if path == _POLL and answer.is_success and answer.content:  # the site gets the run's next request
            self.sent_bytes[key, False] = 0
        elif path == _POLL and answer.is_success:
            await self.signals.wait(seen_count, self.stopping)
        elif path == _ACTIVATE and answer.is_success:
            self.signals.sign_on(key)
        elif path == _DEACTIVATE and answer.is_success:
            self.signals.sign_off(key)
        kept = {name: value for name, value in answer.headers.items() if name not in _HOP | _UNREAD}
        return Response(answer.content, answer.status_code, kept)

    def _charge(self, account: tuple[bytes, bool], cost: int) -> int:
        """Adds a request's bytes to those that its site has sent under an account (`_ALLOWANCE`); returns the sum."""
        if (hour := time.monotonic() // 3600) != self.hour:
            self.hour, self.sent_bytes = hour, Counter()
        self.sent_bytes[account] += cost
        return self.sent_bytes[account]


def _forbidden() -> Response:
    return PlainTextResponse("only sites may come in here\n", status_code=403)


async def _body(request: Request, max_bytes: int) -> bytes | None:
    """Reads a request's body; returns None if it has more than `max_bytes`.

    Raises:
        TimeoutError: If it does not arrive within `_BODY_S`.
    """
    body = bytearray()
    async with asyncio.timeout(_BODY_S):
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                return None
    return bytes(body)


def server(folder: Path, superlink_port: int, port: int) -> uvicorn.Server:
    """Builds a server of the proxy over TLS, on all addresses of this machine; call its ``run`` in a thread."""

    def stopping() -> bool:
        return proxy.should_exit

    config = uvicorn.Config(
        FleetProxy(folder, superlink_port, stopping).app,
        http=PatientProtocol,
        host="0.0.0.0",  # noqa: S104
        port=port,
        ssl_certfile=str(folder / "server.pem"),
        ssl_keyfile=str(folder / "server.key"),
        ws="none",
        log_level="error",  # a stranger's request must not add a line to the log
        access_log=False,
        timeout_keep_alive=_KEPT_S,
        server_header=False,
        date_header=False,
    )
    proxy = uvicorn.Server(config)
    return proxy
