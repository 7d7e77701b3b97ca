"""Requests and replies as Flower's messages: one record of bytes.

Both ends ask how many bytes a message has, and how many it may become, before they build it.
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

Q = TypeVar("Q")
A = TypeVar("A")

BESIDE = 1 << 16
"""Bytes of a message beside its payload: names and metadata."""

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


class TooLongError(Exception):
    """More objects have come than a payload may have."""


def within(read: Callable[[Q], A], size: Callable[[A], int], most: int) -> Callable[[Q], A]:
    """Returns a function that reads objects, and raises `TooLongError` once they are too many bytes together.

    Args:
        read: Reads one.
        size: Returns the bytes of what was read.
        most: Most bytes.
    """
    lock, total = threading.Lock(), 0

    def bounded(request: Q) -> A:
        nonlocal total
        with lock:
            if total > most:
                raise TooLongError
        answer = read(request)
        with lock:
            total += size(answer)
            if total > most:
                raise TooLongError
        return answer

    return bounded


def unfolded(contents: Mapping[str, bytes]) -> int:
    """Computes how many bytes the arrays in a message have: one chunk may stand in several places."""
    total = 0
    for content in contents.values():
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            places = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            total += sum(len(contents[parts[place]]) for place in places)
    return total
