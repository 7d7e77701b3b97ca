"""The open port lets Flower's Fleet API through, and nothing else."""

import asyncio

import pytest

pytest.importorskip("flwr")

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lit_fedad.flower import proxy
from lit_fedad.flower.keys import write_certificates


@pytest.fixture
def send(tmp_path, monkeypatch):
    """Sends a request to the proxy, behind which stands a server that tells what it was asked."""
    write_certificates(tmp_path, "localhost")

    async def echo(request: Request) -> Response:
        body = await request.body()
        return Response(body, headers={"x-path": request.url.path, "x-key": request.headers.get("key", "")})

    inner = Starlette(routes=[Route("/{path:path}", echo, methods=["POST", "GET"])])
    client = httpx.AsyncClient

    def without_network(verify, **given):
        return client(**given, transport=httpx.ASGITransport(inner))

    monkeypatch.setattr(proxy.httpx, "AsyncClient", without_network)
    app = proxy.fleet_only("127.0.0.1:1", tmp_path / "ca.crt")

    async def ask(path, content, headers):
        url = httpx.URL("http://here", raw_path=path.encode())
        async with app.router.lifespan_context(app), client(transport=httpx.ASGITransport(app)) as sender:
            return await sender.send(sender.build_request("POST", url, content=content, headers=headers))

    return lambda path, content=b"", headers=None: asyncio.run(ask(path, content, headers))


def test_sites_come_in_with_their_headers_and_bytes(send):
    found = send("/v1/fleet/pull-messages", b"\x00\xff", {"key": "abc"})
    assert (found.status_code, found.content) == (200, b"\x00\xff")
    assert (found.headers["x-path"], found.headers["x-key"]) == ("/v1/fleet/pull-messages", "abc")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/", "/v1/fleet", "/docs",
        "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run", "//v1/fleet/x", "/V1/FLEET/x",
        "/v1/fleet/../control/start-run",
    ],
)  # fmt: skip
def test_nobody_else_does(send, path):
    found = send(path)
    assert found.status_code == 403
    assert "x-path" not in found.headers


def test_a_request_that_would_fill_the_memory_is_refused(send, monkeypatch):
    monkeypatch.setattr(proxy, "_LARGEST", 10)
    assert send("/v1/fleet/push-object", b"x" * 11).status_code == 413
