"""The open port lets Flower's Fleet API through, and nothing else."""

import asyncio
import base64
import datetime
import time

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lit_fedad.flower import proxy, signals
from lit_fedad.flower.keys import CLOCK, read_private_key, write_certificates, write_site_key

POLL = "/v1/fleet/pull-messages"


class Port:
    """The open port of a folder, in front of a server whose answers tell what it was asked."""

    def __init__(self, folder):
        write_certificates(folder, "localhost")
        (folder / "keys").mkdir()
        write_site_key(folder)
        (folder / "key.pub").rename(folder / "keys" / "north.pub")
        self.key, self.ending, self.asked = read_private_key(folder / "key"), False, asyncio.Event()
        self.meanwhile = lambda: None
        found = proxy.FleetProxy(folder, 1, lambda: self.ending)
        self.app, self.authenticator, self.signals = found.app, found.authenticator, found.signals

    async def answer(self, request: Request) -> Response:
        """Answers with the request's body, path and key header, and with the status that the request names."""
        self.meanwhile()
        self.asked.set()
        told = {"x-path": request.url.path, "x-key": request.headers.get("key", "")}
        return Response(await request.body(), int(request.headers.get("status", 200)), told)

    def signed(self, seconds=0.0):
        """Returns the headers that a site with the key signs, with a clock that is so many seconds fast."""
        stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()
        public = base64.b64encode(public_key_to_bytes(self.key.public_key())).decode()
        signature = base64.b64encode(sign_message(self.key, stamp.encode())).decode()
        return {
            FLEET_HTTP_PUBLIC_KEY_HEADER: public,
            FLEET_HTTP_SIGNATURE_HEADER: signature,
            TIMESTAMP_HEADER: stamp,
        }

    async def send(self, path, content=b"", headers=None, signed=True):
        headers = {**(self.signed() if signed else {}), **(headers or {})}
        url = httpx.URL("http://here", raw_path=path.encode())
        transport = httpx.ASGITransport(self.app)
        async with self.app.router.lifespan_context(self.app), self.client(transport=transport) as sender:
            return await sender.send(sender.build_request("POST", url, content=content, headers=headers))


@pytest.fixture
def port(tmp_path, monkeypatch):
    """The open port, without a network."""
    found, Port.client = Port(tmp_path), httpx.AsyncClient
    inner = Starlette(routes=[Route("/{path:path}", found.answer, methods=["POST", "GET"])])

    def without_network(verify, **given):
        return Port.client(**given, transport=httpx.ASGITransport(inner))

    monkeypatch.setattr(proxy.httpx, "AsyncClient", without_network)
    monkeypatch.setattr(signals, "HELD_S", 3600.0)
    monkeypatch.setattr(signals, "_LOOK_S", 0.001)
    return found


@pytest.fixture
def send(port):
    return lambda *given: asyncio.run(asyncio.wait_for(port.send(*given), 30))


def test_sites_come_in_with_their_headers_and_bytes(send):
    found = send("/v1/fleet/pull-messages", b"\x00\xff", {"key": "abc"})
    assert (found.status_code, found.content) == (200, b"\x00\xff")
    assert (found.headers["x-path"], found.headers["x-key"]) == ("/v1/fleet/pull-messages", "abc")


def test_headers_of_any_bytes_are_passed_on(send):
    found = send("/v1/fleet/x", b"y", {"key": b"\xff\xfe"})
    assert found.headers["x-key"].encode("latin-1") == b"\xff\xfe"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/", "/v1/fleet", "/docs",
        "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/..%2fcontrol/start-run", "//v1/fleet/x", "/V1/FLEET/x",
        "/v1/fleet/../control/start-run", "/v1/fleet/%252e%252e/control/start-run",
    ],
)  # fmt: skip
def test_no_other_path_is_forwarded(send, path):
    found = send(path)
    assert found.status_code == 403
    assert "x-path" not in found.headers


@pytest.mark.parametrize(
    ("path", "bound"),
    [
        ("/v1/fleet/push-object", "_LARGEST_PUSH"),
        ("/v1/fleet/push-messages", "_LARGEST_OTHER"),
        (POLL, "_LARGEST_OTHER"),
    ],
)
def test_a_request_that_would_fill_the_memory_is_refused(send, monkeypatch, path, bound):
    monkeypatch.setattr(proxy, bound, 10)
    assert send(path, b"x" * 11).status_code == 413


def test_a_site_sends_no_more_than_replies_need(port, send, monkeypatch):
    """The coordinator's disk holds what a site sends."""
    monkeypatch.setattr(proxy, "_ALLOWANCE", 10_000)
    port.signals.send(1 << 30)
    port.signals.send(15_000)  # the last replies are shorter
    push, given = ("/v1/fleet/push-object", bytes(20_000)), (POLL, b"a request")
    found = [send(*one).status_code for one in (push, given, push, push, given, push)]
    assert found == [200, 200, 200, 429, 200, 200]


