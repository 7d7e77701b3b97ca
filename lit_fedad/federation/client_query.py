"""Client queries: what a federation asks its clients, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from lit_fedad.contracts import Client, Message, MessageSpec
from lit_fedad.contracts.disclosure import Discloses, Disclosures

T = TypeVar("T")


class ClientQuery(Discloses, Generic[T]):
    """A query that every client answers with its live model, where its images are.

    In one process the answer is the returned value. A client on another machine builds the query from its own
    configuration: only the query's name and its numbers cross, and the answer as a message of a declared form.

    Attributes:
        name: Name, the same on both sides.
        numbers: Numbers that are part of the query, by name.
        local: Whether the answer has no declared form. Clients on other machines are not asked such a query.
        discloses: What the answer tells of a client's images. A class that overrides `pack` says it anew.
    """

    sends = "pack"
    name: str
    numbers: Mapping[str, float] = {}
    local: bool = False
    discloses: Disclosures = ()

    def __call__(self, client: Client, number: int) -> T:
        """Answers with the live client."""
        raise NotImplementedError

    def pack(self, answer: T) -> Message:
        """Returns an answer as a message."""
        raise NotImplementedError

    def spec(self) -> MessageSpec:
        """Declares the form of the message."""
        raise NotImplementedError

    def unpack(self, message: Message) -> T:
        """Builds an answer from a message of the declared form.

        Raises:
            UserError: If it says what no answer can.
        """
        raise NotImplementedError


class LocalQuery(ClientQuery[T]):
    """A query whose answer stays in the federation's processes, such as tensors for a figure.

    Args:
        name: Name, for errors.
        answer: The answer, of the live client and its number.
    """

    local = True

    def __init__(self, name: str, answer: Callable[[Client, int], T]) -> None:
        self.name, self._answer = name, answer

    def __call__(self, client: Client, number: int) -> T:
        """Answers with the live client."""
        return self._answer(client, number)
