"""How the messages of several clients add up, and what each image adds to a sum."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from lit_fedad.contracts.message import Free, Message, MessageSpec
from lit_fedad.core.errors import UserError


@dataclass(frozen=True)
class Cohort:
    """The number of clients in a group, and the number of their training images.

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
        shape: Sizes of the tensor.
        bound: Largest magnitude of an element of the sum over all clients, and of an element of one client's summand.
        whole: Whether elements are whole numbers, such as counts.
        exact: Whether elements are summed with 64 bits, because differences of nearly equal elements are taken later,
            as for a covariance.
    """

    shape: tuple[int, ...]
    bound: float
    whole: bool = False
    exact: bool = False


class MessageSums(Protocol):
    """How messages add up, so that their sum replaces the message of one client with all the images.

    ``from_sums(sum of summands(m_i)) = m``, where m is the message that one client with the images of all clients would
    have sent. A server that merges m gets the same result as from the single messages.
    """

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares the form of the sum.

        Args:
            spec: The declared form of messages.
            asked: All clients that were asked.
        """

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Computes what a client adds to the sum, in the form of `sum_spec`.

        Args:
            message: The client's message, of the declared form.
            client: The client alone: one client and its number of images.
            asked: All clients that were asked.
        """

    def from_sums(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Cohort, asked: Cohort
    ) -> Message:
        """Computes, from the sum, the message that stands for all clients in it.

        Args:
            sums: Sums by name, in float64; whole numbers in int64.
            spec: The declared form of messages.
            answered: The clients whose summands are in the sum.
            asked: All clients that were asked.
        """


class ImageSums(Protocol):
    """Sums over the images of all clients, from which an exchange's message is computed on the server.

    What an image adds depends only on that image and on public information: the server's messages, the configuration,
    the backbone. It is scaled by public units, so that a typical image adds a vector of length 1.
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sizes of the sums by name; empty where nothing about images is sent."""

    def per_image(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields for each batch what its images add to the sums: float64 ``[images, *sizes]`` by name, on the CPU.

        Args:
            loader: The client's training batches.
        """

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes the message that one client with the images of all clients would have sent.

        Args:
            server: The server, before it merges the message.
            sums: Sums of what images add (clipped), with noise, float64.
            noise: Standard deviation of the noise of every element.

        Raises:
            HiddenByNoiseError: If the noise hides the images.
        """


class HiddenByNoiseError(UserError):
    """The error of noise so large that it hides even the sum over all images.

    Args:
        remedy: What helps in addition to more images and a larger epsilon; empty for nothing.
    """

    def __init__(self, remedy: str = "") -> None:
        others = f", or {remedy}" if remedy else ""
        super().__init__(
            f"federation.privacy: the noise hides the images; give more images or a larger epsilon{others}"
            " (docs/privacy.md says how many are needed)"
        )


class NothingNew:
    """The (empty) sums of an exchange in which clients reveal nothing about their images that is new.

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
    """How an exchange's messages are summed, where their sum is all that the server needs.

    Attributes:
        by_message: Returns how whole messages add up; takes the live client.
        by_image: Returns the sums over images; takes the live client. None where what one image adds cannot be bounded.
    """

    by_message: Callable[[Any], MessageSums] | None = None
    by_image: Callable[[Any], ImageSums] | None = None


_NOISE_DEVIATIONS = 40.0
"""Number of standard deviations of the noise that the declared bound of a sum leaves room for."""


@dataclass(frozen=True)
class WeightedMeans:
    """The sums of messages whose every entry is averaged: ``sum_n z_n W_n`` (`weighted_mean`).

    The summand of client i is its share ``n_i W_i / n`` of the mean over all clients that were asked. Whole numbers,
    such as BatchNorm's count of batches, are averaged and rounded.

    Attributes:
        equal: Whether every client has the same weight, whatever its number of images.
    """

    equal: bool = False

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares the means, which lie within the bounds of the averaged values."""
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
            # Fixed-point rounding may have moved the mean beyond the declared bounds.
            .clamp(form.low, form.high)
            .to(form.dtype)
            for name, form in spec.items()
        }

    def _share(self, group: Cohort, asked: Cohort) -> float:
        return group.clients / asked.clients if self.equal else group.images / asked.images


@dataclass(frozen=True)
class BoundedSums:
    """The sums of messages that are themselves sums over images, with or without noise.

    Attributes:
        shapes: Sizes of the tensors by name.
        longest: Largest norm of what one image adds.
        noise: Standard deviation of the noise that each client adds.
    """

    shapes: Mapping[str, tuple[int, ...]]
    longest: float
    noise: float = 0.0

    def sum_spec(self, spec: MessageSpec, asked: Cohort) -> dict[str, SumSpec]:
        """Declares the sums; their bound covers all images and the noise of all clients."""
        bound = asked.images * self.longest + _NOISE_DEVIATIONS * self.noise * asked.clients**0.5
        return {name: SumSpec(shape, bound) for name, shape in self.shapes.items()}

    def summands(self, message: Message, client: Cohort, asked: Cohort) -> dict[str, Tensor]:
        """Returns the message."""
        return message

    def from_sums(
        self, sums: Mapping[str, Tensor], spec: MessageSpec, answered: Cohort, asked: Cohort
    ) -> Message:
        """Returns the sums in the element types that the messages declare."""
        return {name: part.to(spec[name].dtype) for name, part in sums.items()}


def _fixed(size: int | Free, name: str) -> int:
    if isinstance(size, Free):
        raise TypeError(f"'{name}' has a size that each client chooses: its entries cannot be averaged")
    return size
