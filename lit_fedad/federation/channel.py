"""The channel between clients and the server, which checks, encodes, serialises and counts every message."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from lit_fedad.contracts import Context, Free, Message, MessageSpec
from lit_fedad.core.errors import UserError
from lit_fedad.federation.message_check import check

LARGEST_BLOB = 2 << 30
"""Largest size of a message in bytes, whatever its declared form allows."""

# Bounds of what safetensors adds to the values: a length and padding for the file, and a header for each tensor.
_FILE_OVERHEAD = 32  # bytes
_CODED_TENSORS = 3  # a codec turns one tensor into at most three, such as levels, minima and steps


class Codec(Protocol):
    """An encoding of messages before they are serialised, and its inverse."""

    def encode(self, message: Message, context: Context) -> Message:
        """Encodes a message before it is serialised.

        Args:
            message: The message.
            context: Round and client, for codecs that draw random numbers.
        """

    def decode(self, message: Message) -> Message:
        """Decodes a received message."""

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Computes how many bytes an encoded tensor takes.

        Args:
            shape: Shape of the tensor before it is encoded.
            dtype: Element type of the tensor before it is encoded.
        """


class Plain:
    """A codec that sends tensors as they are."""

    def encode(self, message: Message, context: Context) -> Message:
        """Returns the message itself."""
        return message

    def decode(self, message: Message) -> Message:
        """Returns the message itself."""
        return message

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Returns the size of the tensor itself."""
        return math.prod(shape) * dtype.itemsize


class Half:
    """A codec that sends matrices of 32-bit floats in 16 bits (IEEE half precision, 11 significant bits).

    Vectors and scalars are sent as they are: counts may exceed the range of half precision, small variances would
    become 0 in it, and these tensors take few bytes anyway.
    """

    def encode(self, message: Message, context: Context) -> Message:
        """Rounds every float32 matrix to float16.

        Raises:
            UserError: If a value exceeds what half precision can hold (65,504).
        """
        coded = {name: t.half() if _is_matrix(t.shape, t.dtype) else t for name, t in message.items()}
        for name, tensor in coded.items():
            if tensor.dtype == torch.float16 and not tensor.isfinite().all():
                raise UserError(
                    f"'{name}' holds values above 65504, too large for half precision; leave federation=half out"
                )
        return coded

    def decode(self, message: Message) -> Message:
        """Converts float16 tensors back to float32."""
        return {name: t.float() if t.dtype == torch.float16 else t for name, t in message.items()}

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Returns two bytes for each element of a matrix, and the unchanged size of other tensors."""
        return math.prod(shape) * (torch.float16 if _is_matrix(shape, dtype) else dtype).itemsize


