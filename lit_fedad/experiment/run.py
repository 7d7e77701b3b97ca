"""A run in progress, and the hooks of its callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.calibration import alphas
from lit_fedad.evaluation.predict import Predicted
from lit_fedad.experiment.build import Model
from lit_fedad.experiment.run_data import Data, RunData
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.loop import Federation
from lit_fedad.metrics.conformal import Alpha, Calibration
from lit_fedad.metrics.federated import Summary
from lit_fedad.report.console import Display


@dataclass
class Run:
    """All parts of a run, in one process.

    Attributes:
        config: The configuration.
        folder: The run's folder.
        model: Backbone, task, client and server.
        data: The data of all clients.
        federation: The federation, which plays the rounds.
        fabric: The launched Fabric.
        display: Output for the user; quiet in processes other than the first.
        calibration: Calibration scores by client. This attribute and the next three are set after the last round of an
            anomaly task, on the first process only.
        predictions: Predictions of the test images by client.
        decisions: Judged decisions (`decide`) by promised rate of false alarms.
        rates: False-alarm and miss rates of the decisions that the run ships.
        extras: Values that callbacks add to ``result.json``, by key.
    """

    config: Config
    folder: RunFolder
    model: Model
    data: RunData
    federation: Federation
    fabric: Fabric
    display: Display
    calibration: Calibration = field(default_factory=lambda: Calibration({}, shared=False))
    predictions: Mapping[int, Predicted] = field(default_factory=dict)
    decisions: dict[Alpha, dict[int, dict[str, Any]]] = field(default_factory=dict)
    rates: dict[str, Summary] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def alphas(self) -> list[Alpha]:
        """Returns the promised rates of false alarms; the first is the one that the run ships."""
        return alphas(self.config)

    @property
    def local(self) -> Data:
        """Images, partition and loaders of a run whose clients' images are here.

        Raises:
            UserError: If the images stay at the sites.
        """
        if not isinstance(self.data, Data):
            raise UserError("this needs the clients' images, and those stay at their sites")
        return self.data


class RunCallback(FederationCallback):
    """The hooks of a run, in addition to those of its federation; called in every process.

    A callback is built before processes start, and passed to each: it must be picklable until `on_run_start`.
    Callbacks of the configuration are listed under ``callbacks``.
    """

    def on_run_start(self, run: Run) -> None:
        """Receives the run when all parts are built, before the first round."""

    def on_rounds_end(self, run: Run) -> None:
        """Receives the run after the last round and the calibration; `Federation.ask` may be called here."""

    def on_run_end(self, run: Run, result: dict[str, Any]) -> None:
        """Receives, on the first process, the content of ``result.json`` when it has been written."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Receives the error when the run ends early, whatever the cause."""
