"""The sums that a model is made of, sent to clients so that they can take images of their own out of it again."""

from __future__ import annotations

from typing import ClassVar, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import SUM, Client, LeaveOut, Message, MessageSpec, Server, Task, TensorSpec
from lit_fedad.contracts.client import Predictors
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments
from lit_fedad.methods.parts.pooled_moments import HoldsMoments, held_moments, packed, packed_spec, unpacked
from lit_fedad.tasks.patches import PatchTask


class TakesSums(Protocol):
    """A client that can take images out of sums.

    Attributes:
        sums: The last message of `ModelSums`.
    """

    sums: Message

    def receive(self, message: Message) -> None:
        """Loads the server's message."""

    def broadcast_spec(self) -> MessageSpec:
        """Declares the server's message."""

    def sums_spec(self) -> MessageSpec:
        """Declares the sums."""


T = TypeVar("T", bound=TakesSums, contravariant=True)  # the method's client


class HoldsSums(Protocol):
    """A server whose model is made of sums."""

    def broadcast(self, client_id: int) -> Message:
        """Returns the server's message."""

    def model_sums(self, client_id: int) -> Message:
        """Returns the sums."""


class ModelSums(LeaveOut[T, HoldsSums]):
    """The exchange after the rounds in which clients receive the model, and the sums that it is made of."""

    name = "sums"
    up = False

    def broadcast(self, server: HoldsSums, client_id: int) -> Message:
        """Returns model and sums."""
        return {**server.broadcast(client_id), **server.model_sums(client_id)}

    def broadcast_spec(self, client: T) -> MessageSpec:
        """Declares model and sums."""
        return {**client.broadcast_spec(), **client.sums_spec()}

    def receive(self, client: T, message: Message) -> None:
        """Loads the model, and keeps the sums."""
        client.receive(message)
        client.sums = message


def sent_moments(server: HoldsMoments, client_id: int) -> Message:
    """Packs a server's moments: ``sum_count`` [n], ``sum_mean`` [k, C], ``sum_covariance`` [k, C (C + 1) / 2].

    ``measured`` says whether this client's images are among them.
    """
    message = packed(held_moments(server.moments), server.moments["mean"].shape[1])
    measured = not {client_id, SUM}.isdisjoint(server.measured)
    return {
        **{f"sum_{name}": values for name, values in message.items()},
        "measured": torch.tensor(int(measured)),
    }


def sent_moments_spec(sets: int, channels: int) -> MessageSpec:
    """Declares the form of `sent_moments`."""
    moments = {f"sum_{name}": form for name, form in packed_spec(sets, sets, channels).items()}
    return {**moments, "measured": TensorSpec((), torch.int64, low=0, high=1)}


def unpack_moments(message: Message) -> list[Moments]:
    """Unpacks `sent_moments`: the moments by set, float64 on the CPU."""
    return unpacked({name: message[f"sum_{name}"] for name in ("count", "mean", "covariance")})


def remaining_moments(message: Message, task: PatchTask, loader: DataLoader) -> list[Moments]:
    """Computes the moments of all clients' images but those of a loader.

    Args:
        message: A message with the form of `sent_moments`.
        task: Features.
        loader: Images of this client.

    Raises:
        UserError: If no image remains.
    """
    remaining = unpack_moments(message)
    if int(message["measured"]):
        remaining = [total.without(own) for total, own in zip(remaining, task.moments(loader), strict=True)]
    if not any(part.count for part in remaining):
        raise UserError("no vector remains when a client's own are left out")
    return remaining


class MomentsClient(Client):
    """A client that sends moments of its features, and predicts with what follows from the moments of all clients.

    Args:
        task: Features, and what is made of moments.
        noised_directions: Number of directions of features that are looked at under differential privacy.

    Raises:
        UserError: If the number is out of range.
    """

    needs: ClassVar[type[Task]] = PatchTask
    state_names = ("measured",)
    task: PatchTask

    def __init__(self, task: PatchTask, noised_directions: int) -> None:
        super().__init__(task)
        at_least("method.client", 2, noised_directions=noised_directions)
        self.sets, self.measured = task.moment_sets, 0
        self.directions = min(noised_directions, task.num_features)
        self.sums: Message = {}
        self.frame: Message = {}

    @property
    def predictors(self) -> Predictors:
        """One model for all clients."""
        return Predictors(shared=True)

    def sums_spec(self) -> MessageSpec:
        """Declares the moments of all clients."""
        return sent_moments_spec(self.sets, self.task.num_features)


class MomentsServer(Server):
    """A server that adds moments up.

    Args:
        client: A client, for sizes.

    Attributes:
        moments: Those of all features; under differential privacy what is known of them (`HoldsNoised`).
        measured: Number of each client's images behind them.
    """

    state_names: ClassVar[tuple[str, ...]] = ("moments", "measured")

    def __init__(self, client: MomentsClient) -> None:
        super().__init__()
        self.directions = client.directions
        self.moments: Message = {}
        self.measured: dict[int, int] = {}

    def learn(self) -> None:
        """Computes what follows from the moments; see `HoldsMoments`."""
        raise NotImplementedError

    def model_sums(self, client_id: int) -> Message:
        """Returns the moments of all clients."""
        return sent_moments(self, client_id)
