"""The coordinator's open port: it lets Flower's Fleet API through, and nothing else.

A SuperLink serves sites and operators on one port, and its Control API knows no passwords: whoever reaches it can
register keys and start programs on every site. So the SuperLink listens on this machine alone, and sites come through
here.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

HELD_S = 20.0
"""Longest time that an answer is held; Flower's client waits 30 seconds for one."""

_LOOK_S = 0.1


class Bell:
    """Tells the process of the open port that the process of the run has given orders.

    Args:
        path: A file that both can reach; it grows with each ring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def ring(self) -> None:
        """Tells that there are orders."""
        with self.path.open("ab") as file:
            file.write(b".")

    @property
    def rings(self) -> int:
        """How often it has rung so far."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    async def wait(self, heard: int, over: Callable[[], bool]) -> None:
        """Waits until it rings, `HELD_S` at most.

        Args:
            heard: Rings that were heard before: one more has come already, and is not waited for.
            over: Whether to wait no longer.
        """
        end = time.monotonic() + HELD_S
        while self.rings == heard and time.monotonic() < end and not over():
            await asyncio.sleep(_LOOK_S)


_PREFIX = "/v1/fleet/"
_POLL = f"{_PREFIX}pull-messages"
_LARGEST = 8 << 20  # bytes of a request; Flower sends messages in chunks of five
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "te", "trailer"}
_UNREAD = {"content-encoding", "date", "server"}  # of answers: the first is undone, nobody reads the others

_KEPT_S = 75
"""How long a connection is kept that nothing goes over, in seconds: longer than a site keeps it."""


def fleet_only(upstream: str, authority: Path, bell: Bell, over: Callable[[], bool]) -> Starlette:
    """Builds the proxy.

    Args:
        upstream: Host and port of the SuperLink.
        authority: Certificate of the authority that vouches for it.
        bell: Rings when there are orders; until then the answer to a site for which there is none is held.
        over: Whether the proxy is about to end.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        context = ssl.create_default_context(cafile=str(authority))
        async with httpx.AsyncClient(verify=context, timeout=60, base_url=f"https://{upstream}") as client:
            app.state.client = client
            yield

    async def forward(request: Request) -> Response:
        path = request.url.path
        if not path.startswith(_PREFIX) or ".." in path or "%" in request.scope["raw_path"].decode():
            return PlainTextResponse("only sites may come in here\n", status_code=403)
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _LARGEST:
                return PlainTextResponse("too large\n", status_code=413)
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOP]
        client: httpx.AsyncClient = request.app.state.client
        heard = bell.rings
        try:
            found = await client.request(request.method, path, content=bytes(body), headers=headers)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        if path == _POLL and found.is_success and not found.content:
            await bell.wait(heard, over)
        kept = {name: value for name, value in found.headers.items() if name not in _HOP | _UNREAD}
        return Response(found.content, found.status_code, kept)

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=lifespan)


def server(upstream: str, folder: Path, host: str, port: int, bell: Bell) -> uvicorn.Server:
    """Builds a server of the proxy over TLS; call ``run`` of it in a thread.

    Args:
        upstream: Host and port of the SuperLink.
        folder: Folder with ``ca.crt``, ``server.pem`` and ``server.key``.
        host: Address to listen on.
        port: Port to listen on.
        bell: Rings when there are orders.
    """

    def over() -> bool:
        return proxy.should_exit

    config = uvicorn.Config(
        fleet_only(upstream, folder / "ca.crt", bell, over),
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
