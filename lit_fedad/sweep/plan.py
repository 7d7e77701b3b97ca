"""Reads study files: a base experiment, the searched keys, and the objectives."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import BasePruner, NopPruner
from optuna.samplers import BaseSampler
from optuna.trial import create_trial

from lit_fedad.core.building import build, call, locate, takes, targets
from lit_fedad.core.config import Config, compose
from lit_fedad.core.config_groups import choices
from lit_fedad.core.conflicts import check_conflicts
from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import stored_text
from lit_fedad.core.identity import identity
from lit_fedad.core.plain_values import plain_yaml
from lit_fedad.core.typed_words import as_override_value

_ABSENT = object()
_CALLED = {"sampler": "samplers", "pruner": "pruners"}  # keys with a `_target_`, and its module in Optuna

BYTES = "bytes"
"""The objective that is not a metric: bytes of all exchanges, up and down, with set-up, divided by the rounds."""

EXTRAS = "extras/"
"""Beginning of an objective that a callback adds to a run's result as a number (`Run.extras`): an own metric."""


def is_late(objective: str) -> bool:
    """Returns whether an objective has a value after the last round alone."""
    return objective == BYTES or objective.startswith(EXTRAS)


def objective_value(result: Mapping[str, Any], objective: str) -> float | None:
    """Computes the value of an objective in a finished run.

    Args:
        result: The content of the run's ``result.json``.
        objective: A metric (``pro``: mean over clients; ``pro/worst``, ``pro/pooled``, ``pro/product_mean``), or
            `BYTES`, or a number that a callback adds (`EXTRAS`).

    Returns:
        The metric after the last round, None if it is undefined; for `BYTES`, the bytes of a round.

    Raises:
        UserError: If no callback adds such a number; see also `metric_value`.
    """
    if objective == BYTES:
        return (sum(result["bytes_up"]) + sum(result["bytes_down"])) / max(result["rounds"], 1)
    if objective.startswith(EXTRAS):
        value = result.get(key := objective.removeprefix(EXTRAS), _ABSENT)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise UserError(
                f"objective '{objective}': no callback of this run sets run.extras['{key}'] to a number"
            )
        return value
    return metric_value(result["last"], objective)


def metric_value(metrics: Mapping[str, Any], objective: str) -> float | None:
    """Returns the value of an objective that is a metric, from a round's summaries of each metric, by its name.

    Raises:
        UserError: If the metric is not measured, or not by product.
    """
    name, _, kind = objective.partition("/")
    if name not in metrics:
        raise UserError(
            f"objective '{objective}' is not measured here; one of {', '.join([*metrics, BYTES])}, or {EXTRAS}KEY"
        )
    value: float | None
    try:
        value = metrics[name][kind or "mean"]
    except KeyError:
        raise UserError(f"objective '{objective}': this run knows no products; give {name}") from None
    return value


_KINDS = ("mean", "worst", "pooled", "product_mean")
_DIRECTIONS = ("maximize", "minimize")


@dataclass(frozen=True)
class Dimension:
    """One searched key of the configuration.

    Attributes:
        type: ``float`` or ``int`` for a number, ``categorical`` for listed values.
        low: Smallest value of a number.
        high: Largest value of a number.
        log: Whether the number's logarithm is searched.
        step: Distance between the numbers that are tried; None for any float and every int.
        choices: Values of a categorical key: choices of a configuration group, or values of the key.
    """

    type: Literal["float", "int", "categorical"]
    low: float | None = None
    high: float | None = None
    log: bool = False
    step: float | None = None
    choices: list | None = None

    def distribution(self) -> BaseDistribution:
        """Builds the distribution that Optuna draws from.

        Raises:
            ValueError: If a bound is missing, is not a whole number for an int, or the bounds make no range.
        """
        if self.type == "categorical":
            return CategoricalDistribution(self.choices or [])
        if self.low is None or self.high is None:
            raise ValueError("low and high must be given")
        if self.type == "float":
            return FloatDistribution(self.low, self.high, log=self.log, step=self.step)
        step = 1 if self.step is None else self.step
        if any(number % 1 for number in (self.low, self.high, step)):
            raise ValueError("low, high and step of an int must be whole numbers")
        return IntDistribution(int(self.low), int(self.high), log=self.log, step=int(step))