class Byte:
    """A codec that sends matrices of 32-bit floats in 8 bits: 256 levels between each column's minimum and maximum.

    A column of a memory bank is a feature channel, so the rounding error is the same share of the range in every
    channel. Vectors and scalars are sent as they are.
    """

    def encode(self, message: Message, context: Context) -> Message:
        """Encodes every float32 matrix as levels, column minima and column steps."""
        coded: Message = {}
        for name, tensor in message.items():
            if not _is_matrix(tensor.shape, tensor.dtype):
                coded[name] = tensor
                continue
            low, high = tensor.amin(0), tensor.amax(0)
            step = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / 255
            coded[f"{name}.levels"] = ((tensor - low) / step).round().clamp(0, 255).to(torch.uint8)
            coded[f"{name}.low"], coded[f"{name}.step"] = low, step
        return coded

    def decode(self, message: Message) -> Message:
        """Rebuilds the matrices from levels, column minima and column steps.

        Raises:
            LookupError: If the levels, minima or steps of a matrix are missing.
            ValueError: If their shapes do not fit together, or the levels are no bytes.
        """
        matrices = [n.removesuffix(".levels") for n in message if n.endswith(".levels")]
        parts = {f"{name}.{part}" for name in matrices for part in ("levels", "low", "step")}
        decoded = {n: t for n, t in message.items() if n not in parts}
        for name in matrices:
            levels, low, step = (message[f"{name}.{part}"] for part in ("levels", "low", "step"))
            # Without this check, torch could broadcast a few received bytes to gigabytes.
            if not levels.shape[1:] == low.shape == step.shape or levels.dtype != torch.uint8:
                raise ValueError(f"'{name}' has levels, minima and steps of different forms")
            decoded[name] = levels.float() * step + low
        return decoded

    def size(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Returns one byte for each element of a matrix and eight for each column; the unchanged size of others."""
        if _is_matrix(shape, dtype):
            return math.prod(shape) + 2 * dtype.itemsize * math.prod(shape[1:])
        return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class Link:
    """One direction of the channel.

    Attributes:
        codec: Encodes messages before they are serialised, and decodes them afterwards.
    """

    codec: Codec
    _accepted: list[tuple[bytes, MessageSpec]] = field(default_factory=list, repr=False, compare=False)

    def pack(self, message: Message, spec: MessageSpec, context: Context, sender: str) -> bytes:
        """Checks and serialises a message.

        Args:
            message: The message to send.
            spec: Its declared form.
            context: Round and client, for codecs that draw random numbers.
            sender: Name of the sender in errors, e.g. ``"client 3"``.

        Returns:
            The bytes to send; empty for an empty message.

        Raises:
            UserError: If the message differs from the declared form, or the codec cannot hold a value.
        """
        check(message, spec, sender)
        if not message:
            return b""
        exact = {name: tensor for name, tensor in message.items() if spec[name].unrounded}
        coded = self.codec.encode({n: t for n, t in message.items() if n not in exact}, context) | exact
        blob = save({name: tensor.contiguous() for name, tensor in coded.items()})
        self._check_size(blob, spec, sender)
        return blob

    def unpack(self, blob: bytes, spec: MessageSpec, sender: str) -> Message:
        """Builds a message from received bytes and checks it.

        Args:
            blob: Bytes from `pack`; they are not trusted.
            spec: The declared form.
            sender: Name of the sender in errors.

        Returns:
            The message, with its entries in the order of the declared form, so that all messages have the same order.

        Raises:
            UserError: If there are more bytes than the declared form needs, or they hold no message, or a message that
                differs from the declared form.
        """
        self._check_size(blob, spec, sender)
        try:
            message = self.codec.decode(load(blob)) if blob else {}
        except (SafetensorError, LookupError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            raise UserError(f"{sender} sent bytes that hold no message ({type(error).__name__})") from error
        # A process may receive equal bytes for each of its clients: the message is checked once.
        if self._accepted != [(blob, spec)]:
            check(message, spec, sender)
            self._accepted[:] = [(blob, spec)]
        # safetensors returns the entries in a random order.
        return {name: message[name] for name in spec}

    def largest(self, spec: MessageSpec) -> int:
        """Computes how many bytes a message of a declared form has at most; receivers need not read more.

        Args:
            spec: The declared form.

        Returns:
            The number of bytes; `LARGEST_BLOB` where the form leaves a size unbounded.

        Example:
            >>> from lit_fedad.contracts import TensorSpec
            >>> Link(Plain()).largest({"w": TensorSpec((1000, 250))})
            1000605
        """
        bounds = _free_sizes(spec)
        total = _FILE_OVERHEAD if spec else 0
        for name, form in spec.items():
            shape = [bounds[size.name] if isinstance(size, Free) else size for size in form.shape]
            if any(size is None for size in shape):
                return LARGEST_BLOB
            sizes = [size for size in shape if size is not None]
            codec = Plain() if form.unrounded else self.codec
            total += codec.size(sizes, form.dtype) + _CODED_TENSORS * (
                len(json.dumps(name)) + 24 * len(sizes) + 140
            )
        return min(total, LARGEST_BLOB)

    def _check_size(self, blob: bytes, spec: MessageSpec, sender: str) -> None:
        if len(blob) > (largest := self.largest(spec)):
            raise UserError(
                f"{sender} sent {len(blob)} bytes; a message of the declared form has at most {largest}"
            )


def _free_sizes(spec: MessageSpec) -> dict[str, int | None]:
    """Returns the upper bound of each size that the sender chooses, by name; None for unbounded sizes."""
    bounds: dict[str, int | None] = {}
    for size in (size for form in spec.values() for size in form.shape if isinstance(size, Free)):
        declared = [bound for bound in (bounds.get(size.name), size.at_most) if bound is not None]
        bounds[size.name] = min(declared, default=None)
    return bounds


class Channel:
    """The two links between clients and the server.

    Only bytes cross the channel. The sender checks a message against its declared form, encodes and serialises it
    (safetensors); the receiver rebuilds the message and checks it again. Reports count exactly the sent bytes.

    Args:
        up: Codec of messages from clients; None sends them as they are.
        down: Codec of messages from the server; None sends them as they are.
    """

    def __init__(self, up: Codec | None = None, down: Codec | None = None) -> None:
        self.up = Link(up or Plain())
        self.down = Link(down or Plain())


def elements(message: Mapping[str, Tensor]) -> int:
    """Counts the elements of a message's tensors (some papers report this as its size).

    Example:
        >>> elements({"memory": torch.zeros(56 * 56, 1792)})
        5619712
    """
    return sum(math.prod(tensor.shape) for tensor in message.values())


def _is_matrix(shape: Sequence[int], dtype: torch.dtype) -> bool:
    return dtype == torch.float32 and len(shape) >= 2 and 0 not in shape
