"""The coordinator's end: requests are pushed to nodes that are online, replies pulled."""

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
from lit_fedad.flower.messages import BESIDE, KIND, TooLongError, unfolded, unwrapped, within, wrapped
from lit_fedad.flower.signals import Signals
from lit_fedad.report.console import Display
from lit_fedad.sites.remote import NoReply, too_long

GONE = {3, 4, 5, 8}
"""Flower's error codes of messages that got lost with their node: a request may be sent again."""


class _Arriving:
    """A reply that a site has announced; its parts come one after the other, or never.

    Args:
        name: Flower's id of the reply.
        parts: The ids of its parts.
        take: Reads a part.
    """

    def __init__(self, name: str, parts: Sequence[str], take: Callable[[str], bytes]) -> None:
        self.name, self.parts, self.take = name, parts, take
        self.contents = dict[str, bytes]()

    def is_here(self, end: float) -> bool:
        """Reads the parts that are there, until a time; returns whether that is all.

        Raises:
            TooLongError: If they are longer than any reply.
            ObjectPullError: If one will not come any more.
        """
        for part in self.parts:
            if part in self.contents:
                continue
            try:
                if time.monotonic() > end:
                    return False
                self.contents[part] = self.take(part)
            except ObjectUnavailableError:
                return False
        return True


def pull(
    grid: Grid, names: Collection[str], most: int, arriving: dict[str, _Arriving], end: float
) -> Iterator[tuple[str, bytes | NoReply | None]]:
    """Pulls the replies that are there; nobody waits for the parts of one that a site has only announced.

    Args:
        grid: Flower's grid.
        names: Flower's ids of the requests.
        most: Most bytes of a reply; of a longer one, one part more is read at most.
        arriving: What has come so far of replies, by request; changed here.
        end: Time after which no more is read.

    Yields:
        The id of a request, with the payload in its reply, why there is none, or None where it must be sent again.
    """
    client: Any = grid._runtime_client  # type: ignore[attr-defined]
    asked = [name for name in names if name not in arriving]
    answer = client.PullMessages(PullAppMessagesRequest(message_ids=asked)) if asked else None
    for header, tree in zip(answer.messages_list, answer.message_object_trees, strict=True) if answer else ():
        take = make_pull_object_fn_protobuf(client.PullObject, grid.node, grid.run.run_id)  # type: ignore[attr-defined]
        parts = [part.object_id for part in iterate_object_tree(tree)]
        arriving[header.metadata.reply_to_message_id] = _Arriving(
            header.metadata.message_id, parts, within(take, len, most + BESIDE)
        )
    for told in [name for name in names if name in arriving]:
        reply = arriving[told]
        try:
            if not reply.is_here(end):
                continue
            found = _payload(reply.name, reply.contents, most)
        except TooLongError:
            found = too_long(None, most)
        except ObjectPullError:
            found = None
        del arriving[told]
        if found is not None:
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=grid.node,  # type: ignore[attr-defined]
                    run_id=grid.run.run_id,
                    message_object_id=reply.name,
                )
            )
        yield told, found


def _payload(name: str, contents: dict[str, bytes], most: int) -> bytes | NoReply | None:
    """Builds a message from its objects, and returns the payload in it."""
    try:
        if unfolded(contents) > most:
            raise TooLongError
        message = inflate_object_from_contents(name, contents)
        if not isinstance(message, Message):
            return NoReply("a message holds something else than a payload", away=False)
        if message.has_error():
            # Its text may be a site's.
            return None if message.error.code in GONE else NoReply(f"Flower's error {message.error.code}")
        return unwrapped(message)
    except UserError as error:
        return NoReply(str(error), away=False)
    except TooLongError:
        raise
    except Exception as error:
        # Flower's readers fail in many ways.
        return NoReply(f"a message cannot be read ({type(error).__name__})", away=False)


_POLL_S = 0.2

_PATIENCE_S = 10.0
"""Seconds after which the operator is told of the sites that are waited for: those that are started connect sooner."""

