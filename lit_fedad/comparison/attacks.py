"""Results of attacks on complete runs, as metrics of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lit_fedad.comparison.runs import CompleteRun
from lit_fedad.experiment.run_folder import RunFolder


def with_attack(result: Mapping[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Adds what membership inference found to a run's last round.

    Args:
        result: Content of the run's ``result.json``.
        folder: The run's folder, which holds ``privacy/lira.json`` if the run was attacked.

    Returns:
        The result; of a run that was not attacked, as it is.

    Raises:
        UserError: If the attack's file cannot be read.
    """
    found = folder.attacks().get("lira", {})
    numbers = {name: {"mean": value} for name, value in found.items() if isinstance(value, float)}
    return {**result, "last": {**result["last"], **numbers}}


def attacked(run: CompleteRun) -> CompleteRun:
    """Returns a complete run whose last round has what membership inference found; see `with_attack`."""
    return replace(run, result=with_attack(run.result, RunFolder(run.files)))
