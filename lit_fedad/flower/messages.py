"""Requests and replies as Flower's messages: one record of bytes."""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from lit_fedad.core.errors import UserError

_NAME = "payload"
KIND = "train.payload"
"""Type of the messages: one of those that a SuperLink accepts."""

_SHORT = 1 << 20
"""Most bytes of a payload that crosses as one value of a configuration: fewer requests, but no chunks."""


def wrapped(blob: bytes) -> RecordDict:
    """Returns bytes as the content of a message: a long one as an array, which travels in chunks."""
    if len(blob) <= _SHORT:
        return RecordDict({_NAME: ConfigRecord({_NAME: blob})})
    array = Array(dtype="uint8", shape=(len(blob),), stype="lit_fedad", data=blob)
    return RecordDict({_NAME: ArrayRecord({_NAME: array})})


def unwrapped(message: Message) -> bytes:
    """Returns the bytes in a message.

    Raises:
        UserError: If it holds anything else.
    """
    records = message.content
    return in_record(records[_NAME] if set(records) == {_NAME} else None)


def in_record(record: object) -> bytes:
    """Returns the bytes in a record.

    Raises:
        UserError: If it holds anything else.
    """
    value = (
        record[_NAME] if isinstance(record, ArrayRecord | ConfigRecord) and set(record) == {_NAME} else None
    )
    if isinstance(value, bytes):
        return value
    if isinstance(value, Array) and value.stype == "lit_fedad":
        return bytes(value.data)
    raise UserError("a message holds something else than a payload")