@dataclass(frozen=True)
class Plan:
    """A study: the experiment that its trials run, the keys that they vary, and the objectives.

    Attributes:
        base: Overrides that configure the base experiment.
        objectives: Direction by metric. A metric is a mean over clients after the last round (``pro``), ``pro/worst``,
            ``pro/pooled``, over products (``pro/product_mean``), ``bytes`` (`BYTES`), or ``extras/KEY`` (`EXTRAS`).
        space: Searched keys, each with its `Dimension`.
        sampler: An Optuna sampler, by ``_target_``.
        pruner: An Optuna pruner, by ``_target_``; None to let every trial run to its end.
        trials: Number of trials, unless the option ``n_trials`` is given.
    """

    base: list
    objectives: dict
    space: dict
    sampler: dict
    trials: int
    pruner: dict | None = None

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The distribution of each searched key."""
        return {key: dimension.distribution() for key, dimension in self.space.items()}

    @cached_property
    def base_config(self) -> Config:
        """Configuration of the base experiment; trials are compared with the one that runs its values."""
        return compose(self.base)

    def config(self, params: Mapping[str, Any]) -> Config:
        """Composes the configuration of a trial."""
        return compose([*self.base, *(f"{key}={as_override_value(value)}" for key, value in params.items())])

    def defaults(self) -> dict[str, Any] | None:
        """Reads the base experiment's values of the searched keys; None if one lies outside the search space."""
        values = {key: self._default(key) for key in self.space}
        inside = all(_can_draw(self.distributions[key], value) for key, value in values.items())
        return values if inside else None

    def make_sampler(self, seed: int) -> BaseSampler:
        """Builds the sampler of one worker, with its seed if the sampler takes one."""
        return build(
            self.sampler, "sampler", **({"seed": seed % 2**32} if takes(self.sampler, "seed") else {})
        )

    def make_pruner(self) -> BasePruner:
        """Builds the study's pruner; without one, a pruner that ends no trial."""
        return build(self.pruner, "pruner") or NopPruner()

    def sampler_named(self) -> str:
        """Returns a JSON text that identifies the sampler, which may change while a study goes on."""
        return json.dumps(self.sampler, sort_keys=True, default=str)

    def fingerprint(self) -> str:
        """Returns a JSON text that identifies the study by its base experiment, search space and objectives."""
        space = {key: repr(distribution) for key, distribution in self.distributions.items()}
        return json.dumps([identity(self.base_config), space, self.objectives], sort_keys=True)

    def _default(self, key: str) -> Any:
        """Reads the base experiment's value of a key, or choice of a group; `_ABSENT` if it has none."""
        if choices(key):
            # Composes every choice, which finds misspelt ones now: each would make all its trials fail.
            same = [c for c in self.space[key].choices or () if self.config({key: c}) == self.base_config]
            return same[0] if same else _ABSENT
        value: Any = self.base_config
        for part in key.lstrip("+").split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return value


def sweeps_folder() -> Path:
    """Returns the folder of the packaged study files; in a checkout, ``sweeps`` at the top of the repository."""
    packaged = Path(__file__).parents[1] / "studies"
    return packaged if packaged.is_dir() else Path(__file__).parents[2] / "sweeps"


def read_plan(study: str, overrides: Sequence[str] = ()) -> Plan:
    """Reads a study file, adds overrides to its base experiment, and checks it against the searched configuration.

    Raises:
        UserError: If the study does not exist, or something in its file is wrong.
    """
    path = Path(study) if study.endswith(".yaml") else sweeps_folder() / f"{study}.yaml"
    if not path.is_file():
        names = sorted(file.stem for file in sweeps_folder().glob("*.yaml"))
        near = difflib.get_close_matches(study, names, n=1, cutoff=0.5)
        raise UserError(f"study={study}: give {' or '.join(near or names)}, or the path of a study file.yaml")
    where = path.name
    try:
        section = plain_yaml(stored_text(path))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error
    if not isinstance(section, dict) or not isinstance(section.get("space"), dict):
        raise UserError(f"{path}: a study file needs 'space', a section of searched keys")
    _check_names(section, where)
    for key, dimension in section["space"].items():
        if not isinstance(dimension, dict):
            raise UserError(
                f"{where}: space: {key} must be a section, such as {{type: int, low: 1, high: 8}}"
            )
    space = {
        key: call(Dimension, dimension, f"{where}: space: {key}")
        for key, dimension in section["space"].items()
    }
    plan = call(Plan, {**section, "space": space}, where)
    plan = replace(plan, base=[*plan.base, *overrides])
    _check(plan, where)
    return plan


