"""The ``privacy`` command: attacks on a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lit_fedad.options import read, separate, split


@dataclass(frozen=True)
class PrivacyOptions:
    """Options of ``lit-fedad privacy`` that all attacks share.

    Attributes:
        run: MLflow run id, or the run's folder.
        attack: ``lira`` (membership inference), ``inversion`` (images out of what is shared) or ``dcor`` (distance
            correlation of shared densities with images).
    """

    run: str
    attack: Literal["lira", "inversion", "dcor"]


def privacy(options: Sequence[str]) -> None:
    """Attacks a complete run, and writes the outcome to ``privacy`` in its folder.

    Args:
        options: Those of `PrivacyOptions` and of the attack, and overrides such as ``data.root=DIR``.

    Raises:
        UserError: For bad input.
    """
    shared, others = separate(PrivacyOptions, options, "privacy")
    chosen, _ = read(PrivacyOptions, shared, "privacy")
    from lit_fedad.experiment.run_folder import RunFolder

    with RunFolder.find(chosen.run).locked():
        _attack(chosen, others)


def _attack(chosen: PrivacyOptions, others: Sequence[str]) -> None:
    from lit_fedad.experiment.finished_run import reopen

    match chosen.attack:
        case "lira":
            from lit_fedad.audits.membership import LiraOptions, infer

            lira, overrides = read(LiraOptions, others, "privacy")
            infer(reopen(chosen.run, overrides), lira)
        case "inversion":
            from lit_fedad.audits.inversion import InversionOptions, invert

            inversion, overrides = read(InversionOptions, others, "privacy")
            invert(reopen(chosen.run, overrides), inversion)
        case "dcor":
            from lit_fedad.audits.density import correlate

            correlate(reopen(chosen.run, dict(map(split, others))))
