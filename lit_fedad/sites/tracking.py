"""A federation of sites in MLflow: recorded as a run in one process is, and what its operator sees of each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_fedad.core.config import Config
from lit_fedad.experiment.build import Model
from lit_fedad.experiment.calibration import alphas
from lit_fedad.experiment.track import begin_record, flat_metrics, flat_summaries, track_files
from lit_fedad.federation.callback import FederationCallback
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.console import Display
from lit_fedad.sites.letters import Facts
from lit_fedad.sites.status import STATUS, Status
from lit_fedad.tracking.tracker import Tracker


class SitesTracking(FederationCallback):
    """A callback that tracks a federation at its coordinator, where ``tracking`` enables it.

    Args:
        config: The run's configuration.
        folder: The run's folder.
        status: What is known of the sites.
    """

    _tracker: Tracker

    def __init__(self, config: Config, folder: Path, status: Status) -> None:
        self.config, self.folder, self.status = config, folder, status

    @contextmanager
    def open(self, model: Model, facts: Mapping[int, Facts], display: Display) -> Iterator[None]:
        """Begins the record, or continues that of a resumed run, for a block; its end is that of the block.

        Args:
            model: The server's model.
            facts: What sites said of themselves, by client.
            display: Output of a warning about records that could not be sent.
        """
        self._tracker = begin_record(self.config, self.folder, self._name, "sites", model)
        products = {self.status.names[client]: own.held for client, own in facts.items()}
        # No images are here: what identifies the data is what the sites said.
        self._tracker.dataset("sites", "sites", facts[min(facts)].configuration, products, "training")
        ended = "FAILED"
        try:
            yield
            ended = "FINISHED"
        finally:
            display.unsent(self._tracker.close(ended).pending, self.folder)

    def on_round_end(self, federation: Federation, report: RoundReport) -> None:
        """Records the round's numbers, and what is known of each site after it."""
        sites = self.status.sites(federation.history, {})
        self._tracker.metrics(flat_metrics(report, federation.names) | flat_status(sites), step=report.round)

    def judged(self, federation: Federation, rates: Mapping[str, Any]) -> str | None:
        """Records the rates of the decisions; returns the id of the MLflow run, None where there is none yet."""
        promised = {"false_alarm_rate/promised": alphas(self.config)[0]}
        self._tracker.metrics(flat_summaries(rates, federation.names) | promised, federation.rounds)
        return self._tracker.run_id

    def files(self) -> None:
        """Records the run's files."""
        track_files(self._tracker, self.folder)
        self._tracker.artifact(self.folder / STATUS)

    @property
    def _name(self) -> str:
        """Names the run by its method, as the folder of every federation's run is called alike."""
        return f"{self.config['method']['name']}-sites-s{self.config['seed']}"


def flat_status(sites: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Flattens what is known of sites (`Status.sites`) into numbers for the tracker.

    Example:
        >>> flat_status({"north": {"rounds": 2, "last_seen": None, "troubles": ["round 1: late"]}})
        {'site/north/rounds': 2.0, 'site/north/troubles': 1.0}
    """
    flat: dict[str, float] = {}
    for name, own in sites.items():
        counted = {**own, "troubles": len(own["troubles"])}
        flat |= {f"site/{name}/{key}": float(value) for key, value in counted.items() if value is not None}
    return flat