_OF_THE_COMMAND = ("hydra", "callbacks", "tracking", "out", "start", "fresh")
"""Sections and keys that no study file may set: Hydra's own, callbacks, tracking, and how and where a run starts."""


def _check_names(section: Mapping[str, Any], where: str) -> None:
    """Refuses a study file that does more than vary settings and name Optuna's samplers and pruners.

    A study file may come from anybody, and what a ``_target_`` names is called.

    Raises:
        UserError: If it does more.
    """
    for key in _CALLED:
        if isinstance(section.get(key), dict) and "_target_" not in section[key]:
            raise UserError(f"{where}: {key} needs a _target_, such as optuna.{_CALLED[key]}.NAME")
        for name in map(str, targets(section.get(key))):
            if not re.fullmatch(rf"optuna\.{_CALLED[key]}\.\w+", name) or not (
                inspect.isclass(target := locate(name)) and issubclass(target, (BaseSampler, BasePruner))
            ):
                raise UserError(
                    f"{where}: {key} names {name}; a study names Optuna's samplers and pruners alone"
                )
            # Its workers have different seeds: they would repeat some values, and never try others.
            if name == "optuna.samplers.GridSampler":
                raise UserError(
                    f"{where}: workers cannot share a GridSampler; name optuna.samplers.BruteForceSampler, which tries"
                    " all choices and steps of space"
                )
    base = section.get("base")
    if not isinstance(base, list) or not all(isinstance(word, str) for word in base):
        raise UserError(f"{where}: base must be a list of overrides, such as [method=feddymem, rounds=10]")
    text = json.dumps([base, section["space"]], default=str)
    if "_target_" in text:
        raise UserError(f"{where}: it sets a _target_; a study names Optuna's samplers and pruners alone")
    if re.search(r"\$\{(?![\w.]+\})", text):
        raise UserError(f"{where}: of ${{...}} a study takes names of keys alone")
    for word in [*base, *map(str, section["space"])]:
        key, _, value = word.partition("=")
        if (top := re.split("[./@]", key.strip("+~ "))[0]) in _OF_THE_COMMAND and value not in choices(top):
            raise UserError(f"{where}: sets {key}; give it on the command line, no study file sets {top}")


def _check(plan: Plan, where: str) -> None:
    """Checks the values of a plan, and that all its parts can be built; `where` begins the errors."""
    directions = plan.objectives.values() if isinstance(plan.objectives, dict) else ()
    if not directions or not all(direction in _DIRECTIONS for direction in directions):
        raise UserError(f"{where}: objectives={plan.objectives} must be metric: {' or '.join(_DIRECTIONS)}")
    for metric in plan.objectives:
        if not is_late(metric) and metric.partition("/")[1] and metric.partition("/")[2] not in _KINDS:
            raise UserError(f"{where}: objective '{metric}' must end in one of /{' /'.join(_KINDS)}")
    if plan.pruner and (len(plan.objectives) > 1 or any(map(is_late, plan.objectives))):
        raise UserError(
            f"{where}: a study of several objectives, of {BYTES} or of {EXTRAS}KEY cannot prune; leave 'pruner' out"
        )
    if plan.trials < 1:
        raise UserError(f"{where}: trials={plan.trials} must be at least 1")
    for override in plan.base:
        if override.partition("=")[0] in plan.space:
            raise UserError(f"{where}: '{override}' fixes what the study searches; leave it out")
    try:
        check_conflicts(plan.base_config, plan.base)
        if str(plan.base_config["fabric"]["devices"]) != "1":
            raise UserError("a trial runs in one process; start more workers instead of fabric.devices")
        first_values = _first_values(plan)
        plan.make_sampler(0)
        plan.make_pruner()
        plan.config(first_values)
        for key in plan.space:
            plan._default(key)
    except (UserError, ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}") from error


def _first_values(plan: Plan) -> dict[str, Any]:
    """Returns the first choice or smallest value of each searched key."""
    first_values = {}
    for key, dimension in plan.space.items():
        try:
            distribution: Any = dimension.distribution()
        except ValueError as error:
            raise UserError(f"space: {key}: {error}") from error
        is_choice = isinstance(distribution, CategoricalDistribution)
        first_values[key] = distribution.choices[0] if is_choice else distribution.low
    return first_values


def _can_draw(distribution: BaseDistribution, value: Any) -> bool:
    """Tells whether a distribution can draw a value."""
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        create_trial(value=0.0, params={"key": value}, distributions={"key": distribution})
    except ValueError:  # raised by Optuna's own check of a trial's values
        return False
    return True
