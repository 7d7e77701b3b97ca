"""How the messages of several clients add up, where their sum is all that a server needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lit_fedad.contracts.message import Message, MessageSpec


@dataclass(frozen=True)
class Crowd:
    """A number of clients, and of their training images.

    Attributes:
        clients: Number of clients.
        images: Number of images that they hold together.
    """

    clients: int
    images: int


@dataclass(frozen=True)
class SumSpec:
    """The form of one tensor of a sum.

    Attributes:
        shape: Its sizes.
        bound: Largest magnitude of an element of the sum over all clients; no client's own exceeds it.
        whole: Whether elements are whole numbers, such as counts.
    """

    shape: tuple[int, ...]
    bound: float
    whole: bool = False


class Additive(Protocol):
    """A way of adding messages up: their sum says as much as one message of a client with all the images.

    ``joined(sum of addends(m_i)) = m``, where m is what one client with the images of all would have sent; servers that
    merge it come to the same as with the single messages.
    """

    def form(self, spec: MessageSpec, everyone: Crowd) -> dict[str, SumSpec]:
        """Declares the form of the sum.

        Args:
            spec: The declared form of messages.
            everyone: All clients that were asked.
        """

    def addends(self, message: Message, own: Crowd, everyone: Crowd) -> dict[str, Tensor]:
        """Computes what a client adds to the sum, of the form `form`.

        Args:
            message: The client's message, of the declared form.
            own: The client.
            everyone: All clients that were asked.
        """

    def joined(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Crowd, everyone: Crowd
    ) -> Message:
        """Computes the message that stands for all clients in a sum.

        Args:
            sums: Sums by name, in float64; whole numbers in int64.
            spec: The declared form of messages.
            answered: The clients in the sum.
            everyone: All clients that were asked.
        """
