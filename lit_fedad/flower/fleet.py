"""A site's end: a warm process on Flower's Fleet API, which polls outwards and opens no port.

Flower's own SuperNode would start a process for each message, and run the code that arrives with it. This one pulls
messages and answers them itself; code of an app (FAB) is never loaded.
"""

from __future__ import annotations

import datetime
import logging
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPushError,
    inflate_object_from_contents,
    iterate_object_tree,
    pull_objects,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.logger import FLOWER_LOGGER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import fleet_http_connection
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.files import told_forbidden
from lit_fedad.flower.keys import CLOCK, read_private_key
from lit_fedad.flower.messages import BESIDE, TooLongError, in_record, unfolded, within, wrapped
from lit_fedad.sites.site import Site

_POLL_S = 0.5
"""Least time between two polls, in seconds: the open port holds one longer for which there is no request."""

_PATIENCE_S = 150
"""How long a site that is refused tries again: one that was killed counts as online until it misses two heartbeats."""

_KEPT_S = 60
"""How long a connection is kept that nothing goes over, in seconds: less than the open port keeps it."""

_LARGEST = 16 << 20
"""Most bytes of one answer of the coordinator; Flower sends messages in chunks of five megabytes."""


class _Outage(logging.Filter):
    """Tells once that the coordinator does not answer, where Flower has a line for each attempt.

    Args:
        address: The coordinator's host and port.
        note: Is told when it does not answer, and when it does again.
    """

    def __init__(self, address: str, note: Callable[[str], None]) -> None:
        super().__init__()
        self.address, self.note, self.lasts = address, note, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Takes Flower's lines of attempts out of its log."""
        if not str(record.msg).startswith("Connection attempt failed"):
            return True
        if not self.lasts:
            self.note(f"{self.address}: does not answer; trying again")
        self.lasts = True
        return False

    def end(self) -> None:
        """Notes that the coordinator has answered."""
        if self.lasts:
            self.note(f"{self.address}: answers again")
        self.lasts = False


