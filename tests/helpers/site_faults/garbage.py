"""Replies that no site sends: bytes that hold no payload, messages that hold no message, answers to another request."""

from __future__ import annotations

import struct
from dataclasses import replace
from random import Random

from lit_fedad.sites.messages import Reply

_LENGTH = struct.Struct(">I")


def garbled(blob: bytes, draw: Random) -> bytes:
    """Returns a reply with which something happened on its way.

    Bits of a tensor that flip within its declared range are not among it: no receiver can tell.

    Args:
        blob: The reply.
        draw: Draws what happens.
    """
    (length,) = _LENGTH.unpack_from(blob)
    reply = Reply.from_bytes(blob)
    header, message = blob[: _LENGTH.size + length], blob[_LENGTH.size + length :]
    ways = [
        lambda: draw.randbytes(len(blob)),
        lambda: blob[: draw.randrange(len(header))],
        lambda: _overwritten(blob, draw, _LENGTH.size, length),
        lambda: header + message + draw.randbytes(draw.randint(1, 1000)),
        lambda: replace(reply, step=reply.step - 1).to_bytes(),
        lambda: struct.pack(">I", 0xFFFFFFFF) + blob[4:],
    ]
    if message:
        (inner,) = struct.unpack_from("<Q", message)
        ways += [
            lambda: header + draw.randbytes(len(message)),
            lambda: header + message[: draw.randrange(1, len(message))],
            lambda: header + _overwritten(message, draw, 8, inner),
            lambda: header + struct.pack("<Q", 1 << draw.randint(20, 63)) + message[8:],
            lambda: header,
        ]
    return draw.choice(ways)()


def _overwritten(blob: bytes, draw: Random, start: int, length: int) -> bytes:
    """Overwrites sixteen bytes of a part that is text with bytes that are none."""
    place = start + draw.randrange(max(1, length - 16))
    return blob[:place] + bytes(0x80 | draw.getrandbits(7) for _ in range(16)) + blob[place + 16 :]
