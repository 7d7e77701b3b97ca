"""The coordinator's open port: it lets Flower's Fleet API through, and nothing else.

A SuperLink serves sites and operators on one port, and its Control API knows no passwords: whoever reaches it can
register keys and start programs on every site. So the SuperLink listens on this machine alone, and sites come through
here.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

_PREFIX = "/v1/fleet/"
_LARGEST = 8 << 20  # bytes of a request; Flower sends messages in chunks of five
_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "upgrade", "te", "trailer"}


def fleet_only(upstream: str, authority: Path) -> Starlette:
    """Builds the proxy.

    Args:
        upstream: Host and port of the SuperLink.
        authority: Certificate of the authority that vouches for it.
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
        try:
            found = await client.request(request.method, path, content=bytes(body), headers=headers)
        except httpx.TransportError:
            return PlainTextResponse("the SuperLink does not answer\n", status_code=503)
        kept = {
            name: value for name, value in found.headers.items() if name not in _HOP | {"content-encoding"}
        }
        return Response(found.content, found.status_code, kept)

    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], lifespan=lifespan)


def server(upstream: str, folder: Path, host: str, port: int) -> uvicorn.Server:
    """Builds a server of the proxy over TLS; call ``run`` of it in a thread.

    Args:
        upstream: Host and port of the SuperLink.
        folder: Folder with ``ca.crt``, ``server.pem`` and ``server.key``.
        host: Address to listen on.
        port: Port to listen on.
    """
    config = uvicorn.Config(
        fleet_only(upstream, folder / "ca.crt"),
        host=host,
        port=port,
        ssl_certfile=str(folder / "server.pem"),
        ssl_keyfile=str(folder / "server.key"),
        log_level="warning",
        access_log=False,
    )
    return uvicorn.Server(config)