_AGAIN = 5
"""Most times that a request is sent again: a site can say itself that it got lost, and each fills the disk."""


class GridCarrier:
    """A carrier of messages over Flower.

    A site is known by its registered public key, not by a name or a node's number, which anybody can choose. A request
    whose site goes away is sent again when it is back: requests can be sent twice. A site that missed one is not waited
    for again until it is online.

    Args:
        grid: Flower's grid.
        folder: The coordinator's folder: who is let in now, also where that changes meanwhile, and how long replies
            are waited for.
        display: Tells the operator of sites that are waited for because they are not connected.

    Attributes:
        signals: Is told when requests were pushed, so that sites come for them. Tells of sites that their operators
            have ended: nobody waits for them.
    """

    def __init__(self, grid: Grid, folder: FederationFolder, display: Display) -> None:
        self.grid, self.folder, self.display = grid, folder, display
        self.timeout, self.signals = folder.timeout, Signals(folder.path)
        self._missed = set[int]()

    def present(self) -> dict[int, str]:
        """Returns the names of the clients that are online."""
        nodes = {bytes(node.public_key) for node in self.grid.get_nodes()}
        folder = self.folder.again()
        return {client: folder.sites[client] for client, key in folder.public_keys().items() if key in nodes}

    def carry(self, requests: Mapping[int, bytes], most: int) -> Iterator[tuple[int, bytes | NoReply]]:
        """Brings every client its request; see `Carrier.carry`."""
        began, told = time.monotonic(), list[int]()
        end = began + self.timeout
        waiting, sent, again = set(requests), dict[str, int](), Counter[int]()
        arriving = dict[str, _Arriving]()
        while (waiting or sent) and time.monotonic() < end:
            keys = self.folder.again().public_keys()
            for client in sorted(waiting - set(keys)):
                yield client, NoReply("its key was taken away: it gets no request")
            waiting &= set(keys)
            for request in [request for request, client in sent.items() if client not in keys]:
                yield sent.pop(request), NoReply("its key was taken away: what it sends is not read")
            self._push(requests, waiting, sent, keys, most)
            for client in sorted(waiting):
                if self.signals.gone(keys[client]):
                    yield client, NoReply("has signed off")
                elif client in self._missed:
                    yield client, NoReply("has not connected since it missed a request")
                else:
                    continue
                waiting.discard(client)
            if waiting and time.monotonic() - began >= _PATIENCE_S and told != sorted(waiting):
                told = sorted(waiting)
                self._tell(told)
            for request, answer in pull(self.grid, list(sent), most, arriving, end):
                client = sent.pop(request)
                if answer is None and again[client] < _AGAIN:
                    again[client] += 1
                    waiting.add(client)
                elif answer is None:
                    yield client, NoReply(f"has lost its request {_AGAIN + 1} times")
                else:
                    self._missed.discard(client)
                    yield client, answer
            time.sleep(_POLL_S)
        self._missed |= {*waiting, *sent.values()}
        away = f"did not connect within {self.timeout:g} seconds"
        late = f"did not answer within {self.timeout:g} seconds"
        yield from ((client, NoReply(away)) for client in sorted(waiting))
        yield from ((client, NoReply(late)) for client in sorted(sent.values()))

    def _tell(self, clients: Sequence[int]) -> None:
        """Tells who is waited for."""
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
        most: int,
    ) -> None:
        """Sends what waits to the clients that are online."""
        if not waiting:
            return
        before = len(sent)
        nodes = {bytes(node.public_key): node.node_id for node in self.grid.get_nodes()}
        for client in sorted(waiting):
            node = nodes.get(keys[client])
            if node is None:
                continue
            message = Message(wrapped(requests[client]), node, KIND, ttl=self.timeout)
            try:
                (pushed,) = self.grid.push_messages([message])
            except ObjectPushError:
                # In an outage Flower repeats what it got no answer to, and refuses what comes twice: sent anew.
                continue
            if pushed:
                sent[pushed] = client
                waiting.discard(client)
        if len(sent) > before:
            self.signals.send(most)
