"""Rows of a table for predictions that look at no image, taken from the runs of its other rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from lit_fedad.report.constant_predictions import CONSTANT_LABELS
from lit_fedad.report.tables import Outcome, Row, runs_frame


def constant_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Makes an outcome of each constant prediction for every column and seed.

    Constant predictions depend on the partition and the test set alone. They are taken from the first complete run, of
    those with most clients: a row of the pooled data does not have the others' clients.

    Args:
        outcomes: The runs of a table.

    Returns:
        The outcomes; none for columns without a complete classification run.
    """
    found: dict[tuple[str, int], Outcome] = {}
    for outcome in outcomes:
        if outcome.result and outcome.result.get("constants"):
            place = (outcome.column, outcome.seed)
            known = found.setdefault(place, outcome)
            if _clients(outcome.result) > _clients(known.result or {}):
                found[place] = outcome
    return [
        replace(outcome, row=label, ending="", constant=name)
        for name, label in CONSTANT_LABELS.items()
        for outcome in found.values()
    ]


def constant_rows(
    outcomes: Sequence[Outcome], metrics: Sequence[str]
) -> tuple[list[Row], pd.DataFrame] | None:
    """Lists the rows of a table's constant predictions, with their frame.

    Args:
        outcomes: The runs of a table.
        metrics: Metrics of the table.

    Returns:
        Rows and frame, as of `runs_frame`; None where no run classifies.
    """
    found = constant_outcomes(outcomes)
    return (
        ([Row(label, ()) for label in CONSTANT_LABELS.values()], runs_frame(found, metrics))
        if found
        else None
    )


def _clients(result: Mapping[str, Any]) -> int:
    return len(result["partition"]["sizes"])
