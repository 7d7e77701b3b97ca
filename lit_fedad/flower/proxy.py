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
from lit_fedad.flower.authentication import CLOCK, Authenticator

HELD_S = 20.0
"""Longest time that an answer is held; Flower's client waits 30 seconds for one."""

_LOOK_S = 0.1


class RequestSignal:
    """Tells the process of the open port that the process of the run has sent requests.

    Args:
        path: A file that both can reach; it grows with each request.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def send(self) -> None:
        """Tells that there are requests."""
        with self.path.open("ab") as file:
            file.write(b".")

    @property
    def count(self) -> int:
        """How often requests were sent so far."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    async def wait(self, seen: int, over: Callable[[], bool]) -> None:
        """Waits until requests are sent, `HELD_S` at most.

        Args:
            seen: The `count` that is known: where there is more already, nothing is waited for.
            over: Whether to wait no longer.
        """
        end = time.monotonic() + HELD_S
        while self.count == seen and time.monotonic() < end and not over():
            await asyncio.sleep(_LOOK_S)


_PREFIX = "/v1/fleet/"
_POLL = f"{_PREFIX}pull-messages"
_LARGEST = 8 << 20  # bytes of a request; Flower sends messages in chunks of five
_BODY_S = 60.0  # longest time that a request may take to arrive
_AT_ONCE = 32  # requests of one site at one time
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "te", "trailer"}
_UNREAD = {"content-encoding", "date", "server"}  # of answers: the first is undone, nobody reads the others

_KEPT_S = 75
"""How long a connection is kept that nothing goes over, in seconds: longer than a site keeps it."""


def fleet_only(
    upstream: str,
    authority: Path,
    authenticator: Authenticator,
    signal: RequestSignal,
    over: Callable[[], bool],
) -> Starlette:
    """Builds the proxy.

    Args:
        upstream: Host and port of the SuperLink.
        authority: Certificate of the authority that vouches for it.
        authenticator: Tells sites from others.
        signal: Tells of requests; until then the answer to a site for which there is none is held.
        over: Whether the proxy is about to end.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        context = ssl.create_default_context(cafile=str(authority))
        async with httpx.AsyncClient(verify=context, timeout=60, base_url=f"https://{upstream}") as client:
            app.state.client = client
            yield

    busy: Counter[bytes] = Counter()

    async def forward(request: Request) -> Response:
        key, in_time = authenticator.check(request.headers)
        if not key:
            return PlainTextResponse("only sites may come in here\n", status_code=403)
        if not in_time:
            return PlainTextResponse(
                "another time\n", 401, {CLOCK: datetime.datetime.now(datetime.UTC).isoformat()}
            )
        if busy[key] >= _AT_ONCE:
            return PlainTextResponse("too many at once\n", status_code=429)
        busy[key] += 1
        try:
            return await of_site(request)
        except (ClientDisconnect, TimeoutError):
            return PlainTextResponse("the request did not arrive\n", status_code=408)
        finally:
            busy[key] -= 1

    async def of_site(request: Request) -> Response:
        path = request.url.path
        if not path.startswith(_PREFIX) or ".." in path or "%" in request.scope["raw_path"].decode():
            return PlainTextResponse("only sites may come in here\n", status_code=403)
        if (body := await _body(request)) is None:
            return PlainTextResponse("too large\n", status_code=413)
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        client: httpx.AsyncClient = request.app.state.client
        seen = signal.count
        try:
            found = await client.request(request.method, path, content=body, headers=headers)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        if path == _POLL and found.is_success and not found.content:
            await signal.wait(seen, over)
        kept = {name: value for name, value in found.headers.items() if name not in _HOP | _UNREAD}
        return Response(found.content, found.status_code, kept)

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=lifespan)


async def _body(request: Request) -> bytes | None:
    """Reads a request's body; None where it is too large.

    Raises:
        TimeoutError: If it does not arrive in time.
    """
    body = bytearray()
    async with asyncio.timeout(_BODY_S):
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST:
                return None
    return bytes(body)


def server(upstream: str, folder: Path, host: str, port: int, signal: RequestSignal) -> uvicorn.Server:
    """Builds a server of the proxy over TLS; call ``run`` of it in a thread.

    Args:
        upstream: Host and port of the SuperLink.
        folder: Folder with ``ca.crt``, ``server.pem`` and ``server.key``, and the sites' ``keys``.
        host: Address to listen on.
        port: Port to listen on.
        signal: Tells of requests.
    """

    def over() -> bool:
        return proxy.should_exit

    config = uvicorn.Config(
        fleet_only(upstream, folder / "ca.crt", Authenticator(folder / "keys"), signal, over),
        http=PatientProtocol,
        host=host,
        port=port,
        ssl_certfile=str(folder / "server.pem"),
        ssl_keyfile=str(folder / "server.key"),
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_KEPT_S,
        server_header=False,
        date_header=False,
    )
    proxy = uvicorn.Server(config)
    return proxy
