"""Lays out the lines of the rounds of a run, aligned with each other and as wide as there is room."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Columns that a narrow line leaves out, the highest number first; all others count 0.
_LEFT_OUT_FIRST = {"left": 1, "up": 2, "down": 3, "time": 4}


class RoundLines:
    """Lays out the lines of a run, whose columns never become narrower."""

    def __init__(self) -> None:
        self._widths: dict[str, int] = {}  # of the widest value of each column so far
        self._label_width = 0

    def add(
        self, label: str, loss: float | None, values: Mapping[str, str], room: int
    ) -> tuple[tuple[str, str], str]:
        """Lays out the next line.

        Args:
            label: Text at its start.
            loss: Loss; None where it is not known, which is no column before a loss was known.
            values: Other values by column: metrics by their titles, ``up``, ``down``, ``time`` and ``left``.
            room: Most columns of the line.

        Returns:
            The label with its style, and the text that follows it.
        """
        self._label_width = max(self._label_width, len(label))
        label = label.ljust(self._label_width)
        if loss is not None or "loss" in self._widths:
            values = {"loss": _loss(loss), **values}
        for column, value in values.items():
            self._widths[column] = max(len(value), self._widths.get(column, 0))
        cells = self._cells(values)

        room -= len(label)
        shown = set()
        for column in sorted(cells, key=lambda column: _LEFT_OUT_FIRST.get(column, 0)):
            cost = len("  ") + len(cells[column])
            if cost <= room:
                room -= cost
                shown.add(column)
        text = "  ".join(["", *(cell for column, cell in cells.items() if column in shown)]).rstrip()
        return (label, "bold"), text

    def _cells(self, values: Mapping[str, str]) -> dict[str, str]:
        """Returns all columns seen so far, metrics in order of first appearance; those without a value are blank."""
        metrics = [column for column in self._widths if column not in ("loss", *_LEFT_OUT_FIRST)]
        cells = {}
        for column in ("loss", *metrics, "up", "down", "time", "left"):
            value, width = values.get(column, ""), self._widths.get(column, 0)
            name = "" if column == "time" else f"{column} "
            if width:
                cells[column] = f"{name}{value:>{width}}" if value else " " * (len(name) + width)
        return cells


def _loss(value: float | None) -> str:
    """Formats a loss of any size in about six columns, or as a dash where there is none."""
    if value is None or math.isnan(value):
        return f"{'-':>6}"
    plain = value == 0 or 0.001 <= abs(value) < 10
    return f"{value:6.4f}" if plain else f"{value:6.4g}" if 10 <= abs(value) < 10_000 else f"{value:6.0e}"
