"""Bytes that no honest client sends: what skips the sender's check."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from random import Random

import torch
from safetensors.torch import load, save
from torch import Tensor

from helpers.fuzz.declared import Honest, lie
from lit_fedad.contracts import Message

DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool)
NAMES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I32",
    "I16",
    "I8",
    "U8",
    "BOOL",
    "F8_E4M3",
    "C64",
    "F4",
    "X",
    "",
)
SHAPES = ([0], [], [1], [2**40], [2**62, 4], [-1], [1] * 70, [3.5], "x", None, [0, 2**63], [2**32, 2**32])


def forge(honest: Honest, blob: bytes, foreign: list[bytes], draw: Random) -> tuple[bytes, str]:
    """Draws forged bytes; returns them and what they are.

    Args:
        honest: What the liar starts from.
        blob: Its honest bytes.
        foreign: Messages of other exchanges and methods.
        draw: The draw.
    """
    kinds: list[tuple[str, Callable[[], bytes]]] = [
        ("bits flipped", lambda: _flipped(blob, draw, len(blob))),
        ("bits flipped in the header", lambda: _flipped(blob, draw, _header_end(blob))),
        ("cut", lambda: blob[: draw.randrange(len(blob) + 1)]),
        ("longer", lambda: blob + draw.randbytes(draw.choice((1, 8, 1000)))),
        ("twice", lambda: blob + blob),
        ("garbage", lambda: draw.randbytes(draw.choice((0, 1, 7, 8, 9, 100, 10_000)))),
        ("empty", lambda: b""),
        ("another message", lambda: draw.choice(foreign) if foreign else b""),
        ("the server's message", lambda: _saved(honest.last)),
        *[("a header that lies", lambda: _lying_header(blob, draw))] * 4,
        *[("an entry of another form", lambda: _saved(_misformed(_coded(blob), draw)))] * 4,
        *[("values out of bounds", lambda: _saved(_wild(_coded(blob), draw)))] * 2,
        *[("a lie unchecked", lambda: _saved(lie(honest, draw)[0]))] * 4,
    ]
    name, make = draw.choice(kinds)
    return make(), name


def _coded(blob: bytes) -> Message:
    """The entries as the codec left them."""
    return load(blob) if blob else {}


def _saved(message: Message) -> bytes:
    return save({name: entry.contiguous() for name, entry in message.items()}) if message else b""


def _flipped(blob: bytes, draw: Random, end: int) -> bytes:
    changed = bytearray(blob)
    for _ in range(draw.choice((1, 1, 4, 64))):
        if end:
            changed[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _header_end(blob: bytes) -> int:
    return min(8 + struct.unpack("<Q", blob[:8])[0], len(blob)) if len(blob) >= 8 else len(blob)


def _lying_header(blob: bytes, draw: Random) -> bytes:
    """Rewrites the header: types, shapes, offsets, names, its own length."""
    end = _header_end(blob)
    if end <= 8:
        return b"\x02" + bytes(7) + b"{}"
    header, body = json.loads(blob[8:end]), blob[end:]
    name = draw.choice(sorted(header))
    entry = header[name]
    kind = draw.randrange(9)
    if kind == 0:
        entry["dtype"] = draw.choice(NAMES)
    elif kind == 1:
        entry["shape"] = draw.choice(
            (*SHAPES, entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][1:])
        )
    elif kind == 2:
        entry["data_offsets"] = draw.choice(
            (
                [0, 0],
                [0, 2**63],
                [-4, 0],
                [8, 4],
                [0, len(body) + 4],
                entry["data_offsets"][::-1],
                [0],
                "x",
                [1, 5],
            )
        )
    elif kind == 3:
        header[
            draw.choice(("", "\x00", "x" * 70_000, "__metadata__", name + ".levels", name + ".low", "é"))
        ] = entry
    elif kind == 4:
        header["__metadata__"] = draw.choice(({"a": 1}, {"a": "b" * 10_000}, [], None, "x"))
    elif kind == 5:
        header[draw.choice(("", "other", name.upper()))] = header.pop(name)
    elif kind == 6:
        header = draw.choice(([], {}, None, 3, [header], {"a": {"b": header}}))
    text = json.dumps(header).encode()
    if kind == 7:
        text = b"[" * draw.choice((10, 1000, 100_000))
    length = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(blob))) if kind == 8 else len(text)
    return struct.pack("<Q", length) + text + body


def _misformed(message: Message, draw: Random) -> Message:
    """Gives an entry another type, shape or name, or leaves it out."""
    if not message:
        return {"more": torch.zeros(draw.choice((0, 1, 1000)))}
    message, name = dict(message), draw.choice(sorted(message))
    entry = message[name]
    kind = draw.randrange(7)
    if kind == 0:
        del message[name]
    elif kind == 1:
        message[draw.choice(("more", name + "x", name + ".levels", name + ".step"))] = entry.clone()
    elif kind == 2:
        message[name] = entry.to(draw.choice(DTYPES))
    elif kind == 3:
        message[name] = draw.choice((entry.flatten(), entry[None], entry.unsqueeze(-1), entry.reshape(-1, 1)))
    elif kind == 4:
        message[name] = entry.mT if entry.ndim > 1 else entry.repeat(2)
    elif kind == 5:
        message[name] = _cut(entry, draw)
    else:  # what a codec may stretch to far more than was sent
        size = draw.choice((2, 3, 20_000))
        message[name] = torch.zeros((size, 1) if entry.ndim > 1 else size, dtype=entry.dtype)
    return message


def _cut(entry: Tensor, draw: Random) -> Tensor:
    if not entry.ndim:
        return entry.repeat(draw.choice((0, 1, 2)))
    return entry[: draw.randrange(len(entry) + 1)] if draw.random() < 0.5 else torch.cat([entry, entry])


def _wild(message: Message, draw: Random) -> Message:
    """Sets an entry, or one value of it, to what no number of this kind is."""
    if not message:
        return message
    name = draw.choice(sorted(message))
    entry = message[name].clone()
    value = draw.choice((float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 65504.0, -1.0))
    if not entry.is_floating_point():
        value = draw.choice((-1, 255, 2**31, 2**62, -(2**63))) if entry.dtype == torch.int64 else 255
    if entry.numel() and entry.dtype != torch.bool:
        if entry.dtype == torch.float16 and abs(value) > 65504:
            value = float("inf")
        if draw.random() < 0.5:
            entry.fill_(value)
        else:
            entry.view(-1)[draw.randrange(entry.numel())] = value
    return {**message, name: entry}
