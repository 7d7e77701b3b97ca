"""How many bytes of a message are read, and how many it may become: both ends ask before they build it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from flwr.app import Array
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
)

Q = TypeVar("Q")
A = TypeVar("A")

BESIDE = 1 << 16
"""Bytes of a message beside its payload: names and metadata."""


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
