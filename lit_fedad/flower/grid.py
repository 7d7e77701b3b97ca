"""The coordinator's end: orders are pushed to nodes that are online, replies pulled."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flwr.app import Array, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    iterate_object_tree,
    pull_objects,
)

from lit_fedad.core.errors import UserError
from lit_fedad.flower.letters import KIND, unwrapped, wrapped
from lit_fedad.flower.proxy import Bell
from lit_fedad.sites.remote import Lost, too_long

GONE = {3, 4, 5, 8}
"""Flower's error codes of messages that got lost with their node: an order may be sent again."""

# Bytes of a message beside its letter: names and metadata.
_BESIDE = 1 << 16


class _TooLongError(Exception):
    """More objects have come than a reply may have."""


def pull(grid: Grid, names: Collection[str], most: int) -> Iterator[tuple[str, bytes | Lost | None]]:
    """Pulls the replies that are there.

    Args:
        grid: Flower's grid.
        names: Flower's ids of the orders.
        most: Most bytes of a reply; of a longer one, one chunk more is read at most by each of Flower's threads.

    Yields:
        The id of an order, with the letter in its reply, why there is none, or None where it must be sent again.
    """
    client: Any = grid._runtime_client  # type: ignore[attr-defined]
    answer = client.PullMessages(PullAppMessagesRequest(message_ids=list(names)))
    for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
        told = header.metadata.reply_to_message_id
        read = _within(client.PullObject, most + _BESIDE)
        take = make_pull_object_fn_protobuf(read, grid.node, grid.run.run_id)  # type: ignore[attr-defined]
        try:
            contents = pull_objects([part.object_id for part in iterate_object_tree(tree)], take)
            found = _letter(header.metadata.message_id, contents, most)
        except _TooLongError:
            found = too_long(None, most)
        except ObjectPullError:
            found = None
        if found is not None:
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=grid.node,  # type: ignore[attr-defined]
                    run_id=grid.run.run_id,
                    message_object_id=header.metadata.message_id,
                )
            )
        yield told, found


def _within(
    read: Callable[[PullObjectRequest], PullObjectResponse], most: int
) -> Callable[[PullObjectRequest], PullObjectResponse]:
    """Returns a function that reads objects, and raises once they are too many bytes together."""
    lock, total = threading.Lock(), 0

    def bounded(request: PullObjectRequest) -> PullObjectResponse:
        nonlocal total
        with lock:
            if total > most:
                raise _TooLongError
        answer = read(request)
        with lock:
            total += len(answer.object_content)
            if total > most:
                raise _TooLongError
        return answer

    return bounded


def _letter(name: str, contents: dict[str, bytes], most: int) -> bytes | Lost | None:
    """Builds a message from its objects, and returns the letter in it."""
    try:
        if _unfolded(contents) > most:
            raise _TooLongError
        message = inflate_object_from_contents(name, contents)
        if not isinstance(message, Message):
            return Lost("a message holds something else than a letter", away=False)
        if message.has_error():
            return None if message.error.code in GONE else Lost(f"Flower: {message.error.reason}")
        return unwrapped(message)
    except UserError as error:
        return Lost(str(error), away=False)
    except _TooLongError:
        raise
    except Exception as error:
        # Flower's readers fail in many ways.
        return Lost(f"a message cannot be read ({type(error).__name__})", away=False)


def _unfolded(contents: Mapping[str, bytes]) -> int:
    """Computes how many bytes the arrays in a message have: one chunk may stand in several places."""
    total = 0
    for content in contents.values():
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[parts[place]]) for place in places)
    return total


_POLL_S = 0.2


class GridCarrier:
    """A carrier of letters over Flower.

    A site is known by its registered public key, not by a name or a node's number, which anybody can choose. An order
    whose site goes away is sent again when it is back: orders can be sent twice.

    Args:
        grid: Flower's grid.
        keys: Public key of every client.
        timeout: Longest time until all replies are there, in seconds.
        bell: Is rung when orders were pushed, so that sites come for them.
    """

    def __init__(self, grid: Grid, keys: Mapping[int, bytes], timeout: float, bell: Bell) -> None:
        self.grid, self.keys, self.timeout, self.bell = grid, dict(keys), timeout, bell

    def carry(self, orders: Mapping[int, bytes], most: int) -> Iterator[tuple[int, bytes | Lost]]:
        """Brings every client its order; see `Carrier.carry`."""
        end = time.monotonic() + self.timeout
        waiting, sent = set(orders), dict[str, int]()
        while (waiting or sent) and time.monotonic() < end:
            self._push(orders, waiting, sent)
            for order, answer in pull(self.grid, list(sent), most) if sent else ():
                client = sent.pop(order)
                if answer is None:
                    waiting.add(client)
                else:
                    yield client, answer
            time.sleep(_POLL_S)
        away = f"did not connect within {self.timeout:g} seconds"
        late = f"did not answer within {self.timeout:g} seconds"
        yield from ((client, Lost(away)) for client in sorted(waiting))
        yield from ((client, Lost(late)) for client in sorted(sent.values()))

    def _push(self, orders: Mapping[int, bytes], waiting: set[int], sent: dict[str, int]) -> None:
        """Sends what waits to the clients that are online."""
        if not waiting:
            return
        before = len(sent)
        nodes = {bytes(node.public_key): node.node_id for node in self.grid.get_nodes()}
        for client in sorted(waiting):
            node = nodes.get(self.keys[client])
            if node is None:
                continue
            message = Message(wrapped(orders[client]), node, KIND, ttl=self.timeout)
            (pushed,) = self.grid.push_messages([message])
            if pushed:
                sent[pushed] = client
                waiting.discard(client)
        if len(sent) > before:
            self.bell.ring()
