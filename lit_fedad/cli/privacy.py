"""The ``privacy`` command: attacks on a finished run, and the page of what is known of its privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lit_fedad.core.errors import UserError
from lit_fedad.core.options import read, separate, split

if TYPE_CHECKING:  # what the command needs beyond its options is imported when it runs
    from lit_fedad.audits.page import Outcome
    from lit_fedad.experiment.finished_run import FinishedRun


@dataclass(frozen=True)
class PrivacyOptions:
    """Options of ``lit-fedad privacy`` that all attacks share.

    Attributes:
        run: MLflow run id, or the run's folder.
        attack: ``lira`` (membership inference), ``inversion`` (images out of what is shared), ``dcor`` (distance
            correlation of shared densities with images), or ``report``, which attacks nothing and prints the page.
    """

    run: str
    attack: Literal["lira", "inversion", "dcor", "report"]


def privacy(options: Sequence[str]) -> None:
    """Attacks a complete run, and writes the outcome and the page to ``privacy`` in its folder.

    Args:
        options: Those of `PrivacyOptions` and of the attack, and overrides such as ``data.root=DIR``.
    """
    shared, others = separate(PrivacyOptions, options, "privacy")
    chosen, _ = read(PrivacyOptions, shared, "privacy")
    attack, overrides = _attack(chosen, others)  # wrong options end the command before any file is looked at
    from lit_fedad.audits.page import write_page
    from lit_fedad.experiment.finished_run import reopen
    from lit_fedad.experiment.run_folder import RunFolder

    with RunFolder.find(chosen.run).locked():
        run = reopen(chosen.run, overrides)
        if run.federation.plan is not None and chosen.attack in ("inversion", "dcor"):
            raise UserError(
                f"run={chosen.run}: it is noised, and attack={chosen.attack} looks at plain uploads; attack the"
                " same run without federation/privacy; attack=lira attacks what is released"
            )
        if run.federation.summing is not None and chosen.attack == "inversion":
            raise UserError(
                f"run={chosen.run}: its uploads were summed securely, and attack=inversion looks at single ones; attack"
                " the same run without federation=secure; attack=lira attacks the sum"
            )
        write_page(run, attack(run))


def _attack(
    chosen: PrivacyOptions, others: Sequence[str]
) -> tuple[Callable[[FinishedRun], Outcome | None], dict[str, str]]:
    """Returns the attack with its options, and the overrides of the run's configuration."""
    match chosen.attack:
        case "lira":
            from lit_fedad.audits.membership import LiraOptions, infer

            lira, overrides = read(LiraOptions, others, "privacy")
            return lambda run: infer(run, lira), overrides
        case "inversion":
            from lit_fedad.audits.inversion import invert
            from lit_fedad.audits.inversion_attack import InversionOptions

            inversion, overrides = read(InversionOptions, others, "privacy")
            return lambda run: invert(run, inversion), overrides
        case "dcor":
            from lit_fedad.audits.distance_correlation import correlate

            return correlate, dict(map(split, others))
        case "report":
            return lambda run: None, dict(map(split, others))
