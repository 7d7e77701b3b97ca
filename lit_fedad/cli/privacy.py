"""Attacks on a finished run: which of them is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from lit_fedad.errors import UserError


def audit(attack: str, run: str, options: Mapping[str, str]) -> None:
    """Attacks a complete run, and writes what came of it to ``privacy`` in its folder.

    Args:
        attack: ``lira`` (membership inference), ``inversion`` (images out of what is shared) or ``dcor`` (distance
            correlation).
        run: MLflow run id, or the run's folder.
        options: The attack's own.

    Raises:
        UserError: For bad input.
    """
    match attack:
        case "lira":
            from lit_fedad.audits.membership import infer

            infer(run, options)
        case "inversion":
            from lit_fedad.audits.inversion import invert

            invert(run, options)
        case "dcor":
            from lit_fedad.audits.density import correlate

            correlate(run, options)
        case _:
            raise UserError(f"attack={attack}: give lira, inversion or dcor")
