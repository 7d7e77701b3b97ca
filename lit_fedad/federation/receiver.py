"""The server's end of an exchange: messages are checked on receipt, and merged only if the result can be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from lit_fedad.contracts import (
    SUM,
    Client,
    Context,
    Exchange,
    Exchanges,
    Message,
    MessageSpec,
    Server,
    Update,
    senders,
)
from lit_fedad.contracts.state import leaves, load_state, mapped, state_of
from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.federation.channel import Link
from lit_fedad.federation.client_runner import own_scale
from lit_fedad.federation.message_check import check, outliers

FAR = 100.0
"""How many times larger than usual the values of a message may be; see `outliers`."""


Remark = tuple[int, str]
"""A client, and what is to be said of it."""


class Robust(Protocol):
    """A defence against clients whose messages have the declared form and lie."""

    def __call__(
        self, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
    ) -> tuple[dict[int, Update], list[Remark]]:
        """Returns the updates to merge, and remarks on clients."""


@dataclass
class Merged:
    """The result of merging.

    Attributes:
        refused: Causes by client whose messages were not merged.
        remarks: Remarks on clients, for the user, one line each.
        left_out: Clients that a robust rule distrusts, and whose messages it left out.
    """

    refused: dict[int, str] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Receiver:
    """The receiver of the clients' messages.

    Attributes:
        client: The live client, for declared forms.
        link: The link from clients to the server.
        robust: Defence against lies; None for none.
    """

    server: Server
    client: Client
    link: Link
    robust: Robust | None = None
    names: ClientNames = NUMBERS

    def open(self, exchange: Exchange, client: int, blob: bytes, num_samples: int) -> Update:
        """Checks the bytes of one client.

        Args:
            exchange: The current exchange.
            client: Number of the client.
            blob: What it sent; not trusted.
            num_samples: Its number of training images.

        Raises:
            UserError: If the bytes hold no message, or one that is not of the declared form or refused by the method.
        """
        message = self.link.unpack(blob, exchange.upload_spec(self.client), "the client")
        update = Update(message, num_samples)
        exchange.validate(self.server, client, update)
        return update

    def merge(
        self,
        exchange: Exchange,
        updates: Mapping[int, Update],
        clients: Sequence[int],
        exchanges: Exchanges,
        context: Context,
    ) -> Merged:
        """Merges updates into the server, so that what it sends next has its declared form.

        Where merging fails, or leaves a state that cannot be sent, the server returns to its state before, and merges
        without the clients at fault: those whose message cannot be merged alone, or else the one without which the
        others can be merged. Where merging draws noise, no client is tried alone.

        Raises:
            UserError: If no message can be merged.
            Exception: Whatever merging raised, if it cannot be laid to single clients.
        """
        previous = exchange.broadcast(self.server, senders(updates)[0])
        spec = exchange.upload_spec(self.client)
        if SUM in updates:  # single messages were checked when they were opened
            try:
                exchange.validate(self.server, SUM, updates[SUM])
            except UserError as refused:
                raise UserError(
                    f"round {context.round}: the sum of the clients' messages cannot be merged, and does not tell whose"
                    f" it is ({refused})"
                ) from refused
        merged = Merged(outliers(updates, previous, FAR, spec))
        left = {client: update for client, update in updates.items() if client not in merged.refused}
        if self.robust is not None and left:
            left, merged.remarks = self.robust(left, spec, previous)
            # Of those that it only did not choose (Krum) nothing is said, and they are not distrusted.
            merged.left_out = {client for client, _ in merged.remarks if client not in left}
        if not left:
            client, cause = [*merged.refused.items(), *merged.remarks][0]
            who = "all clients together" if client == SUM else self.names.title(client)
            raise UserError(f"round {context.round}: no message can be merged; {who} {cause}")
        attempt = _Attempt(self, exchange, clients, exchanges, context)
        error = attempt(left)
        if error is not None:
            # Noise is nobody's fault, and each further merge would draw, and tell, a sum that no epsilon counts.
            at_fault = [] if exchange.noised else attempt.at_fault(left)
            if not at_fault:
                raise error
            text = f"sent what cannot be merged ({first_line(error)})"
            merged.refused |= dict.fromkeys(at_fault, text)
        return merged


class ServerSnapshot:
    """A snapshot that shares the server's tensors and copies what holds them.

    It costs no memory: servers replace their tensors (`Server.aggregate`), so that those of the snapshot stay as they
    were. `check` finds a server that does not.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.state = server, _copied(state_of(server))
        self._versions = _versions(self.state)

    def check(self) -> None:
        """Checks that no tensor has changed since.

        Raises:
            TypeError: If one has, by the names of the server's class and of the attribute.
        """
        for name in _changed(self.state, self._versions):
            raise TypeError(
                f"{type(self.server).__name__}: merging changes '{name}' in place; put a new tensor there, so that"
                " the server can return to its state before"
            )

    def restore(self) -> None:
        """Returns the server to this state; the snapshot can be used again."""
        self.check()
        load_state(self.server, _copied(self.state))


