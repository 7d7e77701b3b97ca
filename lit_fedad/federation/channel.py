"""Every message passes through the channel: checked, optionally coded, serialised, counted."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from lit_fedad.contracts import Context, Message, Payload
from lit_fedad.errors import UserError


class Codec(Protocol):
    """What a channel does to a message before it is serialised, and undoes after."""

    def encode(self, message: Message, context: Context) -> Message:
        """The message as it crosses."""

    def decode(self, message: Message) -> Message:
        """The message as the other side sees it."""


class Plain:
    """Sends tensors as they are."""

    def encode(self, message: Message, context: Context) -> Message:
        """Returns the message itself."""
        return message

    def decode(self, message: Message) -> Message:
        """Returns the message itself."""
        return message


class Half:
    """Sends 32-bit floats in 16 bits (IEEE half precision, 11 significant bits)."""

    def encode(self, message: Message, context: Context) -> Message:
        """Rounds every float32 tensor to float16.

        Raises:
            ValueError: If a value exceeds what half precision can hold (65,504).
        """
        coded = {name: t.half() if t.dtype == torch.float32 else t for name, t in message.items()}
        for name, tensor in coded.items():
            if tensor.dtype == torch.float16 and not tensor.isfinite().all():
                raise ValueError(f"'{name}' holds values above 65504, too large for half precision")
        return coded

    def decode(self, message: Message) -> Message:
        """Widens float16 back to float32."""
        return {name: t.float() if t.dtype == torch.float16 else t for name, t in message.items()}


class Byte:
    """Sends matrices of 32-bit floats in 8 bits: 256 levels between each column's minimum and maximum.

    A column of a memory bank is a feature channel, so that channels of different range lose the same share of it.
    Vectors and scalars stay as they are.
    """

    def encode(self, message: Message, context: Context) -> Message:
        """Splits every float32 matrix into levels, column minima and column steps."""
        coded: Message = {}
        for name, tensor in message.items():
            if tensor.dtype != torch.float32 or tensor.ndim < 2:
                coded[name] = tensor
                continue
            low, high = tensor.amin(0), tensor.amax(0)
            step = (high - low).clamp(min=torch.finfo(torch.float32).tiny) / 255
            coded[f"{name}.levels"] = ((tensor - low) / step).round().clamp(0, 255).to(torch.uint8)
            coded[f"{name}.low"], coded[f"{name}.step"] = low, step
        return coded

    def decode(self, message: Message) -> Message:
        """Puts the matrices together again."""
        decoded = {n: t for n, t in message.items() if not n.endswith((".levels", ".low", ".step"))}
        for name in [n.removesuffix(".levels") for n in message if n.endswith(".levels")]:
            levels = message[f"{name}.levels"].float()
            decoded[name] = levels * message[f"{name}.step"] + message[f"{name}.low"]
        return decoded


@dataclass
class GaussianNoise:
    """Adds Gaussian noise to every float tensor: a plain defence, without a privacy accountant.

    Attributes:
        std: Standard deviation, in the units of the tensors.
    """

    std: float

    def encode(self, message: Message, context: Context) -> Message:
        """Adds the noise of this round and client."""
        draw = context.generator("channel-noise")
        return {
            name: t + self.std * torch.randn(t.shape, generator=draw, dtype=t.dtype)
            if t.is_floating_point()
            else t
            for name, t in message.items()
        }

    def decode(self, message: Message) -> Message:
        """Noise is not undone."""
        return message


class Channel:
    """Carries messages both ways.

    Nothing but bytes crosses: a message is checked against the declared payload, coded, serialised (safetensors),
    counted, and built anew on the other side. What is counted is therefore exactly what would be sent.

    Args:
        up: Coding of client messages.
        down: Coding of server messages.
    """

    def __init__(self, up: Codec | None = None, down: Codec | None = None) -> None:
        self.up = up or Plain()
        self.down = down or Plain()

    def pack(self, message: Message, payload: Payload, codec: Codec, context: Context, sender: str) -> bytes:
        """Checks and serialises a message.

        Args:
            message: What is to be sent.
            payload: What the method declared.
            codec: `up` or `down`.
            context: Round and client, for codings that draw random numbers.
            sender: Named in the error, e.g. ``"client 3"``.

        Returns:
            The bytes that cross; empty for an empty message.

        Raises:
            UserError: If names, shapes or types differ from the payload, or a value is not finite.
        """
        check(message, payload, sender)
        if not message:
            return b""
        coded = codec.encode(message, context)
        return save({name: tensor.contiguous() for name, tensor in coded.items()})

    def unpack(self, blob: bytes, codec: Codec) -> Message:
        """Builds a message from the bytes that crossed."""
        return codec.decode(load(blob)) if blob else {}


def check(message: Message, payload: Payload, sender: str) -> None:
    """Holds a message against its declaration.

    Raises:
        UserError: In one line that names the sender and the tensor.
    """
    if set(message) != set(payload):
        missing, extra = sorted(set(payload) - set(message)), sorted(set(message) - set(payload))
        raise UserError(f"{sender} sent {extra or 'nothing'} undeclared and left out {missing or 'nothing'}")
    for name, spec in payload.items():
        tensor = message[name]
        if tensor.dtype != spec.dtype:
            raise UserError(f"{sender} sent '{name}' as {tensor.dtype}, declared as {spec.dtype}")
        if len(tensor.shape) != len(spec.shape) or any(
            want is not None and want != got for want, got in zip(spec.shape, tensor.shape, strict=True)
        ):
            raise UserError(
                f"{sender} sent '{name}' of shape {tuple(tensor.shape)}, declared as {spec.shape}"
            )
        if tensor.device.type != "cpu":
            raise UserError(f"{sender} sent '{name}' on {tensor.device}; messages live on the CPU")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(f"{sender} sent '{name}' with values that are not finite (NaN or infinity)")


def elements(message: Mapping[str, Tensor]) -> int:
    """How many numbers a message holds (what some papers report as its size).

    Example:
        >>> elements({"memory": torch.zeros(56 * 56, 1792)})
        5619712
    """
    return sum(math.prod(tensor.shape) for tensor in message.values())
