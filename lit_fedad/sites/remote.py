"""The transport to clients that are sites: it sends requests and reads replies over a carrier of bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from lightning.fabric import Fabric

from lit_fedad.contracts import Exchange
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import LARGEST_BLOB, Link, Plain
from lit_fedad.federation.checkpoint import read_meta, read_state, write_state
from lit_fedad.federation.client_runner import ClientResult
from lit_fedad.federation.evaluator import ClientQuery
from lit_fedad.federation.transport import Outcome, Pose, Progress, Sent, SumStep
from lit_fedad.sites.messages import LONGEST_SHARES, LONGEST_START, Reply, Request, digest
from lit_fedad.sites.refusals import Code, text_of
from lit_fedad.sites.status import Contact

T = TypeVar("T")
_FILE = "sites.pt"
_AGAIN = text_of(Code.AGAIN, [])
# A masked message has up to 64 bits for each value, where the message itself may have 16.
_MASKED = 4


@dataclass(frozen=True)
class NoReply:
    """A request that was not answered.

    Attributes:
        cause: Why, in one line.
        away: Whether the site may be gone; if not, it did answer, and its answer is refused.
    """

    cause: str
    away: bool = True


class Carrier(Protocol):
    """Carries bytes to sites and back."""

    def carry(self, requests: Mapping[int, bytes], max_bytes: int) -> Iterator[tuple[int, bytes | NoReply]]:
        """Brings each client its request, and yields the replies.

        Args:
            requests: Bytes by client.
            max_bytes: Most bytes of a reply; of a longer one no more than that should be read.

        Yields:
            Every client with its reply, or the cause why there is none, in the order in which they arrive. Replies are
            not trusted.
        """


def too_long(length: int | None, max_bytes: int) -> NoReply:
    """Says that a reply is longer than its declared form allows.

    Args:
        length: Number of bytes of the reply; None if it was not read to its end.
        max_bytes: Most bytes of a reply.
    """
    return NoReply(
        f"sent {'' if length is None else f'{length}, '}more than {max_bytes} bytes, the most that a reply may have",
        away=False,
    )


class Sites:
    """The transport to sites.

    A site that does not answer costs a round one timeout: it gets no more requests until the next round begins.

    Args:
        carrier: Carries the bytes of requests and replies.
        asked: A request with the values that all requests of the run have in common.
        names: Names of the sites, in the order of their client numbers.
        fabric: Tells callbacks of the progress.
        contacts: When sites have answered, by client; updated here.
        largest: Computes the most bytes that an upload of an exchange may have.

    Attributes:
        products: Names of all sites' products, once the sites have named them.
        told_apart: The products that the model tells apart.
        step: Number of the last request; each `play` and `ask` has one number for all clients.
        left_out: Sites that differ from the coordinator or came too late, and why, by client.
        absent: Sites that take no part, including those left out, and why, by client.
        bases: Step after which each client's current state was stored, as far as the server knows.
        settled: The same as in the last complete checkpoint.
    """

    def __init__(
        self,
        carrier: Carrier,
        asked: Request,
        names: Sequence[str],
        fabric: Fabric,
        contacts: dict[int, Contact],
        largest: Callable[[Exchange], int] = lambda exchange: LARGEST_BLOB,
    ) -> None:
        self.carrier, self.asked, self.names, self.largest = carrier, asked, list(names), largest
        self.products, self.told_apart = list[str](), list[str]()
        self.progress = Progress(fabric, range(len(names)))
        self.contacts = contacts
        self.step = 0
        self.bases = dict.fromkeys(range(len(names)), 0)
        self.settled = dict(self.bases)
        self._played: dict[int, int] = {}  # step of the last turn that is not settled yet, by client
        self._sent: dict[int, str] = {}  # hash of the message in a site's last request, by client
        self.left_out: Mapping[int, str] = {}
        self.absent: Mapping[int, str] = {}
        self._round: int | None = None
        self._away: dict[int, str] = {}  # why sites get no more requests in this round, by client

    def hello(self, clients: Collection[int]) -> Outcome[Reply]:
        """Asks sites to say who they are (`Facts`)."""
        return self._carry(
            {client: replace(self.asked, kind="hello", client=client) for client in clients}, 0
        )

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every site that a message is for; see `Transport.play`.

        Raises:
            UserError: If clients are to be scored right after training, which sites cannot do.
        """
        if scored:
            raise UserError("sites are not scored right after training: this data cannot be evaluated there")
        if sent.context.round != self._round:
            self._round, self._away = sent.context.round, {}
        max_bytes = self.largest(sent.exchange) * (_MASKED if envelopes else 1)
        replies = self._send("play", sent, max_bytes, envelopes or {})
        self._played |= dict.fromkeys(replies.values, self.step)
        results = {c: ClientResult(reply.payload, reply.scalars) for c, reply in replies.values.items()}
        return Outcome(results, replies.failures)

    def settle(self, counted: Collection[int]) -> None:
        """Notes which sites go on from their last turn, and which from the state before it; see `Transport.settle`."""
        self.bases |= {client: step for client, step in self._played.items() if client in counted}
        self._played = {}

    def confer(self, step: SumStep, blobs: Mapping[int, bytes]) -> Outcome[bytes]:
        """Brings sites the messages of a secure sum; see `Transport.confer`."""
        requests = {c: self._request(step, c, names=self.names, payload=blob) for c, blob in blobs.items()}
        replies = self._carry(requests, LONGEST_SHARES, turns=False)
        return Outcome({client: reply.payload for client, reply in replies.values.items()}, replies.failures)

    def ask(self, query: ClientQuery[T], sent: Sent, pose: Pose) -> Outcome[T]:
        """Asks a query of every site that a message is for; see `Transport.ask`.

        Raises:
            UserError: If the query is local, or clients are to predict with another model than their own.
        """
        if query.local or pose.which != "own" or pose.lent:
            raise UserError(
                f"{query.name}: sites answer queries of a declared form alone, with the model that predicts there"
            )
        link = Link(Plain())
        asked = {"question": query.name, "numbers": dict(query.numbers), "names": self.products}
        max_bytes = link.largest(query.spec())
        replies = self._send("ask", sent, max_bytes, {}, **asked, keep=pose.keep, sums=pose.sums)
        outcome: Outcome[Any] = Outcome({}, dict(replies.failures))
        for client, reply in replies.values.items():
            try:
                message = link.unpack(reply.payload, query.spec(), "the client")
                outcome.values[client] = query.unpack(message)
            except UserError as error:
                outcome.failures[client] = str(error)
        if pose.keep:
            self.bases |= dict.fromkeys(outcome.values, self.step)
        return outcome

    def save(self, folder: Path, previous: Path | None) -> None:
        """Writes the step of every site's state to a checkpoint."""
        state = {"step": self.step, "bases": self.bases, "away": self._away}
        state["contacts"] = {client: asdict(contact) for client, contact in self.contacts.items()}
        write_state(state, folder / _FILE)
        self._round = None  # the round is over
        self.settled = dict(self.bases)

    def restore(self, folder: Path) -> None:
        """Goes back to the steps of a checkpoint."""
        state = read_state(folder / _FILE, read_meta(folder)["files"].get(_FILE))
        self.step, self.bases = state["step"], self.bases | state["bases"]
        for client, stored in state["contacts"].items():
            seen = self.contacts[client].last_seen
            self.contacts[client] = Contact(**{**stored, "last_seen": seen or stored["last_seen"]})
        self._round, self._away = None, dict(state["away"])
        self.settled = dict(self.bases)

    def _request(self, kind: Any, client: int, **more: Any) -> Request:
        """Builds a request to a site of this run."""
        return replace(self.asked, kind=kind, client=client, products=self.told_apart, **more)

    def _send(
        self,
        kind: Literal["play", "ask"],
        sent: Sent,
        max_bytes: int,
        sealed: Mapping[int, bytes],
        **more: Any,
    ) -> Outcome[Reply]:
        """Sends the next request to every site that a message is for.

        A message that a site got with its last request is not sent again, but named by its hash. `max_bytes` bounds the
        payload of a reply; `sealed` has the envelopes of a secure sum by client.
        """
        self.step += 1
        _, context, blobs = sent
        place = {"round": context.round, "exchange": context.exchange, "step": self.step}
        common = self._request(kind, 0, **place, **more)

        def request(client: int, **message: Any) -> Request:
            base, settled = self.bases[client], self.settled[client]
            return replace(common, client=client, base=base, settled=settled, **message)

        def whole(client: int) -> Request:
            envelopes = sealed.get(client, b"")
            return request(client, sealed=len(envelopes), payload=envelopes + blobs[client])

        hashes = {client: digest(blob) for client, blob in blobs.items()}
        known = {c for c in blobs if hashes[c] and self._sent.get(c) == hashes[c] and c not in sealed}
        requests = {c: request(c, same=hashes[c]) if c in known else whole(c) for c in blobs}
        outcome = self._carry(requests, max_bytes)
        if again := [c for c, cause in outcome.failures.items() if c in known and cause == _AGAIN]:
            second = self._carry({client: whole(client) for client in again}, max_bytes)
            failures = {c: cause for c, cause in outcome.failures.items() if c not in again} | second.failures
            outcome = Outcome(dict(sorted((outcome.values | second.values).items())), failures)
        for client in blobs:
            self._sent[client] = hashes[client] if client in outcome.values else ""
        return outcome

    def _carry(self, requests: Mapping[int, Request], payload: int, turns: bool = True) -> Outcome[Reply]:
        """Has the carrier bring sites their requests, and reads the replies.

        Args:
            requests: The requests by client.
            payload: Most bytes of a reply's payload.
            turns: Whether each reply is a step of the progress that is shown.
        """
        max_bytes = LONGEST_START + payload
        outcome: Outcome[Reply] = Outcome({}, {})
        received: dict[int, bytes | NoReply] = {
            c: NoReply(cause) for c, cause in self._away.items() if c in requests
        }
        for _ in received if turns else ():
            self.progress.step()
        began = time.monotonic()
        blobs = {c: request.to_bytes() for c, request in requests.items() if c not in received}
        for client, reply in self.carrier.carry(blobs, max_bytes) if blobs else ():
            if not isinstance(reply, NoReply) and len(reply) > max_bytes:
                reply = too_long(len(reply), max_bytes)
            received[client] = reply
            if isinstance(reply, NoReply):
                if reply.away and requests[client].kind != "hello":
                    self._away[client] = reply.cause
            else:
                self.contacts[client].note(time.monotonic() - began)
            if turns:
                self.progress.step()
        for client in sorted(requests):
            reply = received.get(client, NoReply("no reply came"))
            try:
                outcome.values[client] = _reply(reply, requests[client].step)
            except UserError as error:
                outcome.failures[client] = str(error)
        return outcome


def _reply(received: bytes | NoReply, step: int) -> Reply:
    """Reads the reply to the request of a step.

    Raises:
        UserError: If there is no reply, it cannot be read, or it says why the site does not answer.
    """
    if isinstance(received, NoReply):
        raise UserError(received.cause)
    reply = Reply.from_bytes(received)
    if reply.cause:
        raise UserError(reply.cause)
    if reply.step != step:
        raise UserError(f"answered request {reply.step} instead of {step}")
    return reply
