"""A site's end of Flower: one lasting process that polls the coordinator's Fleet API and opens no port.

Flower's own SuperNode would start a process for each message, and run the code that arrives with it. This process pulls
messages and answers them itself; it never loads code of an app (FAB).
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
from itertools import count
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
from lit_fedad.core.files import forbidden_in_one_line
from lit_fedad.flower.keys import CLOCK, read_private_key
from lit_fedad.flower.messages import OVERHEAD, TooLongError, in_record, limited, unpacked_size, wrapped
from lit_fedad.sites.site import Site

_POLL_S = 0.5
"""Least time between two polls, in seconds: the open port holds back the answer longer if there is no request."""

_PATIENCE_S = 150
"""How long a refused site tries again, in seconds. Flower counts a site that was killed as online until it has missed
two heartbeats, which come every 30 seconds, and lets it in again after them."""

_KEPT_S = 60
"""How long an idle connection is kept open, in seconds: less than the open port keeps it."""

_LARGEST = 16 << 20
"""Most bytes of one answer of the coordinator; Flower sends a message in chunks of five megabytes."""


class _Outage(logging.Filter):
    """A log filter that notes once that the coordinator does not answer: Flower logs a line for each attempt.

    Args:
        address: The coordinator's host and port.
        note: Takes a line when the coordinator does not answer, and one when it answers again.
    """

    def __init__(self, address: str, note: Callable[[str], None]) -> None:
        super().__init__()
        self.address, self.note, self.ongoing = address, note, False

    def filter(self, record: logging.LogRecord) -> bool:
        """Removes Flower's lines about failed attempts from its log."""
        if not str(record.msg).startswith("Connection attempt failed"):
            return True
        if not self.ongoing:
            self.note(f"{self.address}: does not answer; trying again")
        self.ongoing = True
        return False

    def end(self) -> None:
        """Ends the outage, if there is one: the coordinator has answered."""
        if self.ongoing:
            self.note(f"{self.address}: answers again")
        self.ongoing = False


_LARGEST_ERROR = 4 << 10
"""Most bytes of an answer that says why the coordinator refuses a request: its text is shown to the operator."""


class _BoundedBody(httpx.SyncByteStream):
    """The body of an answer, whose reading fails after `_LARGEST` bytes, or `_LARGEST_ERROR` of an error."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer, self.stream = answer, answer.stream
        self.largest = _LARGEST_ERROR if answer.is_error else _LARGEST

    def __iter__(self) -> Iterator[bytes]:
        total = 0
        for chunk in cast("httpx.SyncByteStream", self.stream):
            if (total := total + len(chunk)) > self.largest:
                raise httpx.DecodingError("an answer is too long", request=self.answer.request)
            yield chunk

    def close(self) -> None:
        cast("httpx.SyncByteStream", self.stream).close()


_REFUSED = 407
"""Status that 401 becomes: at 401 Flower's functions would end this process, as if its operator had ended it."""


def _bound(answer: httpx.Response) -> None:
    """Bounds the body of an answer before it is read, refuses a compressed one, and turns 401 into `_REFUSED`."""
    if "content-encoding" in answer.headers:
        raise httpx.DecodingError("an answer is packed, which nobody asked for", request=answer.request)
    answer.encoding = "utf-8"  # the answer could name a codec that unpacks, or that fails
    answer.stream = _BoundedBody(answer)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        answer.status_code = _REFUSED


