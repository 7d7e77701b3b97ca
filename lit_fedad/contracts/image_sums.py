"""Sums over images of which every image's part is known, so that it can be bounded before anything is added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor

from lit_fedad.contracts.message import Message
from lit_fedad.core.errors import UserError


class ImageSums(Protocol):
    """The sums over all clients' images that the server's side of an exchange follows from.

    The parts are in public units, in which those of usual images have length 1. They depend on one image alone, and
    on what is public: the server's messages, the configuration, the backbone.
    """

    def form(self) -> dict[str, tuple[int, ...]]:
        """Declares the sizes of the sums by name; none where nothing of an image is sent."""

    def parts(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields what the images of each batch add: float64 ``[images, *sizes]`` by name, on the CPU.

        Args:
            loader: The client's training batches.
        """

    def joined(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
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

    def form(self) -> dict[str, tuple[int, ...]]:
        """Declares no sum."""
        return {}

    def parts(self, loader: Iterable[Any]) -> Iterator[dict[str, Tensor]]:
        """Yields nothing."""
        return iter(())

    def joined(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Returns the message."""
        return self.message
