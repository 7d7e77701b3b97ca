"""Connections that send nothing lock nobody out."""

import socket
import threading
import time

import pytest

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

from lit_fedad.deployment import connections  # noqa: E402


async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr(connections, "MOST", 8)
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(hello, http=connections.PatientProtocol, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join(10)


def closed(connection):
    connection.settimeout(10)
    return connection.recv(1) == b""


@pytest.mark.parametrize("said", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_who_sends_no_request_is_let_go(address, said):
    with socket.create_connection(address) as connection:
        connection.sendall(said)
        assert closed(connection)


def test_many_that_wait_lock_nobody_out(address, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_S", 3600.0)
    waiting = [socket.create_connection(address) for _ in range(30)]
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if httpx.get(f"http://127.0.0.1:{address[1]}").text == "ok":
            break
    assert closed(waiting[0])
    for connection in waiting:
        connection.close()
