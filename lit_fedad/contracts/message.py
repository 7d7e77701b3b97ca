"""Messages between clients and the server, and their declared form."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Message = dict[str, Tensor]
"""A message between a client and the server: named tensors on the CPU with finite values."""

MessageSpec = Mapping[str, "TensorSpec"]
"""The declared form of a message: the form of each tensor by its name."""

LARGEST = 1e9
"""Default bound of the magnitude of values; sums of squares of values up to it are still finite."""

LARGEST_SQUARES = LARGEST**3
"""Bound of sums of squares: of up to `LARGEST` values of a magnitude up to `LARGEST`."""


@dataclass(frozen=True)
class Free:
    """A size that the sender chooses; sizes with the same name are equal in all tensors of a message.

    Attributes:
        name: What is counted, such as ``"classes"``.
        at_most: The largest allowed size; None for no limit.
    """

    name: str
    at_most: int | None = None

    def __str__(self) -> str:
        """Returns the name, followed by the bound if there is one."""
        return self.name if self.at_most is None else f"{self.name} <= {self.at_most}"


@dataclass(frozen=True)
class TensorSpec:
    """The declared form of one tensor of a message.

    Attributes:
        shape: Sizes; `Free` where the sender chooses.
        dtype: Element type.
        low: Smallest value.
        high: Largest value.
        distinct: Whether all values differ from each other, as in a list of classes.
        definite: Whether the last two dimensions are symmetric, positive definite matrices.
        unordered: Whether the rows are a set of vectors, such as a bank: row i of one client has nothing to do with
            row i of another, and robust aggregation compares rows with all rows of others instead.
        counted: Whether values grow with the number of a client's images, as counts do. The method bounds them by that
            number, and they are not compared with the values of other clients.
        exact: Whether codecs must not round the values, because rounding would destroy their meaning, as it does that
            of a covariance of few vectors.
    """

    shape: tuple[int | Free, ...]
    dtype: torch.dtype = torch.float32
    low: float = -LARGEST
    high: float = LARGEST
    distinct: bool = False
    definite: bool = False
    unordered: bool = False
    counted: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        """Refuses a shape that is no tuple.

        Raises:
            TypeError: If the shape is, for example, a single size.
        """
        if not isinstance(self.shape, tuple):
            raise TypeError(f"TensorSpec: shape={self.shape!r} must be a tuple of sizes, such as (8,)")

    @property
    def unrounded(self) -> bool:
        """Whether codecs must not round the values; a rounded matrix may no longer be positive definite."""
        return self.exact or self.definite


SUM = -1
"""The client number of an update that is a sum over several clients, whose single messages the server never sees."""


@dataclass(frozen=True)
class Update:
    """The message that one client sent, and its number of training images.

    Attributes:
        message: The message.
        num_samples: Number of images behind it.
        clients: The clients whose messages were summed; empty if the message is that of one client.
    """

    message: Message
    num_samples: int
    clients: tuple[int, ...] = ()


def senders(updates: Mapping[int, Update]) -> list[int]:
    """Lists the clients behind updates: the senders of single messages, and all clients of a sum."""
    return sorted(sender for client, update in updates.items() for sender in update.clients or (client,))


def class_list(classes: int) -> TensorSpec:
    """Declares a list of different classes, int64 [number of listed classes].

    Args:
        classes: Number of classes K; those listed lie in [0, K).
    """
    return TensorSpec((Free("classes", classes),), torch.int64, low=0, high=classes - 1, distinct=True)


def spec_of(entries: Mapping[str, Tensor]) -> MessageSpec:
    """Declares messages with the names, shapes and types of given tensors; whole numbers are counts, at least 0.

    Example:
        >>> spec = spec_of({"w": torch.zeros(2, 3), "steps": torch.tensor(7)})
        >>> spec["w"].shape, spec["steps"].low
        ((2, 3), 0)
    """
    return {
        name: TensorSpec(tuple(entry.shape), entry.dtype, low=-LARGEST if entry.is_floating_point() else 0)
        for name, entry in entries.items()
    }