@pytest.mark.parametrize("path", [POLL, "/v1/fleet/push-messages"])
def test_a_request_that_fails_costs_its_headers_too(send, monkeypatch, path):
    """The SuperLink writes some of the headers to its log."""
    monkeypatch.setattr(proxy, "_ALLOWANCE", 20_000)
    assert [send(path, b"", {"status": "415", "key": "x" * 10_000}).status_code for _ in range(3)] == [
        415,
        429,
        429,
    ]


async def unread():
    pytest.fail("a stranger's body was read")
    yield b""


@pytest.mark.parametrize("change", ["none", "key", "signature", "revoked", "garbage"])
def test_the_body_of_a_request_by_a_stranger_is_not_read(port, send, change):
    headers = port.signed()
    if change == "revoked":
        (port.authenticator.folder / "north.pub").unlink()
    elif change == "key":
        port.key = read_private_key(write_other(port.authenticator.folder.parent / "other"))
        headers = port.signed()
    elif change == "signature":
        headers[TIMESTAMP_HEADER] = port.signed(1)[TIMESTAMP_HEADER]
    elif change == "garbage":
        headers = dict.fromkeys(headers, "x" * 10_000)
    found = send(POLL, unread(), headers if change != "none" else {}, False)
    assert (found.status_code, "x-path" in found.headers) == (403, False)


def write_other(folder):
    folder.mkdir()
    write_site_key(folder)
    return folder / "key"


@pytest.mark.parametrize("seconds", [30, -400])
def test_a_site_with_another_clock_is_told_so(port, send, seconds):
    found = send(POLL, unread(), port.signed(seconds), False)
    assert (found.status_code, CLOCK in found.headers) == (401, True)


def test_a_site_has_few_requests_at_once_and_little_time_for_each(port, send, monkeypatch):
    async def late():
        await asyncio.sleep(10)
        yield b""

    monkeypatch.setattr(proxy, "_BODY_S", 0.05)
    assert send(POLL, late()).status_code == 408
    monkeypatch.setattr(proxy, "_MAX_OPEN", 0)
    assert send(POLL).status_code == 429


@pytest.mark.parametrize("end", ["requests", "closing", "time"])
def test_an_empty_answer_is_held_until_there_are_requests(port, monkeypatch, end):
    async def play():
        poll = asyncio.create_task(port.send(POLL))
        await port.asked.wait()
        await asyncio.sleep(0.02)
        assert not poll.done()
        if end == "requests":
            port.signals.send(0)
        elif end == "closing":
            port.ending = True
        found = await poll
        assert (found.status_code, found.content) == (200, b"")

    if end == "time":
        monkeypatch.setattr(signals, "HELD_S", 0.2)
    asyncio.run(play())


def test_requests_that_are_given_while_a_site_asks_are_not_waited_for(port, send):
    """They may have arrived after the SuperLink looked for requests."""
    port.meanwhile = lambda: port.signals.send(0)
    assert send(POLL).content == b""


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [(POLL, b"a request", 200), (POLL, b"", 401), ("/v1/fleet/confirm-message-received", b"", 200)],
)
def test_other_answers_are_not_held(send, path, content, status):
    """An answer with a request above all: it would be lost with a site that went away without signing off."""
    found = send(path, content, {"status": str(status)})
    assert (found.status_code, found.content) == (status, content)


def test_the_run_knows_that_a_site_has_signed_off_until_it_is_back(port, send, monkeypatch):
    (key,) = port.authenticator.known()
    monkeypatch.setattr(signals, "GRACE_S", -1.0)
    send("/v1/fleet/deactivate-node", b"", {"status": "500"})
    assert not port.signals.gone(key)
    send("/v1/fleet/deactivate-node")
    assert port.signals.gone(key)
    monkeypatch.setattr(signals, "GRACE_S", 3600.0)
    assert not port.signals.gone(key)  # it may be started again
    monkeypatch.setattr(signals, "GRACE_S", -1.0)
    send("/v1/fleet/activate-node")
    assert not port.signals.gone(key)
    send("/v1/fleet/deactivate-node")
    port.signals.clear()
    assert not port.signals.gone(key)


@pytest.mark.parametrize("jump", [-1e7, 1e7])
def test_a_clock_that_is_set_does_not_change_how_long_a_site_is_waited_for(port, send, monkeypatch, jump):
    (key,) = port.authenticator.known()
    send("/v1/fleet/deactivate-node")
    now = time.time()
    monkeypatch.setattr(signals.time, "time", lambda: now + jump)
    assert not port.signals.gone(key)
    monkeypatch.setattr(signals, "GRACE_S", -1.0)
    assert port.signals.gone(key)


def test_a_site_whose_key_is_removed_meanwhile_gets_no_answer(port, send):
    port.meanwhile = (port.authenticator.folder / "north.pub").unlink
    found = send(POLL, b"a request")
    assert (found.status_code, b"a request" in found.content) == (403, False)
