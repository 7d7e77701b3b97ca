"""The coordinator's end of Flower: it pushes requests to the nodes that are online, and pulls their replies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflate_object_from_contents,
    iterate_object_tree,
)

from lit_fedad.core.errors import UserError
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.messages import KIND, OVERHEAD, TooLongError, limited, unpacked_size, unwrapped, wrapped
from lit_fedad.flower.signals import Signals
from lit_fedad.report.console import Display
from lit_fedad.sites.remote import NoReply, too_long

GONE = {3, 4, 5, 8}
"""Flower's error codes of messages that got lost with their node: the request may be sent again."""


class _Arriving:
    """A reply that a site has announced; its parts arrive one after the other, or never.

    Args:
        reply_id: Flower's id of the reply.
        part_ids: The ids of its parts.
        read: Reads a part, by its id.
    """

    def __init__(self, reply_id: str, part_ids: Sequence[str], read: Callable[[str], bytes]) -> None:
        self.reply_id, self.part_ids, self.read = reply_id, part_ids, read
        self.contents = dict[str, bytes]()

    def is_complete(self, deadline: float) -> bool:
        """Reads the parts that have arrived, until a deadline; returns whether the reply is complete.

        Raises:
            TooLongError: If the parts are longer than any reply.
            ObjectPullError: If a part will not arrive any more.
        """
        for part_id in self.part_ids:
            if part_id in self.contents:
                continue
            try:
                if time.monotonic() > deadline:
                    return False
                self.contents[part_id] = self.read(part_id)
            except ObjectUnavailableError:
                return False
        return True


def pull(
    grid: Grid, request_ids: Collection[str], max_bytes: int, arriving: dict[str, _Arriving], deadline: float
) -> Iterator[tuple[str, bytes | NoReply | None]]:
    """Pulls the replies that are complete, without waiting for parts that have not arrived.

    Args:
        grid: Flower's grid.
        request_ids: Flower's ids of the requests.
        max_bytes: Most bytes of a reply; of a longer one, at most one part more is read.
        arriving: The replies of which some parts are missing, by the request's id; changed here.
        deadline: Time, by the monotonic clock, after which no more is read.

    Yields:
        The id of a request, with the payload of its reply, the cause why there is none, or None if the request must be
        sent again.
    """
    client: Any = grid._runtime_client  # type: ignore[attr-defined]
    unanswered = [request_id for request_id in request_ids if request_id not in arriving]
    answer = client.PullMessages(PullAppMessagesRequest(message_ids=unanswered)) if unanswered else None
    for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True) if answer else ():
        read = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)  # type: ignore[attr-defined]
        part_ids = [part.object_id for part in iterate_object_tree(tree)]
        arriving[header.metadata.reply_to_message_id] = _Arriving(
            header.metadata.message_id, part_ids, limited(read, len, max_bytes + OVERHEAD)
        )
    for request_id in [request_id for request_id in request_ids if request_id in arriving]:
        reply = arriving[request_id]
        try:
            if not reply.is_complete(deadline):
                continue
            result = _payload(reply.reply_id, reply.contents, max_bytes)
        except TooLongError:
            result = too_long(None, max_bytes)
        except ObjectPullError:
            result = None
        del arriving[request_id]
        if result is not None:
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=grid.node,  # type: ignore[attr-defined]
                    run_id=grid.run.run_id,
                    message_object_id=reply.reply_id,
                )
            )
        yield request_id, result


def _payload(reply_id: str, contents: dict[str, bytes], max_bytes: int) -> bytes | NoReply | None:
    """Builds a reply from its parts; returns its payload, why it has none, or None if the request must be sent again.

    Raises:
        TooLongError: If the payload is longer than `max_bytes`.
    """
    try:
        if unpacked_size(contents) > max_bytes:
            raise TooLongError
        message = inflate_object_from_contents(reply_id, contents)
        if not isinstance(message, Message):
            return NoReply("a message holds something else than a payload", away=False)
        if message.has_error():
            # The error's text may come from the site: do not print it.
            return None if message.error.code in GONE else NoReply(f"Flower's error {message.error.code}")
        return unwrapped(message)
    except UserError as error:
        return NoReply(str(error), away=False)
    except TooLongError:
        raise
    except Exception as error:
        # Flower's functions that read messages raise errors of many types.
        return NoReply(f"a message cannot be read ({type(error).__name__})", away=False)


_POLL_S = 0.2  # time between two looks for replies and for nodes that came online

_PATIENCE_S = 10.0
"""Seconds after which the operator is told which sites have not connected: a site that is started connects sooner."""

_MAX_REPEATS = 5
"""Most times that a request is sent again: a site itself can claim that one got lost, and each copy takes up disk."""


