"""Checks of the ranges of numbers that a configuration gives."""

import math
from collections.abc import Sequence
from typing import Any

from lit_fedad.core.errors import UserError

RANGES: dict[str, tuple[float, float]] = {
    "rounds": (0, math.inf),
    "batch_size": (1, math.inf),
    "simulation.workers": (0, math.inf),
    "grid": (1, 1024),
    "data.size": (1, 8192),
    "image.size": (1, 8192),
    "image.resize": (1, 8192),
    "image.tile": (1, 8192),
    "image.overlap": (0, 8192),
    "task.image_size": (1, 8192),
    "image.channels": (1, 3),
    "image.page": (0, 9999),
    "evaluation.every": (1, math.inf),
    "evaluation.batch_size": (1, math.inf),
    "calibration.share": (0, 0.9),
    "calibration.folds": (2, 1000),
    "evaluation.pictures": (0, math.inf),
    "evaluation.pro_limit": (1e-6, 1),
    "evaluation.spro_limit": (1e-6, 1),
}
"""Smallest and largest number by key; the bounds of sides exceed any use, but keep a typo from filling the memory."""


def at_least(section: str, least: float, /, **numbers: float | None) -> None:
    """Refuses numbers below a bound; None passes, NaN does not.

    Raises:
        UserError: Naming the first key whose number is too small.

    Example:
        >>> at_least("task", 1, slots=None, grid=0)
        Traceback (most recent call last):
        lit_fedad.core.errors.UserError: task.grid=0 must be at least 1
    """
    for key, number in numbers.items():
        if number is not None and not number >= least:
            raise UserError(f"{section}.{key}={number} must be at least {least}")


def above(section: str, bound: float, **numbers: float | None) -> None:
    """Refuses numbers that are not above a bound; None passes, NaN does not.

    Raises:
        UserError: Naming the first key whose number is too small.
    """
    for key, number in numbers.items():
        if number is not None and not number > bound:
            raise UserError(f"{section}.{key}={number} must be above {bound}")


def within(section: str, least: float, most: float, **numbers: float | None) -> None:
    """Refuses numbers outside a closed interval; None passes, NaN does not.

    Raises:
        UserError: Naming the first key whose number lies outside.
    """
    for key, number in numbers.items():
        if number is not None and not least <= number <= most:
            raise UserError(f"{section}.{key}={number} must be in [{least}, {most}]")


def below_one(section: str, **numbers: float | None) -> None:
    """Refuses momenta, and other shares of what was before, outside [0, 1): from 1 on nothing fades, and sums diverge.

    None passes, NaN does not.

    Raises:
        UserError: Naming the first key whose number lies outside.
    """
    for key, number in numbers.items():
        if number is not None and not 0 <= number < 1:
            raise UserError(f"{section}.{key}={number} must be at least 0 and below 1")


def pair(key: str, value: int | Sequence[int]) -> tuple[int, int]:
    """Reads one or two lengths, and returns two: rows and columns, or height and width.

    Args:
        key: Key of the value, for the error message.
        value: One whole number for both lengths, or a list of two.

    Raises:
        UserError: If the value is neither, or a number is below 1.

    Example:
        >>> pair("image.size", 224), pair("image.size", [400, 1200])
        ((224, 224), (400, 1200))
    """
    lengths = (value, value) if isinstance(value, int) else tuple(value)
    if len(lengths) != 2 or not all(type(number) is int and number >= 1 for number in lengths):
        form = "" if isinstance(value, int) else "two whole numbers, [height,width], of "
        raise UserError(f"{key}={value} must be {form}at least 1")
    return lengths[0], lengths[1]


def check_alpha(alpha: Any) -> None:
    """Checks ``evaluation.alpha``: ``auto``, a rate, or a list of these.

    Raises:
        UserError: If it is none of these, or an empty list.
    """
    for rate in alpha if isinstance(alpha, list) else [alpha]:
        if rate != "auto" and (type(rate) is not float or not 0 < rate < 1):
            raise UserError(
                f"evaluation.alpha={alpha} must be auto, a number above 0 and below 1, or a list of these"
            )
    if alpha == []:
        raise UserError("evaluation.alpha=[] must hold a rate")
