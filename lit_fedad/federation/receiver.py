"""The server's side of an exchange: it checks messages on receipt, and merges them only if the result can be used."""

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
"""Largest accepted ratio between the values of a message and usual values; see `outliers`."""


Remark = tuple[int, str]
"""A client number, and a remark on that client for the user."""


class Robust(Protocol):
    """A defence against clients that send false values in the declared form."""

    def __call__(
        self, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
    ) -> tuple[dict[int, Update], list[Remark]]:
        """Returns the updates to merge, and remarks on clients."""


def judged(
    rule: Robust, updates: Mapping[int, Update], spec: MessageSpec, previous: Message
) -> tuple[dict[int, Update], list[Remark]]:
    """Applies a robust rule, which may be the user's own.

    Raises:
        TypeError: If it returns anything but updates of these clients, and remarks.
    """
    given = rule(updates, spec, previous)
    match given:
        case (dict() as kept, [*remarks]) if (
            kept.keys() <= updates.keys()
            and all(isinstance(update, Update) for update in kept.values())
            and all(isinstance(remark, tuple) and len(remark) == 2 for remark in remarks)
        ):
            return kept, remarks
    name = getattr(rule, "__name__", type(rule).__name__)  # a function, or an object of a class
    raise TypeError(
        f"{name} gives a {type(given).__name__}; give two: a dictionary of the updates to merge by client, and a list"
        " of remarks, (client, text)"
    )


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
        server: The method's server, into which messages are merged.
        client: The live client, which knows the declared forms.
        link: The link from clients to the server.
        robust: Defence against false values; None for none.
        names: Names of the clients in messages.
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
            blob: The bytes that it sent; they are not trusted.
            num_samples: Its number of training images.

        Raises:
            UserError: If the bytes hold no message, or a message that differs from the declared form or that the method
                refuses.
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
        """Merges updates into the server, so that its next message has the declared form.

        If merging fails, or leaves a state that cannot be sent, the server is restored, and merges again without the
        clients at fault: those whose message cannot be merged alone, or else the one client without whom the others can
        be merged. If merging draws noise, no clients at fault are sought.

        Raises:
            UserError: If no message can be merged.
            Exception: The error of merging, if it cannot be attributed to single clients.
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
        accepted = {client: update for client, update in updates.items() if client not in merged.refused}
        if self.robust is not None and accepted:
            accepted, merged.remarks = judged(self.robust, accepted, spec, previous)
            # A client without a remark, which the rule (Krum) merely did not choose, is not distrusted.
            merged.left_out = {client for client, _ in merged.remarks if client not in accepted}
        if not accepted:
            client, cause = [*merged.refused.items(), *merged.remarks][0]
            who = "all clients together" if client == SUM else self.names.title(client)
            raise UserError(f"round {context.round}: no message can be merged; {who} {cause}")
        attempt = _Attempt(self, exchange, clients, exchanges, context)
        error = attempt(accepted)
        if error is not None:
            # With noise no client is at fault, and each further merge would release a sum that epsilon does not count.
            at_fault = [] if exchange.noised else attempt.at_fault(accepted)
            if not at_fault:
                raise error
            text = f"sent what cannot be merged ({first_line(error)})"
            merged.refused |= dict.fromkeys(at_fault, text)
        return merged


class ServerSnapshot:
    """A snapshot of the server's state, which shares its tensors and copies their containers.

    It needs no memory for tensors: servers replace their tensors (`Server.aggregate`), so the snapshot's tensors stay
    unchanged. `check` finds a server that changes them in place.
    """

    def __init__(self, server: Server) -> None:
        self.server, self.state = server, _copied(state_of(server))
        self._versions = _versions(self.state)

    def check(self) -> None:
        """Checks that no tensor has changed since the snapshot was taken.

        Raises:
            TypeError: If a tensor has changed; the error names the server's class and the attribute.
        """
        for name in _changed(self.state, self._versions):
            raise TypeError(
                f"{type(self.server).__name__}: merging changes '{name}' in place; put a new tensor there, so that"
                " the server can return to its state before"
            )

    def restore(self) -> None:
        """Restores the server to this state; the snapshot can be used again."""
        self.check()
        load_state(self.server, _copied(self.state))


def _versions(state: Any) -> dict[str, int]:
    """Returns, by dotted name, how often each tensor in nested containers was changed in place."""
    tensors = {name: value for name, value in leaves(state) if isinstance(value, Tensor)}
    # torch does not count changes of tensors that were made in inference mode.
    return {name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()}


def _changed(state: Any, before: Mapping[str, int]) -> Iterator[str]:
    """Yields the dotted names of tensors that were changed in place since `_versions`."""
    return (name for name, version in _versions(state).items() if version != before[name])


def _copied(state: Any) -> Any:
    """Copies containers and values, but shares those tensors whose changes torch counts."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return deepcopy(value)
        return value.clone() if value.is_inference() else value

    return mapped(state, copied)


@dataclass
class _Attempt:
    """A merge that restores the server if it fails."""

    receiver: Receiver
    exchange: Exchange
    clients: Sequence[int]
    exchanges: Exchanges
    context: Context

    def __post_init__(self) -> None:
        self.before = ServerSnapshot(self.receiver.server)

    def __call__(self, updates: Mapping[int, Update]) -> Exception | None:
        """Merges updates; returns the error if that fails, else None."""
        messages = {client: update.message for client, update in updates.items()}
        versions = _versions(messages)
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
        for changed in _changed(messages, versions):  # later attempts and callbacks read messages too
            client, _, name = changed.partition(".")
            raise TypeError(
                f"{type(self.receiver.server).__name__}: merging changes '{name}' of client {client}'s message in"
                " place; compute a new tensor"
            )
        return None

    def at_fault(self, updates: Mapping[int, Update]) -> list[int]:
        """Finds the clients at fault, and merges the other clients; returns an empty list if none can be identified."""
        alone = [client for client, update in updates.items() if not self._succeeds({client: update})]
        if alone and self(_without(updates, alone)) is None:
            return alone
        suspects = [client for client in updates if self._succeeds(_without(updates, [client]))]
        # If merging succeeds without either of two clients, the one at fault cannot be identified.
        if len(suspects) == 1 and self(_without(updates, suspects)) is None:
            return suspects
        return []

    def _succeeds(self, updates: Mapping[int, Update]) -> bool:
        """Returns whether updates can be merged; the server keeps its state."""
        error = self(updates)
        self.restore()
        return error is None

    def restore(self) -> None:
        """Restores the server to its state before the merge."""
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
