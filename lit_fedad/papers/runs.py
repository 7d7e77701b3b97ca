"""Complete runs that MLflow lists, each with result, files and address, in groups that differ in their seed alone."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal
from urllib.parse import quote

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import identity
from lit_fedad.core.nested import flatten, value_at
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
    complete = []
    for run in tracked:
        if run.folder is None or run.parent or "method" not in run.tags or "study" in run.tags:
            continue
        try:
            folder, result = _result(run, run.folder, fetched, uri)
        except (UserError, OSError) as error:  # the server may say of a folder what no file system takes
            display.warn(f"{run.name} is left out: {error}")
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
        key = (
            run.result["data"],
            identity({**run.config, "seed": None, "cache": {}, "promised": promised}),
        )
        seeds.setdefault(key, {})[run.seed] = run
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


def _distinguishing_settings(configs: Sequence[Config]) -> list[list[str]]:
    """Lists what each of several configurations has otherwise than any other.

    These are keys with their values, and in place of all keys of a section that others lack, or that is another there,
    its name. Each key is looked at once, and not once for each pair of configurations.
    """
    compared, written = [_comparable(config) for config in configs], [flatten(config) for config in configs]
    told = [set[str]() for _ in configs]
    for key in dict.fromkeys(chain(*compared)):
        values = [_override_text(own[key]) if key in own else None for own in compared]
        if len(set(values)) == 1:
            continue
        alike = [list(range(len(configs)))]
        for section in accumulate(key.split("."), "{}.{}".format):
            by_kind = [grouped((_kind(configs[index], section), index) for index in group) for group in alike]
            for kinds in by_kind:
                for kind, group in kinds.items() if len(kinds) > 1 else ():
                    for index in group:
                        config, above = configs[index], section.rpartition(".")[0]
                        if above and not isinstance(value_at(config, above) or None, Mapping):
                            continue  # what stands in place of a section is told as a whole
                        name = kind.rpartition(".")[2] if kind else _override_text(value_at(config, section))
                        told[index].add(f"{section}={name}")
            alike = list(chain(*(kinds.values() for kinds in by_kind)))
        for group in alike:
            if len({values[index] for index in group}) > 1:
                for index in group:
                    if key in written[index]:
                        told[index].add(f"{key}={_override_text(written[index][key])}")
    return [sorted(settings) for settings in told]


def _kind(config: Config, section: str) -> str | None:
    """Returns the class of a section; None for what is no section, or of no class."""
    value = value_at(config, section)
    return value.get("_target_") if isinstance(value, Mapping) else None


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
