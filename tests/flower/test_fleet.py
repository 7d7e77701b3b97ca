"""A site's end: which part of a request it pulls, and how its connections are kept."""

import logging
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Message
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError, iterate_object_tree
from flwr.supercore.retry import http_retry
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode import fleet_http_connection
from google.protobuf.message import DecodeError

from lit_fedad.core.errors import UserError
from lit_fedad.flower import fleet, proxy
from lit_fedad.flower.keys import CLOCK, write_site_key
from lit_fedad.flower.messages import wrapped


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower tells the process of a ServerApp."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def a_request(payload):
    """A message to a site, the tree of its parts, and these by name."""
    request = Message(wrapped(payload), 7, "train.payload")
    with no_object_id_recompute():
        objects = {key: part.deflate() for key, part in get_all_nested_objects(request).items()}
        return request, get_object_tree(request), objects


@pytest.mark.parametrize("size", [0, 1000, (1 << 20) + 1])
def test_only_the_payloads_record_of_a_request_is_pulled(size):
    _, tree, objects = a_request(bytes(size))
    pulled = []

    def pull(name):
        pulled.append(name)
        return objects[name]

    assert fleet._payload(tree, pull, max(size, 1)) == bytes(size)
    assert len(pulled) == len(objects) - 2  # the message and its content are around it


def test_a_request_that_would_fill_the_memory_is_read_as_an_empty_one():
    _, tree, objects = a_request(bytes(40 << 20))  # of one chunk, again and again
    assert sum(map(len, objects.values())) < 20 << 20
    assert fleet._payload(tree, objects.get, 20 << 20) == b""
    assert fleet._payload(tree, objects.get, 1) == b""


@pytest.mark.parametrize("children", [[], [ObjectTree()], [ObjectTree()] * 2])
def test_a_message_without_a_payloads_record_is_refused(children):
    with pytest.raises(UserError, match="something else than a payload"):
        fleet._payload(ObjectTree(children=children), {}.get, 1)


def test_flowers_connection_is_made_with_connections_that_are_kept():
    """They are kept longer than the time between two heartbeats, and shorter than the open port keeps them."""
    assert fleet_http_connection.FleetHttpClient is fleet.BoundedClient
    assert fleet.HEARTBEAT_DEFAULT_INTERVAL < fleet._KEPT_S < proxy._KEPT_S
    with fleet.BoundedClient("https://localhost") as client:
        sent = client._client.build_request("POST", "https://localhost/v1/fleet/pull-messages").headers
        pool = client._client._transport._pool
    assert pool._keepalive_expiry == fleet._KEPT_S
    assert not {"accept-encoding", "user-agent"} & set(sent)


ANSWERS = {
    "elsewhere": httpx.Response(307, headers={"location": "http://169.254.169.254/latest"}),
    "packed": httpx.Response(200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"")),
    "endless": httpx.Response(200, stream=httpx.ByteStream(bytes(fleet._LARGEST + 1))),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_coordinators_answer_is_bounded_and_redirects_are_not_followed(answer):
    asked = []

    def answered(request):
        asked.append(request.url.host)
        return answer

    with fleet.BoundedClient("https://coordinator") as client:
        client._client._transport = httpx.MockTransport(answered)
        with pytest.raises(httpx.HTTPError):
            client.PullMessages(PullMessagesRequest())
    assert asked == ["coordinator"]


def refused(status, text):
    """The answer of a coordinator that does not let a site in."""
    return httpx.Response(status, text=text, request=httpx.Request("POST", "https://coordinator"))


ONLINE = '{"code": 2004, "detail": "Failed to activate SuperNode."}'


def test_a_refused_request_does_not_end_the_process(monkeypatch):
    """At 401, which a wrong clock gets, Flower's functions would interrupt the process."""
    monkeypatch.setattr(http_retry.os, "kill", lambda *_: pytest.fail("Flower ends the process"))
    with fleet.BoundedClient("https://coordinator") as client:
        client._client._transport = httpx.MockTransport(lambda request: httpx.Response(401))
        with pytest.raises(httpx.HTTPStatusError):
            http_retry.make_simple_http_retry_invoker().invoke(client.PullMessages, PullMessagesRequest())


def test_a_connected_site_waits_until_a_wrong_clock_is_set(monkeypatch, tmp_path):
    write_site_key(tmp_path)
    request = httpx.Request("POST", "https://coordinator")
    late = httpx.Response(407, headers={CLOCK: "2026-01-01T00:00:00"}, request=request)
    certificate = httpx.ConnectError(f"{FAILED}certificate is not yet valid")
    answers = [late, certificate, httpx.Response(200, request=request)]

    def sign_on(*_):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        answer.raise_for_status()

    monkeypatch.setattr(fleet, "_sign_on_and_off", sign_on)
    monkeypatch.setattr(fleet.time, "sleep", lambda _: None)
    told = []
    fleet._activate("coordinator", tmp_path, told.append, again=True)
    assert told[0] == "coordinator: does not let this site in (one of the clocks is wrong); trying again"
    assert answers == []
    answers += [late]
    with pytest.raises(UserError, match="its clock says .* set the wrong one"):
        fleet._activate("coordinator", tmp_path, told.append)


