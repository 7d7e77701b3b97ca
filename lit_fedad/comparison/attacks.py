"""Results of attacks on complete runs, as metrics of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_fedad.comparison.runs import CompleteRun
from lit_fedad.errors import UserError


def with_attack(result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Adds what membership inference found to a run's last round.

    Args:
        result: Content of the run's ``result.json``.
        folder: The run's folder, which holds ``privacy/lira.json`` if the run was attacked.

    Returns:
        The result; of a run that was not attacked, as it is.

    Raises:
        UserError: If the attack's file cannot be read.
    """
    file = folder / "privacy" / "lira.json"
    if not file.is_file():
        return dict(result)
    try:
        found = json.loads(file.read_text())
        numbers = {name: {"mean": value} for name, value in found.items() if isinstance(value, float)}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: not the result of an attack; lit-fedad privacy run={folder} attack=lira"
        ) from error
    return {**result, "last": {**result["last"], **numbers}}


def attacked(run: CompleteRun) -> CompleteRun:
    """Returns a complete run whose last round has what membership inference found; see `with_attack`."""
    return replace(run, result=with_attack(run.result, run.files))
