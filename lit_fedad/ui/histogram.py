"""A histogram as SVG that a page takes in as it is: it scales with the page, and loads nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _MARGIN = 640, 240, 36
_COLOURS = {"calibration": "#0072B2", "new images": "#E69F00"}  # Okabe and Ito (2008)


def histogram_svg(rows: Sequence[dict[str, Any]], threshold: float) -> str:
    """Draws shares of scores as bars, and the threshold as a line.

    Args:
        rows: From `lit_fedad.ui.reading.histogram`.
        threshold: Score above which images raise an alarm.

    Returns:
        An ``svg`` element.
    """
    if not rows:
        return "<p>No scores yet.</p>"
    scores = [row["score"] for row in rows]
    low, high = min(scores), max(scores)
    if math.isfinite(threshold):
        low, high = min(low, threshold), max(high, threshold)
    span = (high - low) or 1.0
    most = max(row["share"] for row in rows)
    bar = max((_WIDTH - 2 * _MARGIN) / 60, 2)

    def x(score: float) -> float:
        return _MARGIN + (score - low) / span * (_WIDTH - 2 * _MARGIN)

    base = _HEIGHT - _MARGIN
    parts = [
        f'<rect x="{x(row["score"]) - bar / 2:.1f}" y="{base - row["share"] / most * (base - _MARGIN):.1f}"'
        f' width="{bar:.1f}" height="{row["share"] / most * (base - _MARGIN):.1f}"'
        f' fill="{_COLOURS[row["images"]]}" fill-opacity="0.6"/>'
        for row in rows
    ]
    parts.append(f'<path d="M{_MARGIN} {base}H{_WIDTH - _MARGIN}" stroke="currentColor"/>')
    if math.isfinite(threshold):
        parts.append(
            f'<path d="M{x(threshold):.1f} {_MARGIN - 14}V{base}" stroke="#D55E00" stroke-width="2"/>'
            + _text(x(threshold), _MARGIN - 18, f"threshold {threshold:.4g}", "middle")
        )
    parts += [_text(x(score), base + 16, f"{score:.4g}", "middle") for score in (low, high)]
    parts.append(_text(_WIDTH / 2, _HEIGHT - 4, "score", "middle"))
    for place, name in enumerate(dict.fromkeys(row["images"] for row in rows)):
        top = _MARGIN + 18 * place
        parts.append(
            f'<rect x="{_WIDTH - 140}" y="{top - 9}" width="10" height="10" fill="{_COLOURS[name]}"/>'
        )
        parts.append(_text(_WIDTH - 125, top, name, "start"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="histogram of scores"'
        f' style="width:100%;max-width:760px;height:auto">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    look = f'font-size="15" fill="currentColor" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
