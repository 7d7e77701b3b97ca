"""Addresses of runs: in MLflow's user interface and on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from lit_fedad.papers.runs import CompleteRun
from lit_fedad.report.html import Cell
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.tracking.reading import TrackedRun


@dataclass(frozen=True)
class Links:
    """Addresses of runs.

    Attributes:
        ui: Address of ``mlflow ui``.
        out: Folder of the page, which addresses of run folders are relative to.
    """

    ui: str
    out: Path

    def run(self, run: TrackedRun) -> str:
        """Returns the address of a run's page in MLflow."""
        return f"{self.ui}/#/experiments/{run.experiment_id}/runs/{run.run_id}"

    def runs(self, runs: Sequence[CompleteRun]) -> str | None:
        """Returns the address of one run's page, or of MLflow's comparison of several; None without runs."""
        tracked = [run.tracked for run in runs]
        if len(tracked) < 2:
            return self.run(tracked[0]) if tracked else None
        ids = json.dumps([run.run_id for run in tracked], separators=(",", ":"))
        experiments = json.dumps(sorted({run.experiment_id for run in tracked}), separators=(",", ":"))
        return f"{self.ui}/#/compare-runs?runs={quote(ids)}&experiments={quote(experiments)}"

    def folder(self, run: TrackedRun) -> Cell:
        """Makes a cell with the name of a run's folder, and a link if the folder is on this machine."""
        if run.folder is None or not run.folder.is_dir():
            return Cell(run.folder.name if run.folder else UNKNOWN)
        return Cell(run.folder.name, quote(os.path.relpath(run.folder, self.out.resolve())))
