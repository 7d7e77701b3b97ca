"""The ``privacy`` command: it attacks a finished run, and writes the page of what is known of the run's privacy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lit_fedad.audits.distance_correlation import correlate
from lit_fedad.audits.inversion import invert
from lit_fedad.audits.inversion_attack import InversionOptions
from lit_fedad.audits.membership import LiraOptions, infer
from lit_fedad.audits.page import Outcome, write_page
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.claim import locked
from lit_fedad.experiment.finished_run import FinishedRun, reopen
from lit_fedad.experiment.run_folder import RunFolder


def lira(run: str, options: LiraOptions, overrides: Mapping[str, str] | None = None) -> None:
    """Infers membership from all messages of a run, against those of shadow runs; the same command continues.

    Args:
        run: MLflow run id, or the run's folder.
        options: What is compared, and with how many shadow runs.
        overrides: Values that differ on this machine, such as ``data.root``.
    """
    _attack(run, overrides, lambda opened: infer(opened, options))


def inversion(run: str, options: InversionOptions, overrides: Mapping[str, str] | None = None) -> None:
    """Reconstructs images from what a client sends: a memory, weights, or images themselves.

    Args:
        run: MLflow run id, or the run's folder.
        options: Whom to attack and how.
        overrides: Values that differ on this machine, such as ``data.root``.
    """
    _attack(run, overrides, lambda opened: invert(opened, options), plain="inversion", single=True)


def dcor(run: str, overrides: Mapping[str, str] | None = None) -> None:
    """Recomputes the distance correlations of a run's shared densities with images.

    Args:
        run: MLflow run id, or the run's folder.
        overrides: Values that differ on this machine, such as ``data.root``.
    """
    _attack(run, overrides, correlate, plain="dcor")


def report(run: str, overrides: Mapping[str, str] | None = None) -> None:
    """Writes and prints the page on the privacy of a run; starts no attack.

    Args:
        run: MLflow run id, or the run's folder.
        overrides: Values that differ on this machine, such as ``data.root``.
    """
    _attack(run, overrides, lambda opened: None)


def _attack(
    run: str,
    overrides: Mapping[str, str] | None,
    attack: Callable[[FinishedRun], Outcome | None],
    plain: str = "",
    single: bool = False,
) -> None:
    """Attacks a complete run, and writes the outcome and the page to ``privacy`` in its folder.

    Args:
        run: MLflow run id, or the run's folder.
        overrides: Values that differ on this machine.
        attack: The attack on the opened run.
        plain: Name of the attack if it needs uploads without noise; else empty.
        single: Whether the attack needs single uploads instead of their sum.

    Raises:
        UserError: If the run's uploads are noised or summed, and the attack needs others.
    """
    with locked(RunFolder.find(run).path):
        opened = reopen(run, overrides)
        if plain and opened.federation.plan is not None:
            raise UserError(
                f"run={run}: it is noised, and attack={plain} looks at plain uploads; attack the same run without"
                " federation/privacy; attack=lira attacks what is released"
            )
        if single and opened.federation.summing is not None:
            raise UserError(
                f"run={run}: its uploads were summed securely, and attack={plain} looks at single ones; attack the same"
                " run without federation=secure; attack=lira attacks the sum"
            )
        write_page(opened, attack(opened))