def _versions(state: Any) -> dict[str, int]:
    """Counts how often each tensor in nested containers was changed in place, by dotted names."""
    tensors = {name: value for name, value in leaves(state) if isinstance(value, Tensor)}
    # Tensors of inference mode do not count.
    return {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}


def _changed(state: Any, before: Mapping[str, int]) -> Iterator[str]:
    """Yields the dotted names of tensors that were changed in place since `_versions`."""
    return (name for name, version in _versions(state).items() if version != before[name])


def _copied(state: Any) -> Any:
    """Copies containers, and values of other types; shares tensors whose changes are counted."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return deepcopy(value)
        return value.clone() if value.is_inference() else value

    return mapped(state, copied)


@dataclass
class _Attempt:
    """A merge that leaves the server as it was where it fails."""

    receiver: Receiver
    exchange: Exchange
    clients: Sequence[int]
    exchanges: Exchanges
    context: Context

    def __post_init__(self) -> None:
        self.before = ServerSnapshot(self.receiver.server)

    def __call__(self, updates: Mapping[int, Update]) -> Exception | None:
        """Merges updates; returns what went wrong, or None."""
        messages = {client: update.message for client, update in updates.items()}
        sent = _versions(messages)
        try:
            if not updates:
                raise UserError("no message is left")
            with own_scale(self.receiver.server.fabric):
                self.exchange.aggregate(self.receiver.server, updates)
            self._check_next()
        except Exception as error:
            self.restore()
            return error
        self.before.check()
        for changed in _changed(messages, sent):  # tries that follow and callbacks read messages too
            client, _, name = changed.partition(".")
            raise TypeError(
                f"{type(self.receiver.server).__name__}: merging changes '{name}' of client {client}'s message in"
                " place; compute a new tensor"
            )
        return None

    def at_fault(self, updates: Mapping[int, Update]) -> list[int]:
        """Finds the clients without whom merging succeeds, and merges the others; empty if it cannot be told."""
        alone = [client for client, update in updates.items() if not self._succeeds({client: update})]
        if alone and self(_without(updates, alone)) is None:
            return alone
        mends = [client for client in updates if self._succeeds(_without(updates, [client]))]
        # Where either of two could be the one, neither is.
        if len(mends) == 1 and self(_without(updates, mends)) is None:
            return mends
        return []

    def _succeeds(self, updates: Mapping[int, Update]) -> bool:
        """Returns whether updates can be merged, without merging them."""
        error = self(updates)
        self.restore()
        return error is None

    def restore(self) -> None:
        """Returns the server to its state before the merge."""
        self.before.restore()
        self.receiver.server.context = self.context

    def _check_next(self) -> None:
        """Checks the server's next message to each client."""
        server, client = self.receiver.server, self.receiver.client
        following = self.exchanges.after(self.context)
        server.context = following
        exchange = self.exchanges.at(following)
        spec = exchange.broadcast_spec(client)
        checked: list[Any] = []
        for number in self.clients:
            message = exchange.broadcast(server, number)
            if not any(_same(message, other) for other in checked):
                check(message, spec, "the server")
                checked.append(message)
        server.context = self.context


def _same(message: Message, other: Message) -> bool:
    """Returns whether two messages hold the very same tensors."""
    if message is other:
        return True
    return message.keys() == other.keys() and all(message[name] is other[name] for name in message)


def _without(updates: Mapping[int, Update], clients: Sequence[int]) -> dict[int, Update]:
    return {client: update for client, update in updates.items() if client not in clients}
