"""Messages between clients and the server, and their declared form."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Message = dict[str, Tensor]
"""A message between a client and the server: named tensors on the CPU with finite values."""

MessageSpec = Mapping[str, "TensorSpec"]
"""The declared form of a message by name of its tensors."""

LARGEST = 1e9
"""Largest magnitude of a value whose form declares no other: sums of squares of such values are still finite."""


@dataclass(frozen=True)
class Free:
    """A size that the sender chooses; sizes of one name are equal in all tensors of a message.

    Attributes:
        name: What is counted, such as ``"classes"``.
        at_most: The largest size; None for any.
    """

    name: str
    at_most: int | None = None

    def __str__(self) -> str:
        """Returns the name, with the bound."""
        return self.name if self.at_most is None else f"{self.name} <= {self.at_most}"


@dataclass(frozen=True)
class TensorSpec:
    """The declared form of one tensor of a message.

    Attributes:
        shape: Sizes; `Free` where the sender chooses.
        dtype: Element type.
        low: Smallest value.
        high: Largest value.
        distinct: Whether all values differ, as those of a list of classes do.
        definite: Whether the last two dimensions are symmetric, positive definite matrices.
        unordered: Whether the rows are a set of vectors, such as a bank: row i of one client has nothing to do with
            row i of another, and robust aggregation compares rows with all rows of others instead.
        counted: Whether values grow with the number of a client's images, as counts do: the method bounds them by it,
            and they are not compared with those of other clients.
        exact: Whether no codec rounds it: rounded, it would not be what it is, as a covariance of few vectors.
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
        """Refuses a shape that is none.

        Raises:
            TypeError: If it is a size alone.
        """
        if not isinstance(self.shape, tuple):
            raise TypeError(f"TensorSpec: shape={self.shape!r} must be a tuple of sizes, such as (8,)")

    @property
    def unrounded(self) -> bool:
        """Whether no codec rounds it; a rounded matrix may be no longer positive definite."""
        return self.exact or self.definite


SUM = -1
"""The number under which servers receive a message that stands for several clients, whose own they never see."""


@dataclass(frozen=True)
class Update:
    """The message that one client sent, and its number of training images.

    Attributes:
        message: The message.
        num_samples: Number of images behind it.
        clients: The clients that it stands for, where their messages were summed; empty where it is one client's own.
    """

    message: Message
    num_samples: int
    clients: tuple[int, ...] = ()


def senders(updates: Mapping[int, Update]) -> list[int]:
    """Lists the clients behind updates: the senders of single messages, and all behind a sum."""
    return sorted(one for client, update in updates.items() for one in update.clients or (client,))


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
