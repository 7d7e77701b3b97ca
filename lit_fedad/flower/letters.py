"""Letters as Flower's messages: one array of bytes."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, Message, RecordDict

from lit_fedad.errors import UserError

_NAME = "letter"
KIND = "train.letter"
"""Type of the messages: one of those that a SuperLink accepts."""


def wrapped(blob: bytes) -> RecordDict:
    """Returns bytes as the content of a message: an array, which travels in chunks, unlike a configuration."""
    array = Array(dtype="uint8", shape=(len(blob),), stype="lit_fedad", data=blob)
    return RecordDict({_NAME: ArrayRecord({_NAME: array})})


def unwrapped(message: Message) -> bytes:
    """Returns the bytes in a message.

    Raises:
        UserError: If it holds anything else.
    """
    records = message.content
    if set(records) != {_NAME} or not isinstance(records[_NAME], ArrayRecord):
        raise UserError("a message holds something else than a letter")
    arrays = records[_NAME]
    if set(arrays) != {_NAME} or arrays[_NAME].stype != "lit_fedad":
        raise UserError("a message holds something else than a letter")
    return bytes(arrays[_NAME].data)
