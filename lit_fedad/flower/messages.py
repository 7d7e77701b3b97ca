"""Requests and replies as Flower's messages: each holds one record of bytes, the payload.

Before either end builds a message from what it has received, it checks how many bytes were sent and how many the built
message will have.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

from lit_fedad.core.errors import UserError

Key = TypeVar("Key")
Obj = TypeVar("Obj")

OVERHEAD = 1 << 16
"""Most bytes of a message in addition to its payload: names and metadata."""

_NAME = "payload"
KIND = "train.payload"
"""Type of the messages: one of those that a SuperLink accepts."""

_SHORT = 1 << 20
"""Most bytes of a payload that is sent as one configuration value: it takes fewer requests, but has no chunks."""


def wrapped(blob: bytes) -> RecordDict:
    """Wraps a payload as the content of a message: a long one as an array, which is sent in chunks."""
    if len(blob) <= _SHORT:
        return RecordDict({_NAME: ConfigRecord({_NAME: blob})})
    array = Array(dtype="uint8", shape=(len(blob),), stype="lit_fedad", data=blob)
    return RecordDict({_NAME: ArrayRecord({_NAME: array})})


def unwrapped(message: Message) -> bytes:
    """Returns the payload of a message.

    Raises:
        UserError: If the message holds anything else.
    """
    records = message.content
    return in_record(records[_NAME] if set(records) == {_NAME} else None)


def in_record(record: object) -> bytes:
    """Returns the payload in a message's record.

    Raises:
        UserError: If the record holds anything else.
    """
    value = (
        record[_NAME] if isinstance(record, ArrayRecord | ConfigRecord) and set(record) == {_NAME} else None
    )
    if isinstance(value, bytes):
        return value
    if isinstance(value, Array) and value.stype == "lit_fedad":
        return bytes(value.data)
    raise UserError("a message holds something else than a payload")


class TooLongError(Exception):
    """A message has more bytes than its payload may have."""


def limited(read: Callable[[Key], Obj], size: Callable[[Obj], int], max_bytes: int) -> Callable[[Key], Obj]:
    """Returns a function that reads like `read`, and raises `TooLongError` once its objects have too many bytes in all.

    Args:
        read: Reads one object.
        size: Returns the number of bytes of an object.
        max_bytes: Most bytes of all objects together.
    """
    lock, total = threading.Lock(), 0

    def read_limited(key: Key) -> Obj:
        nonlocal total
        with lock:
            if total > max_bytes:
                raise TooLongError
        content = read(key)
        with lock:
            total += size(content)
            if total > max_bytes:
                raise TooLongError
        return content

    return read_limited


def unpacked_size(contents: Mapping[str, bytes]) -> int:
    """Computes how many bytes the arrays of a message have when they are built: an array may repeat one chunk.

    Args:
        contents: The message's objects by Flower's id.
    """
    total = 0
    for content in contents.values():
        kind, children, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            positions = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[children[position]]) for position in positions)
    return total
