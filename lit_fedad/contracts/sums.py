"""Sums: how the messages of several clients add up, and how each image's part of a sum is known."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lit_fedad.contracts.message import Free, Message, MessageSpec
from lit_fedad.core.errors import UserError


@dataclass(frozen=True)
class Cohort:
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
        exact: Whether differences of nearly equal elements are taken, as in a covariance: they have 64 bits.
    """

    shape: tuple[int, ...]
    bound: float
    whole: bool = False
    exact: bool = False


class MessageSums(Protocol):
    """How messages add up: their sum says as much as the message of one client with all the images.

    ``from_sums(sum of summands(m_i)) = m``, where m is what one client with the images of all would have sent. A server
    that merges m comes to the same as with the single messages.
    """

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares the form of the sum.

        Args:
            spec: The declared form of messages.
            asked: All clients that were asked.
        """

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Computes what a client adds to the sum, of the form `sum_spec`.

        Args:
            message: The client's message, of the declared form.
            client: The client.
            asked: All clients that were asked.
        """

    def from_sums(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Cohort, asked: Cohort
    ) -> Message:
        """Computes the message that stands for all clients in a sum.

        Args:
            sums: Sums by name, in float64; whole numbers in int64.
            spec: The declared form of messages.
            answered: The clients in the sum.
            asked: All clients that were asked.
        """


class ImageSums(Protocol):
    """Sums over the images of all clients, from which an exchange's message is computed on the server.

    What an image adds depends on it alone, and on what is public: the server's messages, the configuration, the
    backbone. It is in public units, in which usual images add a vector of length 1.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sizes of the sums by name; none where nothing of an image is sent."""

    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add: float64 ``[images, *sizes]`` by name, on the CPU.

        Args:
            loader: The client's training batches.
        """

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes the message that one client with the images of all would have sent.

        Args:
            server: The server, before it merges the message.
            sums: Sums of (clipped) parts with noise, float64.
            noise: Standard deviation of the noise of every element.

        Raises:
            HiddenByNoiseError: If the noise hides the images.
        """


class HiddenByNoiseError(UserError):
    """Noise that hides what all images say together.

    Args:
        remedy: What helps beside more images and a larger epsilon; empty for nothing.
    """

    def __init__(self, remedy: str = "") -> None:
        others = f", or {remedy}" if remedy else ""
        super().__init__(
            f"federation.privacy: the noise hides the images; give more images or a larger epsilon{others}"
            " (docs/privacy.md says how many are needed)"
        )


class NothingNew:
    """The sums of an exchange in which clients have nothing to say of their images that they have not said before.

    Args:
        message: The message of a client that has nothing new.
    """

    def __init__(self, message: Message) -> None:
        self.message = message

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares no sum."""
        return {}

    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields nothing."""
        return iter(())

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Returns the message."""
        return self.message


@dataclass(frozen=True)
class Sums:
    """What an exchange carries where the sum of its messages is all that the server needs.

    Attributes:
        by_message: Returns how the messages of a client add up.
        by_image: Returns the sums over images, if each image's part can be bounded; None where it cannot.
    """

    by_message: Callable[[Any], MessageSums] | None = None
    by_image: Callable[[Any], ImageSums] | None = None


_TAIL = 40.0
"""Deviations of the noise that sums have room for."""


@dataclass(frozen=True)
class WeightedMeans:
    """The addition of messages of which every entry is averaged: ``sum_n z_n W_n`` (`weighted_mean`).

    Summands are shares ``n_i W_i / n`` of the mean over all clients that were asked. Whole numbers, such as BatchNorm's
    count of batches, are averaged and rounded.

    Attributes:
        equal: Whether every client has the same weight, whatever its number of images.
    """

    equal: bool = False

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares means: they lie within the bounds of what is averaged."""
        return {
            name: SumSpec(
                tuple(_fixed(size, name) for size in form.shape), max(abs(form.low), abs(form.high), 1e-6)
            )
            for name, form in spec.items()
        }

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Returns the client's share of the mean, float64."""
        share = self._share(client, asked)
        return {name: share * entry.double() for name, entry in message.items()}

    def from_sums(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Cohort, asked: Cohort
    ) -> Message:
        """Computes the mean over the clients that answered."""
        share = self._share(answered, asked)
        means = {name: entry / share for name, entry in sums.items()}
        return {
            name: (means[name] if form.dtype.is_floating_point else means[name].round())
            # Rounding to the step must not leave the declared bounds.
            .clamp(form.low, form.high)
            .to(form.dtype)
            for name, form in spec.items()
        }

    def _share(self, some: Cohort, asked: Cohort) -> float:
        return some.clients / asked.clients if self.equal else some.images / asked.images


@dataclass(frozen=True)
class BoundedSums:
    """The addition of messages that are sums over images already, of parts of bounded length, with noise or without.

    Attributes:
        shapes: Sizes by name.
        longest: Largest norm of an image's part.
        noise: Standard deviation of a client's noise.
    """

    shapes: Mapping[str, tuple[int, ...]]
    longest: float
    noise: float = 0.0

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares sums of parts and noise."""
        bound = asked.images * self.longest + _TAIL * self.noise * asked.clients**0.5
        return {name: SumSpec(shape, bound) for name, shape in self.shapes.items()}

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Returns the message."""
        return message

    def from_sums(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Cohort, asked: Cohort
    ) -> Message:
        """Returns the sums, as precisely as messages are declared."""
        return {name: part.to(spec[name].dtype) for name, part in sums.items()}


def _fixed(size: int | Free, name: str) -> int:
    if isinstance(size, Free):
        raise TypeError(f"'{name}' has a size that each client chooses: its entries cannot be averaged")
    return size
