"""Complete runs that MLflow lists, each with its result and files, in groups that differ in their seed alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_fedad.client_names import ClientNames
from lit_fedad.comparison.differences import differences, shortened
from lit_fedad.config import Config, flatten, identity
from lit_fedad.errors import UserError
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display
from lit_fedad.tracking.reading import TrackedRun, fetch_artifacts

_ARTIFACTS = ("result.json", "figures", "privacy")
# Of every result.
_KEYS = ("method", "data", "seed", "rounds", "partition", "first", "last", "best", "config")


@dataclass(frozen=True)
class CompleteRun:
    """A complete run.

    Attributes:
        tracked: Its record in MLflow.
        files: Folder on this machine that holds its result and its figures.
        result: Content of ``result.json``.
    """

    tracked: TrackedRun
    files: Path
    result: Mapping[str, Any]

    @property
    def config(self) -> Config:
        """Returns its configuration."""
        return self.result["config"]

    @property
    def seed(self) -> int:
        """Returns its seed."""
        return self.result["seed"]

    @property
    def first_metric(self) -> str:
        """Names its first metric, by which it chooses its best round."""
        return next(name for name in self.result["last"] if name != "round")

    @property
    def names(self) -> ClientNames:
        """Returns what its clients are called."""
        return ClientNames.of(self.result)

    def mean(self, metric: str, at: Literal["last", "best"] = "last") -> float | None:
        """Returns the mean of a metric over clients; None if it is not measured or not defined.

        Args:
            metric: Name of the metric.
            at: Which round.
        """
        return self.result[at].get(metric, {}).get("mean")

    def per_client(self, metric: str) -> dict[str, float]:
        """Returns a metric after the last round by client, without clients for which it is not defined.

        Args:
            metric: Name of the metric.
        """
        return self._defined(metric, "per_client")

    def per_product(self, metric: str) -> dict[str, float]:
        """Returns a metric after the last round by product, without products for which it is not defined.

        Args:
            metric: Name of the metric.
        """
        return self._defined(metric, "per_product")

    def _defined(self, metric: str, kind: str) -> dict[str, float]:
        values = self.result["last"].get(metric, {}).get(kind, {})
        return {holder: value for holder, value in values.items() if value is not None}


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but their seed.

    Attributes:
        label: Method, and what distinguishes the group from others of this method on the same data.
        runs: At least one run, by seed.
    """

    label: str
    runs: Sequence[CompleteRun]

    @property
    def first(self) -> CompleteRun:
        """Returns the run of the lowest seed."""
        return self.runs[0]


GroupsByData = Mapping[str, Sequence[RunGroup]]
"""Groups of runs by the name of their data."""


def complete_runs(
    tracked: Sequence[TrackedRun], fetched: Path, uri: str | None, display: Display
) -> list[CompleteRun]:
    """Finds the complete ones among tracked runs.

    Results are read from the folders of the runs; from MLflow where a folder is gone or holds another run by now. A run
    whose result cannot be read is left out, with a warning.

    Args:
        tracked: Runs.
        fetched: Folder for files from MLflow.
        uri: Tracking URI; None for MLflow's own setting.
        display: Prints warnings.

    Returns:
        The complete runs, in the order of `tracked`; studies are not among them.
    """
    found = []
    for run in tracked:
        if run.folder is None or "method" not in run.tags or "study" in run.tags:
            continue
        try:
            folder, result = _result(run, run.folder, fetched, uri)
        except UserError as error:
            display.warn(f"{run.name} is left out: {error}")
            continue
        if result is not None:
            found.append(CompleteRun(run, folder, result))
    return found


def _result(
    run: TrackedRun, folder: Path, fetched: Path, uri: str | None
) -> tuple[Path, Mapping[str, Any] | None]:
    """Returns a folder with a run's files, and its result if it is complete.

    Raises:
        UserError: If the result cannot be read.
    """
    result = RunFolder(folder).result()
    if run.status == "FINISHED" and (
        result is None or result.get("tracking_run_id") not in (run.run_id, None)
    ):
        folder = fetched / run.run_id
        folder.mkdir(parents=True)
        result = RunFolder(fetch_artifacts(run.run_id, _ARTIFACTS, folder, uri)).result()
    if result is not None and (lacking := [key for key in _KEYS if key not in result]):
        raise UserError(
            f"{folder / 'result.json'}: not the result of a run of this version (no '{lacking[0]}')"
        )
    ClientNames.of(result or {})
    return folder, result


def groups_by_data(runs: Sequence[CompleteRun]) -> dict[str, list[RunGroup]]:
    """Groups runs by data set, then by their configuration without its seed.

    Args:
        runs: In the order in which they began: of several runs with one configuration and seed the last one counts.

    Returns:
        Groups by the name of the data, by method.
    """
    seeds: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for run in runs:
        # With and without cached features runs differ in the last digits alone.
        key = (run.result["data"], identity({**run.config, "seed": None, "cache": {}}))
        seeds.setdefault(key, {})[run.seed] = run
    by_data: dict[str, list[list[CompleteRun]]] = {}
    for (data, _), by_seed in sorted(seeds.items(), key=lambda item: item[0][0]):
        by_data.setdefault(data, []).append([by_seed[seed] for seed in sorted(by_seed)])
    return {data: _labelled(several) for data, several in by_data.items()}


def _labelled(several: Sequence[Sequence[CompleteRun]]) -> list[RunGroup]:
    """Labels groups by method and, where several have the same method, by what differs between them."""
    groups = []
    for runs in sorted(several, key=lambda runs: runs[0].result["method"]):
        method, config = runs[0].result["method"], runs[0].config
        others = [other[0].config for other in several if other[0].result["method"] == method]
        keys = {key for other in others for key in differences(config, other)}
        values = flatten(config)
        settings = [f"{key}={values[key]}" for key in sorted(keys) if key in values]
        groups.append(RunGroup(f"{method} ({shortened(settings)})" if settings else method, runs))
    # Labels that are equal because they were shortened get a number.
    for label in {group.label for group in groups}:
        alike = [index for index, group in enumerate(groups) if group.label == label]
        for number, index in enumerate(alike if len(alike) > 1 else (), start=1):
            groups[index] = RunGroup(f"{label} ({number})", groups[index].runs)
    return groups
