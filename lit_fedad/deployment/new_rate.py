"""Saves another promised rate of false alarms, and with it other thresholds, as a version of a detector."""

from __future__ import annotations

import math
import shutil

from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.decisions import RATES
from lit_fedad.experiment.run_folder import RunFolder

# What a detector is made of; figures and predictions show decisions by the rate before.
_KEPT = ("checkpoints", "personal", "partition.json")


def save_rate(home: RunFolder, alpha: float) -> int:
    """Makes a version that differs from the default one in the rate that its decisions promise.

    The default stays what it is. What the new decisions are like on the run's test images is not known before
    ``lit-fedad evaluate``: the rates of the version before are left out.

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
    calibration, number = folder.calibration(), home.versions()[-1] + 1
    if all(math.isinf(calibration.rule(client, alpha).threshold) for client in calibration.clients):
        raise UserError(
            f"alpha={alpha:g}: no client has calibration images enough to promise it; give a larger one"
        )
    config = folder.config()
    config["evaluation"]["alpha"] = alpha
    last = {name: value for name, value in result["last"].items() if name not in RATES}
    made = RunFolder(home.path / "versions" / f".partial_{number}")
    shutil.rmtree(made.path, ignore_errors=True)
    try:
        made.claim(config)
        for path in (folder.path / name for name in _KEPT):
            if path.is_dir():
                shutil.copytree(path, made.path / path.name)
            elif path.exists():
                shutil.copyfile(path, made.path / path.name)
        if additions := folder.additions():
            made.save_json("additions.json", {"additions": [addition.to_json() for addition in additions]})
        made.save_json("calibration.json", calibration.to_json())
        changed = {"config": config, "decisions": {}, "last": last, "version": number}
        made.save_json("result.json", {**result, **changed})
        made.path.replace(home.version_folder(number).path)
    except OSError as error:
        raise UserError(f"{made.path}: cannot be written ({error.strerror})") from error
    finally:
        shutil.rmtree(made.path, ignore_errors=True)
    return number