class GridCarrier:
    """A carrier of messages over Flower.

    A site is identified by its registered public key, not by a name or a node's number, which anybody can choose. If a
    site goes away with a request, it gets the request again when it is back: requests can be sent twice. A site that
    missed a request is not waited for again until it is online.

    Args:
        grid: Flower's grid.
        folder: The coordinator's folder. It says which sites are let in, also if that changes during the run, and how
            long to wait for replies.
        display: Shows the operator which sites the run waits for because they have not connected.

    Attributes:
        signals: Takes note when requests were pushed, so that sites fetch them. Tells which sites their operators have
            ended: the run does not wait for these.
    """

    def __init__(self, grid: Grid, folder: FederationFolder, display: Display) -> None:
        self.grid, self.folder, self.display = grid, folder, display
        self.timeout, self.signals = folder.timeout, Signals(folder.path)
        self._missed = set[int]()

    def present(self) -> dict[int, str]:
        """Returns the names of the sites that are online, by client number."""
        nodes = {bytes(node.public_key) for node in self.grid.get_nodes()}
        folder = self.folder.again()
        return {client: folder.sites[client] for client, key in folder.public_keys().items() if key in nodes}

    def carry(self, requests: Mapping[int, bytes], max_bytes: int) -> Iterator[tuple[int, bytes | NoReply]]:
        """Brings every client its request; see `Carrier.carry`."""
        began, announced = time.monotonic(), list[int]()  # clients of which the operator was told last
        deadline = began + self.timeout
        waiting, sent, repeats = set(requests), dict[str, int](), Counter[int]()  # sent: client by request id
        arriving = dict[str, _Arriving]()
        while (waiting or sent) and time.monotonic() < deadline:
            keys = self.folder.again().public_keys()
            for client in sorted(waiting - set(keys)):
                yield client, NoReply("its key was taken away: it gets no request")
            waiting &= set(keys)
            for request_id in [request_id for request_id, client in sent.items() if client not in keys]:
                yield sent.pop(request_id), NoReply("its key was taken away: what it sends is not read")
            self._push(requests, waiting, sent, keys, max_bytes)
            for client in sorted(waiting):
                if self.signals.gone(keys[client]):
                    yield client, NoReply("has signed off")
                elif client in self._missed:
                    yield client, NoReply("has not connected since it missed a request")
                else:
                    continue
                waiting.discard(client)
            if waiting and time.monotonic() - began >= _PATIENCE_S and announced != sorted(waiting):
                announced = sorted(waiting)
                self._announce(announced)
            for request_id, answer in pull(self.grid, list(sent), max_bytes, arriving, deadline):
                client = sent.pop(request_id)
                if answer is None and repeats[client] < _MAX_REPEATS:
                    repeats[client] += 1
                    waiting.add(client)
                elif answer is None:
                    yield client, NoReply(f"has lost its request {_MAX_REPEATS + 1} times")
                else:
                    self._missed.discard(client)
                    yield client, answer
            time.sleep(_POLL_S)
        self._missed |= {*waiting, *sent.values()}
        away = f"did not connect within {self.timeout:g} seconds"
        late = f"did not answer within {self.timeout:g} seconds"
        yield from ((client, NoReply(away)) for client in sorted(waiting))
        yield from ((client, NoReply(late)) for client in sorted(sent.values()))

    def _announce(self, clients: Sequence[int]) -> None:
        """Tells the operator which sites have not connected."""
        sites = self.folder.again().sites
        self.display.note(
            f"sites that have not connected: {', '.join(sites[client] for client in clients)}; give there lit-fedad"
            f" site start site=FOLDER; waiting {self.timeout:g} s at most (timeout in {self.folder.file})"
        )

    def _push(
        self,
        requests: Mapping[int, bytes],
        waiting: set[int],
        sent: dict[str, int],
        keys: Mapping[int, bytes],
        max_bytes: int,
    ) -> None:
        """Sends their requests to the waiting clients that are online, and moves these from `waiting` to `sent`."""
        if not waiting:
            return
        sent_before = len(sent)
        nodes = {bytes(node.public_key): node.node_id for node in self.grid.get_nodes()}
        for client in sorted(waiting):
            node = nodes.get(keys[client])
            if node is None:
                continue
            message = Message(wrapped(requests[client]), node, KIND, ttl=self.timeout)
            try:
                (request_id,) = self.grid.push_messages([message])
            except ObjectPushError:
                # In an outage Flower repeats calls that got no answer, and refuses one that arrives twice. The client
                # stays in `waiting`, so its request is sent anew.
                continue
            if request_id:
                sent[request_id] = client
                waiting.discard(client)
        if len(sent) > sent_before:
            self.signals.send(max_bytes)
