"""The transport to clients that are sites: requests and replies over a carrier that only knows bytes."""

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
# Words of a masked message have up to 64 bits, where the message has 16.
_MASKED = 4


@dataclass(frozen=True)
class NoReply:
    """A request that was not answered.

    Attributes:
        cause: Why, in one line.
        away: Whether its site may be gone; else it did answer, and what came is refused.
    """

    cause: str
    away: bool = True


class Carrier(Protocol):
    """The way of bytes to sites and back."""

    def carry(self, requests: Mapping[int, bytes], most: int) -> Iterator[tuple[int, bytes | NoReply]]:
        """Brings each client its request, and yields what came back.

        Args:
            requests: Bytes by client.
            most: Most bytes of a reply; of a longer one no more than that should be read.

        Yields:
            Every client with its reply, or why there is none, as they come. Replies are not trusted.
        """


def too_long(length: int | None, most: int) -> NoReply:
    """Says that a reply is longer than any of its declared form.

    Args:
        length: Its number of bytes; None where it was not read to its end.
        most: Most bytes of a reply.
    """
    return NoReply(
        f"sent {'' if length is None else f'{length}, '}more than {most} bytes, the most that a reply may have",
        away=False,
    )


class Sites:
    """The transport to sites.

    A site that does not answer costs its round one timeout: until the next round begins it is asked nothing more.

    Args:
        carrier: Carries bytes.
        asked: A request of the run, with what all of them have in common.
        names: Names of the sites, in the order of their client numbers.
        fabric: Tells callbacks of the progress.
        contacts: Is told when sites answer, by client.
        largest: Computes the most bytes that an exchange's uploads may have.

    Attributes:
        products: Names of all sites' products, once they have said who they are.
        told_apart: Those of them that the model tells apart.
        step: Number of requests that were given so far.
        left_out: Sites that are asked nothing, and why.
        absent: Sites that take no part, these among them, and why.
        bases: Step of the state that each client has, as far as the server knows.
        settled: The same in the last complete checkpoint.
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
        self._played: dict[int, int] = {}
        self._sent: dict[int, str] = {}
        self.left_out: Mapping[int, str] = {}
        self.absent: Mapping[int, str] = {}
        self._round: int | None = None
        self._away: dict[int, str] = {}

    def hello(self, clients: Collection[int]) -> Outcome[Reply]:
        """Asks sites who they are."""
        return self._carry(
            {client: replace(self.asked, kind="hello", client=client) for client in clients}, 0
        )

    def play(
        self, sent: Sent, scored: Collection[int], envelopes: Mapping[int, bytes] | None = None
    ) -> Outcome[ClientResult]:
        """Plays an exchange with every site that a message is for; see `Transport.play`.

        Raises:
            UserError: If clients are to be scored right after training, which sites are not.
        """
        if scored:
            raise UserError("sites are not scored right after training: this data cannot be evaluated there")
        if sent.context.round != self._round:
            self._round, self._away = sent.context.round, {}
        most = self.largest(sent.exchange) * (_MASKED if envelopes else 1)
        replies = self._send("play", sent, most, envelopes or {})
        self._played |= dict.fromkeys(replies.values, self.step)
        results = {c: ClientResult(reply.payload, reply.scalars) for c, reply in replies.values.items()}
        return Outcome(results, replies.failures)

    def settle(self, counted: Collection[int]) -> None:
        """Has sites go on from their last turns or from before; see `Transport.settle`."""
        self.bases |= {client: step for client, step in self._played.items() if client in counted}
        self._played = {}

    def confer(self, step: SumStep, blobs: Mapping[int, bytes]) -> Outcome[bytes]:
        """Brings sites messages of a secure sum; see `Transport.confer`."""
        asked = {c: self._request(step, c, names=self.names, payload=blob) for c, blob in blobs.items()}
        replies = self._carry(asked, LONGEST_SHARES, turns=False)
        return Outcome({client: reply.payload for client, reply in replies.values.items()}, replies.failures)

    def ask(self, query: ClientQuery[T], sent: Sent, pose: Pose) -> Outcome[T]:
        """Asks every site that a message is for; see `Transport.ask`.

        Raises:
            UserError: If the query is local, or clients are not to predict with their own model.
        """
        if query.local or pose.which != "own" or pose.lent:
            raise UserError(
                f"{query.name}: sites answer queries of a declared form alone, with the model that predicts there"
            )
        answer = Link(Plain())
        asked = {"question": query.name, "numbers": dict(query.numbers), "names": self.products}
        most = answer.largest(query.spec())
        replies = self._send("ask", sent, most, {}, **asked, keep=pose.keep, sums=pose.sums)
        outcome: Outcome[Any] = Outcome({}, dict(replies.failures))
        for client, reply in replies.values.items():
            try:
                message = answer.unpack(reply.payload, query.spec(), "the client")
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
        self._round = None  # it is over
        self.settled = dict(self.bases)

    def restore(self, folder: Path) -> None:
        """Goes back to the steps of a checkpoint."""
        state = read_state(folder / _FILE, read_meta(folder)["files"].get(_FILE))
        self.step, self.bases = state["step"], self.bases | state["bases"]
        for client, noted in state["contacts"].items():
            seen = self.contacts[client].last_seen
            self.contacts[client] = Contact(**{**noted, "last_seen": seen or noted["last_seen"]})
        self._round, self._away = None, dict(state["away"])
        self.settled = dict(self.bases)

    def _request(self, kind: Any, client: int, **more: Any) -> Request:
        """Builds a request to a site of this run."""
        return replace(self.asked, kind=kind, client=client, products=self.told_apart, **more)

    def _send(
        self,
        kind: Literal["play", "ask"],
        sent: Sent,
        most: int,
        sealed: Mapping[int, bytes],
        **more: Any,
    ) -> Outcome[Reply]:
        """Gives every site that a message is for the next request; what it was sent in the last is not sent again."""
        self.step += 1
        _, context, blobs = sent
        place = {"round": context.round, "exchange": context.exchange, "step": self.step}
        common = self._request(kind, 0, **place, **more)

        def request(client: int, **message: Any) -> Request:
            base, settled = self.bases[client], self.settled[client]
            return replace(common, client=client, base=base, settled=settled, **message)

        def whole(client: int) -> Request:
            own = sealed.get(client, b"")
            return request(client, sealed=len(own), payload=own + blobs[client])

        hashes = {client: digest(blob) for client, blob in blobs.items()}
        known = {c for c in blobs if hashes[c] and self._sent.get(c) == hashes[c] and c not in sealed}
        requests = {c: request(c, same=hashes[c]) if c in known else whole(c) for c in blobs}
        outcome = self._carry(requests, most)
        if again := [c for c, cause in outcome.failures.items() if c in known and cause == _AGAIN]:
            second = self._carry({client: whole(client) for client in again}, most)
            failures = {c: cause for c, cause in outcome.failures.items() if c not in again} | second.failures
            outcome = Outcome(dict(sorted((outcome.values | second.values).items())), failures)
        for client in blobs:
            self._sent[client] = hashes[client] if client in outcome.values else ""
        return outcome

    def _carry(self, requests: Mapping[int, Request], message: int, turns: bool = True) -> Outcome[Reply]:
        """Has requests carried, and reads the replies."""
        most = LONGEST_START + message
        outcome: Outcome[Reply] = Outcome({}, {})
        carried: dict[int, bytes | NoReply] = {
            c: NoReply(cause) for c, cause in (self._away | dict(self.left_out)).items() if c in requests
        }
        for _ in carried if turns else ():
            self.progress.step()
        began = time.monotonic()
        asked = {c: request.to_bytes() for c, request in requests.items() if c not in carried}
        for client, found in self.carrier.carry(asked, most) if asked else ():
            if not isinstance(found, NoReply) and len(found) > most:
                found = too_long(len(found), most)
            carried[client] = found
            if isinstance(found, NoReply):
                if found.away and requests[client].kind != "hello":
                    self._away[client] = found.cause
            else:
                self.contacts[client].note(time.monotonic() - began)
            if turns:
                self.progress.step()
        for client in sorted(requests):
            found = carried.get(client, NoReply("no reply came"))
            try:
                outcome.values[client] = _reply(found, requests[client].step)
            except UserError as error:
                outcome.failures[client] = str(error)
        return outcome


def _reply(found: bytes | NoReply, step: int) -> Reply:
    """Reads the reply to the request of a step.

    Raises:
        UserError: If it is none, or says why the site does not answer.
    """
    if isinstance(found, NoReply):
        raise UserError(found.cause)
    reply = Reply.from_bytes(found)
    if reply.cause:
        raise UserError(reply.cause)
    if reply.step != step:
        raise UserError(f"answered request {reply.step} instead of {step}")
    return reply
