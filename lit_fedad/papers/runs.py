"""Complete runs that MLflow lists, each with result, files and address, in groups that differ in their seed alone."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal
from urllib.parse import quote

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import identity
from lit_fedad.core.nested import flatten
from lit_fedad.data.sample import grouped
from lit_fedad.experiment.run_files import check_format
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display
from lit_fedad.report.html import Cell
from lit_fedad.report.tables import UNKNOWN
from lit_fedad.tracking.reading import TrackedRun, fetch_artifacts

# Where and when a run happened, which of several seeds it is, and keys that repeat another one.
_NOT_COMPARED = (
    *("seed", "out", "tracking", "fresh", "cache", "data.root"),
    *("fabric.accelerator", "fabric.devices", "fabric.num_nodes"),
    *("task.grid", "task.image_size"),
)
_UNQUOTED = re.compile(r"[\w./:+-]*")  # texts that need no quotes in an override


def differences(config: Config, other: Config) -> dict[str, str]:
    """Finds the overrides that make a configuration of another one.

    Seed, circumstances and folders are not compared; of the backbone's weights only whether they are random.

    Example:
        >>> differences({"seed": 1, "image": {"size": 32}}, {"seed": 0, "image": {"size": 64}, "grid": 4})
        {'grid': '~grid', 'image.size': 'image.size=32'}
        >>> differences({"head": None}, {"head": {"hidden": 4}})
        {'head': 'head=null'}
    """
    ours, theirs = _comparable(config), _comparable(other)
    new = ours.keys() - theirs.keys()
    # A value in place of a section overrides the whole section: the keys of that section need no override.
    sections = {key for key in new if any(their.startswith(f"{key}.") for their in theirs)}
    # A section in place of nothing is added key by key.
    filled = {key for key in theirs if any(our.startswith(f"{key}.") for our in new)}
    gone = {
        key
        for key in theirs.keys() - ours.keys() - filled
        if not any(key.startswith(f"{section}.") for section in sections)
    }
    overrides = {key: f"~{key}" for key in gone}
    overrides |= {key: f"{'' if key in sections else '+'}{key}={_override_text(ours[key])}" for key in new}
    overrides |= {
        key: f"{key}={_override_text(ours[key])}"
        for key in ours.keys() & theirs.keys()
        if ours[key] != theirs[key]
    }
    return dict(sorted(overrides.items()))


def shortened(items: Sequence[str]) -> str:
    """Joins texts with commas, and counts those beyond the first three.

    Example:
        >>> shortened(["rounds=3", "grid=4", "batch_size=2", "seed=1"])
        'rounds=3, grid=4, batch_size=2 and 1 more'
    """
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def _override_text(value: Any) -> str:
    """Writes a value as an override does."""
    if not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return value if _UNQUOTED.fullmatch(value) else "'" + value.replace("'", "\\'") + "'"


def _comparable(config: Config) -> dict[str, Any]:
    values = {
        key: value
        for key, value in flatten(config).items()
        if key not in _NOT_COMPARED and key.partition(".")[0] not in _NOT_COMPARED
    }
    if values.get("backbone.weights") not in (None, "random"):
        values["backbone.weights"] = None
    return values


_ARTIFACTS = ("result.json", "figures", "privacy")
# Keys of every result, and the kinds of their values.
_KINDS = {
    **dict.fromkeys(("method", "data", "task"), str),
    **dict.fromkeys(("seed", "rounds"), int),
    **dict.fromkeys(("partition", "first", "last", "best", "config"), dict),
}


@dataclass(frozen=True)
class CompleteRun:
    """A complete run.

    Attributes:
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
        """Returns the mean of a metric over clients; None if it is not measured or not defined."""
        return self.result[at].get(metric, {}).get("mean")

    def per_client(self, metric: str) -> dict[str, float]:
        """Returns a metric after the last round by client, without clients for which it is not defined."""
        return self._defined(metric, "per_client")

    def per_product(self, metric: str) -> dict[str, float]:
        """Returns a metric after the last round by product, without products for which it is not defined."""
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


def each_run(data: GroupsByData) -> Iterator[tuple[str, CompleteRun]]:
    """Yields all runs with their titles: group, data and seed."""
    for name, groups in data.items():
        for group in groups:
            for run in group.runs:
                yield f"{group.label} on {name}, seed {run.seed}", run


def by_first_metric(data: GroupsByData) -> Iterator[tuple[str, str, Sequence[RunGroup]]]:
    """Yields the name of data, a first metric, and the groups on these data that have it: what one figure compares."""
    for name, groups in data.items():
        for first, alike in grouped((group.first.first_metric, group) for group in groups).items():
            yield name, first, alike


def complete_runs(
    tracked: Sequence[TrackedRun], fetched: Path, uri: str | None, display: Display
) -> list[CompleteRun]:
    """Finds the complete ones among tracked runs that stand alone: studies of sweeps show their trials themselves.

    Results are read from the folders of the runs; from MLflow where a folder is gone or holds another run by now. A run
    whose result cannot be read, or that another version wrote, is left out, with a warning.
    """
    alone = [
        (run, folder)
        for run in tracked
        if (folder := run.folder) and not run.parent and "method" in run.tags and "study" not in run.tags
    ]
    complete = []
    with display.progress("Results of runs", announced=False) as progress:
        for number, (run, own_folder) in enumerate(alone):
            progress(number, len(alone))
            try:
                folder, result = _result(run, own_folder, fetched, uri)
            except UserError as error:
                display.warn(f"{run.name} is left out: {error}")
                continue
            except OSError as error:  # the server may say of a folder what no file system takes
                display.warn(f"{run.name} is left out: its folder cannot be read ({error.strerror})")
                continue
            if result is not None:
                complete.append(CompleteRun(run, folder, result))
    return complete


