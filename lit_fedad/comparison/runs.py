"""Complete runs as MLflow knows them, each with its result and files, and what tells their configurations apart."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_fedad.config import Config, flatten, identity
from lit_fedad.tracking.reading import TrackedRun, fetch_artifacts

_ARTIFACTS = ("result.json", "figures", "privacy")
# What says where and when a run happened, or which of several it is; and what repeats another key.
_NOT_COMPARED = (
    *("seed", "out", "tracking", "fabric", "cache", "fresh", "data.root"),
    *("task.grid", "task.image_size"),
)
_PLAIN = re.compile(r"[\w./:+-]*")


@dataclass(frozen=True)
class CompleteRun:
    """A complete run.

    Attributes:
        tracked: What MLflow knows of it.
        files: Folder that holds its result and its pictures here.
        result: Content of ``result.json``.
    """

    tracked: TrackedRun
    files: Path
    result: Mapping[str, Any]

    @property
    def config(self) -> Config:
        """The configuration it was made with."""
        return self.result["config"]

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.result["seed"]

    @property
    def metric(self) -> str:
        """Its first metric, by which it chooses its best round."""
        return next(name for name in self.result["last"] if name != "round")


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in nothing but their seed.

    Attributes:
        label: Method, and what tells it from other groups of this method on the same data.
        runs: One a seed, by seed; at least one.
    """

    label: str
    runs: Sequence[CompleteRun]

    @property
    def first(self) -> CompleteRun:
        """The run of the lowest seed."""
        return self.runs[0]


def complete_runs(tracked: Sequence[TrackedRun], fetched: Path, uri: str | None) -> list[CompleteRun]:
    """Those of the runs that are complete, from their folders, or from MLflow where these are elsewhere or anew.

    Args:
        tracked: Runs.
        fetched: Folder for what is fetched from MLflow.
        uri: Tracking URI.
    """
    found = []
    for run in tracked:
        folder = run.folder
        # A study's own run has trials, not rounds.
        if folder is None or "method" not in run.tags or "study" in run.tags:
            continue
        result = _result(folder)
        if run.status == "FINISHED" and (
            result is None or result["tracking_run_id"] not in (run.run_id, None)
        ):
            folder = fetched / run.run_id
            folder.mkdir(parents=True)
            result = _result(fetch_artifacts(run.run_id, _ARTIFACTS, folder, uri))
        if result is not None:
            found.append(CompleteRun(run, folder, result))
    return found


def _result(folder: Path) -> dict[str, Any] | None:
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.is_file() else None


def groups_by_data(runs: Sequence[CompleteRun]) -> dict[str, list[RunGroup]]:
    """Runs by data set, then by configuration without its seed; of several with one seed the last that began.

    Args:
        runs: In the order of their beginning.
    """
    seeds: dict[tuple[str, str], dict[int, CompleteRun]] = {}
    for run in runs:
        key = (run.result["data"], identity({**run.config, "seed": None}))
        seeds.setdefault(key, {})[run.seed] = run
    by_data: dict[str, list[list[CompleteRun]]] = {}
    for (data, _), by_seed in sorted(seeds.items(), key=lambda item: item[0][0]):
        by_data.setdefault(data, []).append([by_seed[seed] for seed in sorted(by_seed)])
    return {data: _labelled(several) for data, several in by_data.items()}


def _labelled(several: Sequence[Sequence[CompleteRun]]) -> list[RunGroup]:
    """Groups by method, each named by its method and, where others have the same, by what differs."""
    groups = []
    for runs in sorted(several, key=lambda runs: runs[0].result["method"]):
        method = runs[0].result["method"]
        kin = [other[0].config for other in several if other[0].result["method"] == method]
        telling = {key for other in kin for key in differences(runs[0].config, other)}
        values = flatten(runs[0].config)
        words = [f"{key}={values[key]}" for key in sorted(telling) if key in values]
        groups.append(RunGroup(f"{method} ({shortened(words)})" if words else method, runs))
    # What is too long to be told in full gets a number.
    for label in {group.label for group in groups}:
        alike = [index for index, group in enumerate(groups) if group.label == label]
        for number, index in enumerate(alike if len(alike) > 1 else (), start=1):
            groups[index] = RunGroup(f"{label} ({number})", groups[index].runs)
    return groups


def shortened(words: Sequence[str], most: int = 3) -> str:
    """A list in words, of which the end is only counted.

    Example:
        >>> shortened(["rounds=3", "grid=4", "batch_size=2"], most=2)
        'rounds=3, grid=4 and 1 more'
    """
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + rest


def differences(config: Config, other: Config) -> dict[str, str]:
    """Overrides that make a configuration of another one, by dotted key.

    Seed, circumstances and places of files do not count; of weights, whether they are random.

    Example:
        >>> differences({"seed": 1, "image": {"size": 32}}, {"seed": 0, "image": {"size": 64}, "grid": 4})
        {'grid': '~grid', 'image.size': 'image.size=32'}
    """
    ours, theirs = _comparable(config), _comparable(other)
    words = {key: f"~{key}" for key in theirs.keys() - ours.keys()}
    words |= {key: f"+{key}={_text(ours[key])}" for key in ours.keys() - theirs.keys()}
    words |= {
        key: f"{key}={_text(ours[key])}" for key in ours.keys() & theirs.keys() if ours[key] != theirs[key]
    }
    return dict(sorted(words.items()))


def _text(value: Any) -> str:
    """A value as an override writes it."""
    if not isinstance(value, str):
        return json.dumps(value, separators=(",", ":"))
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "\\'") + "'"


def _comparable(config: Config) -> dict[str, Any]:
    values = {
        key: value
        for key, value in flatten(config).items()
        if key not in _NOT_COMPARED and key.partition(".")[0] not in _NOT_COMPARED
    }
    if values.get("backbone.weights") not in (None, "random"):
        values["backbone.weights"] = None
    return values
