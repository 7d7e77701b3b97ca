"""A run in progress, and what callbacks hear of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.config import Config
from lit_fedad.experiment.build import Data, Model
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.loop import Federation
from lit_fedad.report.console import Display


@dataclass
class Run:
    """All parts of a run, in one process.

    Attributes:
        config: Its configuration.
        folder: Its files.
        model: Backbone, task, client and server.
        data: Images, partition and loaders.
        federation: The round loop.
        fabric: Device, precision and processes.
        display: What the user reads; quiet in processes other than the first.
        thresholds: Decision threshold by client, after the last round of an anomaly task; on the first process only.
        extras: What callbacks add to ``result.json``, by key.
    """

    config: Config
    folder: RunFolder
    model: Model
    data: Data
    federation: Federation
    fabric: Fabric
    display: Display
    thresholds: dict[int, float] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)


class RunCallback(FederationCallback):
    """Hooks of a run, beside those of its federation; called in every process.

    A callback is built before processes start, and handed to each: it must be picklable until `on_run_start`.
    Callbacks of the configuration stand under ``callbacks``.
    """

    def on_run_start(self, run: Run) -> None:
        """Called when all parts are built, before the first round."""

    def on_rounds_end(self, run: Run) -> None:
        """Called after the last round, when thresholds are set: `Federation.ask` may be called here."""

    def on_run_end(self, run: Run, result: dict[str, Any]) -> None:
        """Called on the first process with the content of ``result.json``, which is written."""

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Called when the run ends early, whatever the cause."""