def test_a_site_waits_for_a_coordinator_that_is_about_to_start(monkeypatch, tmp_path):
    """The open port answers before the SuperLink behind it does."""
    write_site_key(tmp_path)
    request = httpx.Request("POST", "https://coordinator")
    answers = [
        httpx.Response(503, request=request),
        refused(401, ONLINE),
        httpx.Response(200, request=request),
    ]
    monkeypatch.setattr(fleet, "_sign_on_and_off", lambda *_: answers.pop(0).raise_for_status())
    monkeypatch.setattr(fleet.time, "sleep", lambda _: None)
    told = []
    fleet._activate("coordinator", tmp_path, told.append)
    online = "another process is connected with its key (2004: Failed to activate SuperNode.)"
    assert told == [
        f"coordinator: is not ready{cause}; trying again" for cause in (" (HTTP 503)", f", or {online}")
    ]


FAILED = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: "


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (refused(401, ONLINE), "another process is connected with its key"),
        (refused(403, "only sites may come in here"), "its key is not, or no longer, among those"),
        (httpx.ConnectError(f"{FAILED}certificate is not yet valid"), "this site's clock says 2"),
        (httpx.ConnectError(f"{FAILED}certificate has expired"), "renew"),
        (httpx.ConnectError(f"{FAILED}self-signed certificate"), "not vouched for by .*: do not connect"),
    ],
)
def test_a_site_that_is_refused_says_why(monkeypatch, tmp_path, failure, said):
    write_site_key(tmp_path)

    def fail(*given):
        if isinstance(failure, Exception):
            raise failure
        failure.raise_for_status()

    monkeypatch.setattr(fleet, "_sign_on_and_off", fail)
    monkeypatch.setattr(fleet, "_PATIENCE_S", -1)
    with pytest.raises(UserError, match=said):
        fleet._activate("coordinator", tmp_path, print)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (b"[" * 4000, "text/plain"),  # Flower's functions read it as JSON
        (b"x", "text/plain; charset=zlib"),
        (b'{"code": 2004, "detail": "%s"}' % bytes(5000).replace(b"\0", b"x"), "text/plain"),
    ],
)
def test_a_coordinators_error_that_cannot_be_read_does_not_end_a_site(monkeypatch, tmp_path, text, kind):
    write_site_key(tmp_path)
    answers = [
        httpx.Response(503, headers={"content-type": kind}, stream=httpx.ByteStream(text)),
        httpx.Response(200),
        httpx.Response(200),
    ]

    def client(*_, interceptors):
        one = fleet.BoundedClient("https://coordinator", interceptors=interceptors)
        one._client._transport = httpx.MockTransport(lambda _: answers.pop(0))
        return one

    monkeypatch.setattr(fleet.BoundedClient, "from_server_address", client)
    monkeypatch.setattr(fleet.time, "sleep", lambda _: None)
    told = []
    fleet._activate("coordinator", tmp_path, told.append)
    assert answers == []
    (line,) = told
    assert line.endswith("; trying again")
    assert len(line) < 100


def test_an_outage_is_two_lines():
    """Flower logs a line for each attempt, without address or time."""
    notes = []
    outage = fleet._Outage("localhost:9443", notes.append)
    lines = ["Connection attempt failed, retrying in %.2f seconds", "another"]
    shown = [outage.filter(logging.makeLogRecord({"msg": line})) for line in (*lines, *lines)]
    outage.end()
    outage.end()
    assert shown == [False, True, False, True]
    assert notes == ["localhost:9443: does not answer; trying again", "localhost:9443: answers again"]


@pytest.mark.parametrize(
    "damage", [bytes, lambda part: part[: len(part) // 2], lambda part: part.replace(b"C", b"X")]
)
def test_a_request_that_cannot_be_read_is_an_empty_one(damage):
    """Flower's functions that read messages raise many errors, and the site's process goes on after each."""
    _, tree, objects = a_request(b"a request")
    for name, part in objects.items():
        read = fleet._payload(tree, {**objects, name: damage(part)}.get, 1000)
        assert read in (b"", b"a request")  # what is around the record is not read


@pytest.mark.parametrize(
    "failure", [DecodeError("no message"), ObjectPullError("id", "gone"), KeyError("id")]
)
def test_an_answer_that_cannot_be_read_does_not_end_a_site(monkeypatch, failure):
    monkeypatch.setattr(fleet.time, "sleep", lambda seconds: None)
    lost, notes, polls = threading.Event(), [], []

    def receive():
        polls.append(1)
        if len(polls) > 1:
            lost.set()
        raise failure

    connection = (0, receive, *[None] * 6)
    fleet._serve(connection, lost, fleet._Outage("a", notes.append), None, notes.append)
    assert len(notes) == 1
    assert notes[0].startswith(f"a request was lost: {type(failure).__name__}")


@pytest.mark.parametrize("waits", ["first", "second", "nobody"])
def test_a_part_of_a_reply_goes_to_the_session_that_waits_for_it(monkeypatch, waits):
    """In an outage Flower announces a reply twice, and tells a site of either session."""
    monkeypatch.setattr(fleet.time, "sleep", lambda seconds: None)
    request, tree, objects = a_request(b"a request")
    requests = [(request, tree)]
    announced, came, notes, lost = [], [], [], threading.Event()

    def receive():
        if not requests:
            lost.set()
        return requests.pop() if requests else None

    def send(reply, tree, seconds):
        announced.extend(part.object_id for part in iterate_object_tree(tree))
        return set(announced), "first"

    def push(run, session, name, content):
        if session not in {"first": ("first",), "second": ("second", ""), "nobody": ()}[waits]:
            raise ObjectPushError(name, run, session)
        came.append(name)

    connection = (0, receive, send, None, None, lambda run, name: objects[name], push, lambda *_: None)
    site = SimpleNamespace(answer=bytes.upper, largest=1000)
    fleet._serve(connection, lost, fleet._Outage("a", notes.append), site, notes.append)
    assert notes == []
    assert sorted(came) == sorted(announced) * (waits != "nobody")