class _Bounded(httpx.SyncByteStream):
    """The body of an answer, of which no more is read than any has."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer, self.stream = answer, answer.stream

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        for part in cast("httpx.SyncByteStream", self.stream):
            if (total := total + len(part)) > _LARGEST:
                raise httpx.DecodingError("an answer is too long", request=self.answer.request)
            yield part

    def close(self) -> None:
        cast("httpx.SyncByteStream", self.stream).close()


def _bound(answer: httpx.Response) -> None:
    """Bounds an answer before its body is read, and refuses one that is packed."""
    if "content-encoding" in answer.headers:
        raise httpx.DecodingError("an answer is packed, which nobody asked for", request=answer.request)
    answer.stream = _Bounded(answer)


class BoundedClient(FleetHttpClient):
    """Flower's client, with bounded answers of the coordinator alone, and connections that outlast its pauses.

    Flower's own goes where an answer sends it, into the site's network too, and unpacks and reads whatever comes. It
    keeps connections for five seconds, and a new one costs kilobytes and two round trips.
    """

    _client: httpx.Client

    def __init__(self, base_url: str, **given: Any) -> None:
        super().__init__(base_url, **given)
        self._client.close()
        self._client = httpx.Client(
            verify=given.get("verify", True),
            timeout=self._client.timeout,
            follow_redirects=False,
            event_hooks={"response": [_bound]},
            limits=httpx.Limits(keepalive_expiry=_KEPT_S),
        )
        for name in ("accept-encoding", "user-agent"):  # which nobody reads, in every request
            del self._client.headers[name]


fleet_http_connection.FleetHttpClient = BoundedClient  # type: ignore[misc]  # its connection takes none from outside


def answer_requests(address: str, folder: Path, site: Site, note: Callable[[str], None]) -> None:
    """Answers requests until the process is ended.

    Args:
        address: The coordinator's host and port.
        folder: The site's folder, with the certificate of the authority that vouches for the coordinator (``ca.crt``)
            and its private key (``key``); another one in its place is taken when the site has to connect again.
        site: Answers requests; of one that is longer than any it is given an empty one.
        note: Is told what happens, a line each.

    Raises:
        UserError: If the authority's file holds no certificate, or the coordinator does not take the key, or is not who
            it should be.
    """
    authority = folder / "ca.crt"
    try:
        with told_forbidden(authority):
            if not authority.is_file():
                raise UserError(f"{authority}: is missing; the coordinator's operator gives it to you")
            ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise UserError(
            f"{authority}: holds no certificate; the coordinator's operator gives you fed/ca.crt"
        ) from error
    outage = _Outage(address, note)
    FLOWER_LOGGER.addFilter(outage)
    while True:
        private = _activate(address, folder, note)
        keys, lost = (private, private.public_key()), threading.Event()

        def heard(failed: threading.ExceptHookArgs, lost: threading.Event = lost) -> None:
            note(f"{address}: {first_line(failed.exc_value or OSError())}")
            lost.set()  # the thread that says that this site is there has ended

        threading.excepthook = heard
        with (
            suppress(httpx.HTTPError, DecodeError),  # of saying good-bye
            fleet_http_connection.http_request_response(address, False, str(authority), keys) as connection,
        ):
            note(f"connected to {address}")
            _serve(connection, lost, outage, site, note)


def _serve(
    connection: tuple[Any, ...],
    lost: threading.Event,
    outage: _Outage,
    site: Site,
    note: Callable[[str], None],
) -> None:
    """Answers requests until the coordinator does not let this connection in any more."""
    _, receive, send, _, _, pull, push, confirm = connection
    told = ""
    while not lost.is_set():
        try:
            asked = time.monotonic()
            received = receive()
            outage.end()
            if received is None:
                time.sleep(max(0.0, asked + _POLL_S - time.monotonic()))
                continue
            message, tree = received
            run = message.metadata.run_id
            payload = _payload(tree, partial(pull, run), site.largest)
            confirm(run, tree.object_id)
            began = time.monotonic()
            reply = Message(wrapped(site.answer(payload)), reply_to=message)
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                objects, own_tree = get_all_nested_objects(reply), get_object_tree(reply)
                wanted, session = send(reply, own_tree, time.monotonic() - began)
                push_objects(objects, partial(_push, partial(push, run), session), object_ids_to_push=wanted)
            told = ""
            continue
        except RunNotRunningException:  # no Exception: the coordinator has ended this run
            cause = "the coordinator has ended its run"
        except Exception as error:  # what Flower reads of the coordinator's answers fails in many ways
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
                return
            # The coordinator sends the request again.
            cause = f"a request was lost: {type(error).__name__}: {first_line(error)}"
        if cause != told:
            note(cause)
            told = cause
        time.sleep(_POLL_S)


def _push(push: Callable[[str, str, bytes], None], session: str, name: str, content: bytes) -> None:
    """Pushes a part of a reply; one that its session does not take, to whichever still waits for it.

    In an outage Flower repeats what it got no answer to, and an announcement that comes twice has two sessions. For the
    parts of the one that nobody pushed to, the coordinator would wait for minutes.
    """
    try:
        push(session, name, content)
    except ObjectPushError:
        with suppress(ObjectPushError):  # the part itself has come twice
            push("", name, content)


def _payload(tree: ObjectTree, pull: Callable[[str], bytes], most: int) -> bytes:
    """Pulls and builds the payload in a message; an empty one where it is too long, unpacked too, or cannot be read.

    What is around its record has come with the poll, and is not pulled.

    Raises:
        UserError: If the message holds anything else.
    """
    for _ in ("content", "record"):
        if len(tree.children) != 1:
            raise UserError("a message holds something else than a payload")
        tree = tree.children[0]
    try:
        names = [part.object_id for part in iterate_object_tree(tree)]
        contents = pull_objects(names, within(pull, len, most + BESIDE))
    except TooLongError:
        return b""
    try:
        whole = unfolded(contents) <= most + BESIDE
        return in_record(inflate_object_from_contents(tree.object_id, contents)) if whole else b""
    except Exception:  # Flower's readers fail in many ways
        return b""


def _activate(address: str, folder: Path, note: Callable[[str], None]) -> ec.EllipticCurvePrivateKey:
    """Activates the site's node once, to tell why where that fails: Flower's own connection ends the process.

    Returns:
        The key that was let in.
    """
    authority, end, told = folder / "ca.crt", time.monotonic() + _PATIENCE_S, ""
    while True:
        private = read_private_key(folder / "key")
        try:
            _sign_on_and_off(address, authority, private)
            return private
        except httpx.HTTPStatusError as error:
            found = FlowerError.from_json(error.response.text)
            cause = f"{found.code}: {found.message}" if found else f"HTTP {error.response.status_code}"
            if CLOCK in error.response.headers:
                raise UserError(
                    f"{address} refuses this site: its clock says {_now()}, the coordinator's"
                    f" {error.response.headers[CLOCK][:25]}; set the wrong one, and begin again"
                ) from None
            # By the open port: Flower has its node online, or does not know the key yet.
            let_in = "2004" in cause
            if error.response.status_code >= 500:  # the open port is there, and what is behind it not yet
                end = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > end or not (let_in or error.response.status_code == 403):
                why = (
                    "another process is connected with its key; end that one, and begin again"
                    if let_in
                    else "its key is not, or no longer, among those that the coordinator's operator keeps; send key.pub"
                    " of this site"
                )
                raise UserError(f"{address} refuses this site ({cause}): {why}") from None
            waits = "is not ready" if error.response.status_code >= 500 else "does not let this site in"
            cause = f"{waits} ({cause})"
        except (httpx.RequestError, ValueError, DecodeError) as error:
            if re.search("certificate (is not yet valid|has expired)", str(error)):
                raise UserError(
                    f"{address} has a certificate of another time ({first_line(error)}): this site's clock says"
                    f" {_now()}; set it, or have its operator renew it (lit-fedad federation renew), and begin again"
                ) from None
            if "CERTIFICATE" in str(error).upper():
                raise UserError(
                    f"{address} is not vouched for by {authority} ({first_line(error)}): do not connect; ask its"
                    " operator"
                ) from None
            unreached = isinstance(error, httpx.ConnectError)
            cause = (
                f"cannot be reached ({first_line(error)})"
                if unreached
                else f"does not answer ({type(error).__name__})"
            )
            end = time.monotonic() + _PATIENCE_S
        if cause != told:
            note(f"{address}: {cause}; trying again")
            told = cause
        time.sleep(2.0)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()[:25]


def _sign_on_and_off(address: str, authority: Path, private: ec.EllipticCurvePrivateKey) -> None:
    public = private.public_key()
    interceptors = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, public),
    ]
    with BoundedClient.from_server_address(
        address, False, str(authority), interceptors=interceptors
    ) as client:
        request = ActivateNodeRequest(
            public_key=public_key_to_bytes(public), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        node = client.ActivateNode(request)
        client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))
