"""Questions to clients that can cross to other machines: named, and with a declared form of their answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from lit_fedad.contracts import Client, Message, MessageSpec

T = TypeVar("T")


class Question(Generic[T]):
    """A question that a federation asks its clients.

    A client's machine and the server each build the question from their own configuration; only its name and its
    numbers cross, and the answer as a message. In one process it is called as any other function.

    Attributes:
        name: Name, the same on both sides.
        numbers: Numbers that are part of the question, by name.
    """

    name: str
    numbers: Mapping[str, float] = {}

    def __call__(self, client: Client, number: int) -> T:
        """Answers with the live client, where its images are.

        Args:
            client: The live client, as it predicts.
            number: Client number.
        """
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
