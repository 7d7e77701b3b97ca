"""The images that calibrate a run's decisions, and the rates that it promises."""

from __future__ import annotations

from lightning.fabric import Fabric

from lit_fedad.contracts import Method
from lit_fedad.core.config import Config
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.hold_out import hold_out
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.evaluation.calibration import CalibrationScores
from lit_fedad.metrics.conformal import Alpha

HELD_OUT = 0.2
"""Share of each client's images that calibrates, where a method's model cannot leave images out again."""

LEAST = 9
"""Images that a client with a model of its own holds out at least, up to half of them: as many as 0.1 needs."""


def alphas(config: Config) -> list[Alpha]:
    """Returns the promised rates of false alarms; the first is the one that decisions are shipped with."""
    given = config["evaluation"]["alpha"]
    return list(given) if isinstance(given, list) else [given]


def noised_run(config: Config) -> bool:
    """Tells whether a run's sums are noised: images cannot be taken out of them again."""
    privacy = config["federation"].get("privacy")
    return privacy is not None and privacy["epsilon"] is not None


def with_calibration(config: Config, images: Images, partition: Partition, method: Method) -> Partition:
    """Holds images out for calibration, unless the method needs none or classifies.

    Raises:
        UserError: If ``calibration.group`` does not fit the images.
    """
    settings = config["calibration"]
    share, least = settings["share"], 0
    if share is None:
        share = 0.0 if method.exchanges.leave_out is not None and not noised_run(config) else HELD_OUT
        least = 0 if method.client.predictors.shared or not share else LEAST
    if method.client.task.kind == "classification":
        share = 0.0
    return hold_out(partition, images, share, config["seed"], settings["group"], least)


def calibration_scores(
    config: Config,
    images: Images,
    partition: Partition,
    module: FederatedDataModule,
    fabric: Fabric,
    method: Method,
) -> CalibrationScores:
    """Builds the function that counts a client's calibration scores."""
    folds, group = config["calibration"]["folds"], config["calibration"]["group"]
    leave_out = None if noised_run(config) else method.exchanges.leave_out
    return CalibrationScores(images, partition, module, fabric, folds, config["seed"], group, leave_out)
