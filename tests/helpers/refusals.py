"""What every refusal of bad input keeps to: one line, which says what is wrong."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lit_fedad.core.errors import UserError


@contextmanager
def refusal(match: str | None = None) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expects a block to end in a UserError of one line, with something that matches."""
    with pytest.raises(UserError, match=match) as caught:
        yield caught
    assert "\n" not in str(caught.value), "a message of several lines"


def refused(match: str, call: Callable[..., object], *args: object, **kwargs: object) -> str:
    """Expects a `refusal` of a call; returns its message."""
    with refusal(match) as caught:
        call(*args, **kwargs)
    return str(caught.value)
