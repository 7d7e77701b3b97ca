"""Connections that send nothing, or read nothing, lock nobody out."""

import asyncio
import socket
import threading
import time
from types import SimpleNamespace

import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

from lit_fedad.deployment import connections  # noqa: E402

LONG = 32 << 20  # more than a system holds for who does not read


async def hello(scope, receive, send):
    while scope["path"] == "/whole" and (await receive()).get("more_body"):
        pass
    body = bytes(LONG) if scope["path"] == "/long" else b"ok"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(hello, http=connections.PatientProtocol, lifespan="off", log_level="error")
    config.timeout_keep_alive = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    server.address = listener.getsockname()
    yield server
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def address(server):
    return server.address


def closed(connection):
    connection.settimeout(10)
    return connection.recv(1) == b""


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_who_sends_no_request_is_let_go(address, said):
    with socket.create_connection(address) as connection:
        connection.sendall(said)
        assert closed(connection)


def test_who_does_not_read_the_answer_is_let_go(server, address):
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /long HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(1) == b"H"  # and no more
        end = time.monotonic() + 20
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.05)
        assert not server.server_state.connections


def test_many_that_wait_lock_nobody_out(server, address, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 3600.0)
    end = time.monotonic() + 10
    waiting = [socket.create_connection(address)]
    while not server.server_state.connections and time.monotonic() < end:
        time.sleep(0.01)
    # The clock of uvloop ticks by a millisecond: those that come at one tick have waited equally long.
    time.sleep(0.01)
    waiting += [socket.create_connection(address) for _ in range(29)]
    while time.monotonic() < end:
        if httpx.get(f"http://127.0.0.1:{address[1]}").text == "ok":
            break
    assert closed(waiting[0])
    for connection in waiting:
        connection.close()


def test_who_has_sent_half_a_request_does_not_delay_the_end(server, address):
    with socket.create_connection(address) as connection:
        connection.sendall(b"POST /whole HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nab")
        end = time.monotonic() + 10
        while not server.server_state.tasks and time.monotonic() < end:
            time.sleep(0.01)
        server.should_exit = True
        assert closed(connection)


def test_who_waits_when_the_server_ends_is_told_so():
    pytest.importorskip("fastapi")
    from lit_fedad.deployment.serving import Desk
    from lit_fedad.deployment.uploads import Limits, RefusedError

    desk = Desk(None, Limits(), workers=1, queue=1)

    async def body():
        yield b"an image"

    async def cancelled():
        await desk._workers.acquire_on_behalf_of("another image")
        request = SimpleNamespace(headers={}, stream=body)
        waiting = asyncio.create_task(desk.score(request, draw=False))
        while not desk._workers.statistics().tasks_waiting:
            await asyncio.sleep(0)
        waiting.cancel()
        return await waiting

    with pytest.raises(RefusedError, match="the server ends; send the image again") as caught:
        asyncio.run(cancelled())
    assert caught.value.status == 503