class BoundedClient(FleetHttpClient):
    """Flower's client, which here follows no redirects, bounds answers, and keeps idle connections open.

    Flower's own client follows redirects, even to addresses in the site's network, and decompresses and reads answers
    of any length. It keeps a connection for five seconds, and a new one costs kilobytes and two round trips.
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
        for name in ("accept-encoding", "user-agent"):  # every request would carry them, unread
            del self._client.headers[name]


fleet_http_connection.FleetHttpClient = BoundedClient  # type: ignore[misc]  # Flower has no argument for the client


def answer_requests(address: str, folder: Path, site: Site, note: Callable[[str], None]) -> None:
    """Answers requests until the process is ended.

    Args:
        address: The coordinator's host and port.
        folder: The site's folder, with the certificate of the authority that vouches for the coordinator (``ca.crt``)
            and the site's private key (``key``). A key that has replaced it is used when the site connects again.
        site: Answers requests; gets an empty one instead of a request that is longer than any may be.
        note: Takes a line about each event.

    Raises:
        UserError: If the authority's file holds no certificate, or the coordinator refuses the key, or its certificate
            is not from this authority, or a clock is wrong at the start or stays wrong later.
    """
    authority = folder / "ca.crt"
    try:
        with forbidden_in_one_line(authority):
            if not authority.is_file():
                raise UserError(f"{authority}: is missing; the coordinator's operator gives it to you")
            ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise UserError(
            f"{authority}: holds no certificate; the coordinator's operator gives you fed/ca.crt"
        ) from error
    outage = _Outage(address, note)
    FLOWER_LOGGER.addFilter(outage)
    for attempt in count():
        private = _activate(address, folder, note, again=attempt > 0)
        keys, disconnected = (private, private.public_key()), threading.Event()

        def failed(error: threading.ExceptHookArgs, disconnected: threading.Event = disconnected) -> None:
            note(f"{address}: {first_line(error.exc_value or OSError())}")
            disconnected.set()  # the thread that sends heartbeats has ended

        threading.excepthook = failed
        with (
            suppress(httpx.HTTPError, DecodeError),  # raised when the connection is closed
            fleet_http_connection.http_request_response(address, False, str(authority), keys) as connection,
        ):
            note(f"connected to {address}")
            _serve(connection, disconnected, outage, site, note)


def _serve(
    connection: tuple[Any, ...],
    disconnected: threading.Event,
    outage: _Outage,
    site: Site,
    note: Callable[[str], None],
) -> None:
    """Answers requests until the coordinator refuses this connection, or heartbeats fail (`disconnected`)."""
    _, receive, send, _, _, pull, push, confirm = connection
    last_cause = ""
    while not disconnected.is_set():
        try:
            polled_at = time.monotonic()
            received = receive()
            outage.end()
            if received is None:
                time.sleep(max(0.0, polled_at + _POLL_S - time.monotonic()))
                continue
            message, tree = received
            run = message.metadata.run_id
            payload = _payload(tree, partial(pull, run), site.largest)
            confirm(run, tree.object_id)
            began = time.monotonic()
            reply = Message(wrapped(site.answer(payload)), reply_to=message)
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                objects, reply_tree = get_all_nested_objects(reply), get_object_tree(reply)
                wanted, session = send(reply, reply_tree, time.monotonic() - began)
                push_objects(objects, partial(_push, partial(push, run), session), object_ids_to_push=wanted)
            last_cause = ""
            continue
        except RunNotRunningException:  # Flower does not derive it from Exception
            cause = "the coordinator has ended its run, or removed this site's key"
        except Exception as error:  # Flower's functions that read answers raise errors of many types
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (403, _REFUSED):
                return
            # The coordinator sends the request again.
            cause = f"a request was lost: {type(error).__name__}: {first_line(error)}"
        if cause != last_cause:
            note(cause)
            last_cause = cause
        time.sleep(_POLL_S)


def _push(push: Callable[[str, str, bytes], None], session: str, part_id: str, content: bytes) -> None:
    """Pushes a part of a reply: to its session, or if that refuses it, to any session that still waits for it.

    In an outage Flower repeats calls that got no answer, and a reply that is announced twice has two sessions. The
    coordinator would wait for minutes for the parts of the session to which nobody pushes.
    """
    try:
        push(session, part_id, content)
    except ObjectPushError:
        with suppress(ObjectPushError):  # the part itself has arrived twice
            push("", part_id, content)


def _payload(tree: ObjectTree, pull: Callable[[str], bytes], max_bytes: int) -> bytes:
    """Pulls and builds the payload of a message; returns no bytes if it is too long or cannot be read.

    The objects around the payload's record have come with the poll, and are not pulled.

    Args:
        tree: Flower's ids of the message's objects.
        pull: Reads an object by its id.
        max_bytes: Most bytes of the payload, as it is sent and as it is built.

    Raises:
        UserError: If the message holds anything else than a payload.
    """
    for _ in ("content", "record"):
        if len(tree.children) != 1:
            raise UserError("a message holds something else than a payload")
        tree = tree.children[0]
    try:
        object_ids = [part.object_id for part in iterate_object_tree(tree)]
        contents = pull_objects(object_ids, limited(pull, len, max_bytes + OVERHEAD))
    except TooLongError:
        return b""
    try:
        fits = unpacked_size(contents) <= max_bytes + OVERHEAD
        return in_record(inflate_object_from_contents(tree.object_id, contents)) if fits else b""
    except Exception:  # Flower's functions that read messages raise errors of many types
        return b""


def _activate(
    address: str, folder: Path, note: Callable[[str], None], again: bool = False
) -> ec.EllipticCurvePrivateKey:
    """Signs the site on and off once, and reports why if that fails: Flower's own connection would end the process.

    Tries again while the coordinator does not answer, and for `_PATIENCE_S` if it refuses the site. A clock that is
    wrong at the start is an error at once. Later (`again`) it may be that of a machine that has slept, which the system
    sets soon.

    Returns:
        The private key with which the site was let in.

    Raises:
        UserError: If the site is refused for longer, or the clock or the certificate is wrong.
    """
    authority, deadline, last_cause = folder / "ca.crt", time.monotonic() + _PATIENCE_S, ""
    while True:
        private = read_private_key(folder / "key")
        try:
            _sign_on_and_off(address, authority, private)
            return private
        except httpx.HTTPStatusError as error:
            flower = FlowerError.from_json(error.response.text)
            cause = f"{flower.code}: {flower.message}" if flower else f"HTTP {error.response.status_code}"
            wrong_clock = CLOCK in error.response.headers
            if wrong_clock and not (again and time.monotonic() < deadline):
                raise UserError(
                    f"{address} refuses this site: its clock says {_now()}, the coordinator's"
                    f" {error.response.headers[CLOCK][:25]}; set the wrong one, and begin again"
                ) from None
            # The open port let the site in, but Flower counts its node as online, or does not know the key yet.
            let_in = "2004" in cause
            if error.response.status_code >= 500:  # the open port answers, but the SuperLink does not yet
                deadline = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > deadline or not (
                let_in or wrong_clock or error.response.status_code == 403
            ):
                reason = (
                    "another process is connected with its key; end that one, and begin again"
                    if let_in
                    else "its key is not, or no longer, among those that the coordinator's operator keeps; send key.pub"
                    " of this site"
                )
                raise UserError(f"{address} refuses this site ({cause}): {reason}") from None
            state = "does not let this site in"
            if let_in:
                state = "is not ready, or another process is connected with its key"
            elif error.response.status_code >= 500:
                state = "is not ready"
            cause = f"{state} ({'one of the clocks is wrong' if wrong_clock else cause})"
        except (httpx.RequestError, ValueError, RecursionError, DecodeError) as error:
            wrong_time = re.search("certificate (is not yet valid|has expired)", str(error))
            if wrong_time and not (again and time.monotonic() < deadline):
                raise UserError(
                    f"{address} has a certificate of another time ({first_line(error)}): this site's clock says"
                    f" {_now()}; set it, or have its operator renew it (lit-fedad federation renew), and begin again"
                ) from None
            if "CERTIFICATE" in str(error).upper() and not wrong_time:
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
            deadline = deadline if wrong_time else time.monotonic() + _PATIENCE_S
        if cause != last_cause:
            note(f"{address}: {cause}; trying again")
            last_cause = cause
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