def _result(
    run: TrackedRun, folder: Path, fetched: Path, uri: str | None
) -> tuple[Path, Mapping[str, Any] | None]:
    """Returns a folder with a run's files, and its result if it is complete.

    Raises:
        UserError: If the result cannot be read, or another version wrote it.
    """
    result, settings = RunFolder(folder).result(), folder
    if result is not None and result.get("tracking_run_id") not in (run.run_id, None):
        result = None  # of another run, which was begun in this folder later
    if result is None and run.status == "FINISHED":
        fetched.mkdir(parents=True, exist_ok=True)
        folder = Path(mkdtemp(dir=fetched))  # not named by the server, which may name any place
        settings = folder / "settings"
        settings.mkdir()
        result = RunFolder(fetch_artifacts(run.run_id, _ARTIFACTS, folder, uri)).result()
        # In a folder of its own: files beside a configuration are checked by the run's manifest, which is no artifact.
        fetch_artifacts(run.run_id, ["config.yaml"], settings, uri)
    if result is None:
        return folder, None
    check_format(settings)
    if lacking := [key for key, kind in _KINDS.items() if not isinstance(result.get(key), kind)]:
        raise UserError(
            f"{folder / 'result.json'}: not the result of a run of this version (no '{lacking[0]}')"
        )
    ClientNames.of(result)
    return folder, result


def groups_by_data(runs: Sequence[CompleteRun]) -> dict[str, list[RunGroup]]:
    """Groups runs by data set, then by their configuration without its seed, and by what they promise.

    Args:
        runs: In the order in which they began: of several runs with one configuration and seed the last one counts.
    """
    seeds: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for run in runs:
        # With and without cached features runs differ in the last digits alone. The promised share of false alarms,
        # which no training depends on, decides rates that are averaged here.
        promised = run.config.get("evaluation", {}).get("alpha")
        settings = identity({**run.config, "seed": None, "cache": {}, "promised": promised})
        seeds.setdefault((run.result["data"], settings), {})[run.seed] = run
    ordered = sorted(seeds.items(), key=lambda item: item[0][0])
    by_data = grouped((data, [by_seed[seed] for seed in sorted(by_seed)]) for (data, _), by_seed in ordered)
    return {data: _labelled(several) for data, several in by_data.items()}


def _labelled(several: Sequence[Sequence[CompleteRun]]) -> list[RunGroup]:
    """Labels groups by method and, where several have the same method, by what differs between them."""
    groups = []
    by_method = grouped((runs[0].result["method"], runs) for runs in several)
    for method, of_method in sorted(by_method.items()):
        told = _distinguishing_settings([runs[0].config for runs in of_method])
        groups += [
            RunGroup(f"{method} ({shortened(settings)})" if settings else method, runs)
            for runs, settings in zip(of_method, told, strict=True)
        ]
    # Labels that are equal because they were shortened get a number.
    for label in {group.label for group in groups}:
        alike = [index for index, group in enumerate(groups) if group.label == label]
        for number, index in enumerate(alike if len(alike) > 1 else (), start=1):
            groups[index] = RunGroup(f"{label} ({number})", groups[index].runs)
    return groups


_ABSENT = object()


def _distinguishing_settings(configs: Sequence[Config]) -> list[list[str]]:
    """Lists, for each of several configurations, the settings that not all of them share.

    A setting is a key with its value, or a section with its class where others have another class or none.
    """
    settings = [list[str]() for _ in configs]

    def compare(key: str, values: Mapping[int, Any]) -> None:
        """Adds the settings in which values of one key differ; values are by the number of the configuration."""
        if key in _NOT_COMPARED:
            return
        by_kind = grouped((_kind(value), number) for number, value in values.items())
        for kind, numbers in by_kind.items():
            if kind is None:
                texts = {
                    number: _override_text(values[number])
                    for number in numbers
                    if values[number] is not _ABSENT
                }
                named_weights = key == "backbone.weights" and "random" not in texts.values()
                equal = len(texts) == len(numbers) and (len(set(texts.values())) == 1 or named_weights)
                if not equal or len(by_kind) > 1:
                    for number, text in texts.items():
                        settings[number].append(f"{key}={text}")
                continue
            if kind and len(by_kind) > 1:
                for number in numbers:
                    settings[number].append(f"{key}={kind.rpartition('.')[2]}")
            for name in dict.fromkeys(chain(*(values[number] for number in numbers))):
                below = {number: values[number].get(name, _ABSENT) for number in numbers}
                compare(f"{key}.{name}" if key else name, below)

    compare("", dict(enumerate(configs)))
    return [sorted(own) for own in settings]


def _kind(value: Any) -> str | None:
    """Returns the class of a section, "" for a section without a class, and None for a value."""
    return value.get("_target_", "") if isinstance(value, Mapping) else None


@dataclass(frozen=True)
class Links:
    """Addresses of runs.

    Attributes:
        ui: Address of MLflow's pages.
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
        if run.folder is None or not os.path.isdir(run.folder):  # noqa: PTH112 - of any name, and raises nothing
            return Cell(run.folder.name if run.folder else UNKNOWN)
        return Cell(run.folder.name, quote(os.path.relpath(run.folder, self.out.resolve())))
