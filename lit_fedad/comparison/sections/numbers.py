"""Numbers as the report prints them."""

from __future__ import annotations

import re


def format_metric(value: float) -> str:
    """Formats shares with four decimals, and counts with as many digits as they need.

    Args:
        value: A metric.

    Example:
        >>> [format_metric(value) for value in (0.5, 12.0, 2_000_500.0)]
        ['0.5000', '12', '2,000,500']
    """
    if abs(value) <= 1:
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def format_parameter(text: str) -> str:
    """Shortens a number with many digits to four; leaves any other text as it is.

    Args:
        text: A parameter of a run.

    Example:
        >>> [format_parameter(text) for text in ("0.0013525517894", "2.66e-05", "median")]
        ['0.001353', '2.66e-05', 'median']
    """
    return f"{float(text):.4g}" if re.fullmatch(r"\d*\.\d{5,}(e-?\d+)?|\d\.\d+e-?\d+", text) else text
