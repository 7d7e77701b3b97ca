"""Saves another promised rate of false alarms, and with it other thresholds, as a version of a detector."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import unwritable_in_one_line
from lit_fedad.core.text import shell_word
from lit_fedad.deployment.ui.reading import RunView, false_alarm_rate
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.claim import claim, locked
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.conformal import rounded_up
from lit_fedad.metrics.semantic import CALIBRATED_ERRORS

# Files that a detector is made of; figures and predictions are left out, for they show decisions at the earlier rate.
_COPIED = ("checkpoints", "personal", "partition.json")


def save_rate(home: RunFolder, alpha: float) -> int:
    """Makes a version that differs from the default one in the rate that its decisions promise.

    The default stays what it is. What the new decisions are like on the run's test images is not known before
    ``lit-fedad evaluate``: rates and errors by the thresholds of the version before are left out.

    Args:
        home: The run's folder, held by the caller.
        alpha: The rate.

    Returns:
        Number of the version.

    Raises:
        UserError: If the run is not complete, has no calibration scores, or too few of them for the rate.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha={alpha:g} must be above 0 and below 1")
    folder = home.version(None)
    result = folder.result()
    if result is None or "decisions" not in result:
        raise UserError(f"{folder.path}: is no complete run that decides about images")
    calibration = folder.calibration()
    if all(math.isinf(calibration.rule(client, alpha).threshold) for client in calibration.clients):
        raise UserError(
            f"alpha={alpha:g}: no client has calibration images enough to promise it; give a larger one"
        )
    config = folder.config()
    config["evaluation"]["alpha"] = alpha
    at_rate = (*RATES, *CALIBRATED_ERRORS)
    last = {name: value for name, value in result["last"].items() if not name.startswith(at_rate)}
    with unwritable_in_one_line(home.path), home.new_version() as (number, version):
        claim(version.path, config)
        for name in _COPIED:
            for path in filter(Path.is_file, [folder.path / name, *folder.path.glob(f"{name}/**/*")]):
                copy = version.path / path.relative_to(folder.path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
        if additions := folder.additions():
            version.save_additions(additions)
        save_json(version.path, "calibration.json", calibration.to_json())
        changed = {"config": config, "decisions": {}, "last": last, "version": number}
        save_json(version.path, "result.json", {**result, **changed})
    return number


def save_threshold(view: RunView, client: int, product: str | None, threshold: float) -> tuple[str, int, int]:
    """Makes a version with the rate of false alarms that a threshold has, and makes it the default.

    Args:
        view: The run.
        client: The client whose threshold it is.
        product: The product whose threshold it is; None for any.
        threshold: Score above which images are anomalous.

    Returns:
        What was done, in words; the number of the version that was the default, and that of the one that now is.

    Raises:
        UserError: If it cannot be saved, or the default version has other calibration scores by now.
    """
    home, rate = RunFolder(view.path).home, rate_of(view, client, product, threshold)
    with locked(home.path):
        view.check_default()
        before = home.default_version()
        number = save_rate(home, rate)
        folder = home.choose_version(number)
    rule = folder.calibration().rule(client, rate, product)
    edges = rule.scores.edges
    highest = ", the highest calibration score: above it no rate is lower" if threshold > edges[-1] else ""
    return (
        f"Version {number} is the default: at most {rounded_up(100 * rate):g} % false alarms, at all clients; here the"
        f" threshold is {rule.threshold:.6g}{highest}. An exported detector keeps its own until it is exported again.",
        before,
        number,
    )


def choose_version(view: RunView, number: int, instead_of: int) -> str:
    """Makes a version of a run the default again; says so in words.

    Args:
        view: The run.
        number: The version.
        instead_of: The version that is the default, as far as the caller knows.

    Raises:
        UserError: If there is no such version, or another is the default by now: somebody else's choice stays.
    """
    home = RunFolder(view.path).home
    with locked(home.path):
        if (now := home.default_version()) != instead_of:
            raise UserError(
                f"version {now} is the default by now, which was not saved here; nothing is undone. To go back all the"
                f" same: lit-fedad update {shell_word(f'run={home.path}')} default={number}"
            )
        home.choose_version(number)
    return f"Version {number} is the default again."


def rate_of(view: RunView, client: int, product: str | None, threshold: float) -> float:
    """Finds the rate of false alarms of a threshold: fewer, more specific scores may decide at a larger rate."""
    assert view.calibration is not None
    scores = view.shipped(client, product).scores
    while True:
        rate = false_alarm_rate(scores, threshold)
        deciding = view.calibration.rule(client, rate, product).scores
        if deciding.total >= scores.total:
            return rate
        scores = deciding
