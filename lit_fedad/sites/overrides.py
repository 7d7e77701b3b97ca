"""The overrides that configure a federation: choices and scalar values, which a site can take from others.

A configuration can name any function (``_target_``), any file and any folder. What comes over the wire may not: it
chooses among the packaged files of a group and the names that a setting lists, and sets numbers and truth values. No
text of it is ever opened as a file, fetched or compiled. Where images lie, where files are written and on what device
is computed, each site says itself.
"""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fedad.core.building import locate, options_of, takes
from lit_fedad.core.config import TYPES, Config, choices, compose, config_groups
from lit_fedad.core.conflicts import check_conflicts
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import CIRCUMSTANCES, identity
from lit_fedad.core.nested import value_at
from lit_fedad.core.text import printable
from lit_fedad.data.strategies import Pooled
from lit_fedad.data.transform import Fit
from lit_fedad.evaluation.accuracy_stream import ClientTest
from lit_fedad.experiment.trusted_targets import check_targets
from lit_fedad.models.backbones import create_backbone

OWN = (*CIRCUMSTANCES, "data", "partition", "public", "start", "hydra")
"""Sections and keys that every machine sets for itself."""

NORMALISATION: Mapping[str, tuple[float, float]] = {"data.mean": (0.0, 1.0), "data.std": (0.01, 100.0)}
"""Keys by which a federation says how labelled images are normalised, and in what ranges: models depend on it,
wherever images lie, and gradients grow with what they are divided by."""

OPERATORS = ("calibration.group", "image.page")
"""Keys that only a site's own operator may set: a regular expression over the names of its files, and their page."""

_CALLED = ("method.name", "method.paper", "method.under")
"""What a method is called, which its package says."""

_LISTED: Mapping[str, Any] = {
    "image.fit": Fit,
    "calibration.by": TYPES["calibration.by"],
    "evaluation.client_test": ClientTest,
    "learning_rate_decay": TYPES["learning_rate_decay"],
}
"""Literals of the texts that settings without a class of their own take."""

_WEIGHTS = ("auto", "imagenet", "own", "random")
"""Weights of a backbone that are no file."""

_UNREAD = ("data=packed", "data.root=unread", "data.train=unread", "tracking=off")
"""Choices in the place of those that each machine makes for itself."""

_MOST, _LONGEST = 200, 250
_WORD = re.compile(r"([a-z][a-z0-9_]*(?:[./][a-z0-9][a-z0-9_]*)*)=(-?[A-Za-z0-9][A-Za-z0-9_.+-]{0,99})")


def check_overrides(overrides: Sequence[str]) -> None:
    """Checks that overrides only choose and set scalar values.

    Raises:
        UserError: If one does more, naming it.
    """
    if len(overrides) > _MOST:
        raise UserError(
            f"the federation's configuration has {len(overrides)} overrides; at most {_MOST} are taken"
        )
    groups = config_groups()
    for number, override in enumerate(overrides, start=1):
        if len(override) > _LONGEST or (found := _WORD.fullmatch(override)) is None:
            taken = "only group=choice and key=scalar are, no _target_, +, ~, ${}, list or path"
            raise OverrideError(override[:100], taken, number)
        key, value = found.groups()
        if key in NORMALISATION:
            low, high = NORMALISATION[key]
            try:
                within = low <= float(value) <= high
            except ValueError:
                within = False
            if not within:
                raise OverrideError(override, f"it is no number in [{low:g}, {high:g}]", number)
        elif re.split("[./]", key)[0] in OWN or key in OPERATORS + _CALLED:
            raise OverrideError(override, f"each site sets {key} for itself", number)
        elif key in groups and value not in (*choices(key), "null"):
            raise OverrideError(override, f"{key} has no choice {value} here", number)
        elif "/" in key and key not in groups:
            raise OverrideError(override, f"there is no group {key} here", number)


class OverrideError(UserError):
    """An override that is not taken from a federation.

    Args:
        override: The override.
        why: Why not.
        number: Its place among the federation's, from 1; 0 where it is not known.
    """

    def __init__(self, override: str, why: str, number: int = 0) -> None:
        super().__init__(f"'{printable(override)}' is not taken from a federation: {why}")
        self.number = number


def compose_overrides(overrides: Sequence[str], own: Sequence[str] = (), coordinator: bool = False) -> Config:
    """Composes a federation's configuration, and this machine's own part of it.

    Args:
        overrides: Those of the federation; not trusted.
        own: Of ``fabric`` and ``cache``, as this machine's operator gave them.
        coordinator: Whether this machine's server may have public images, and its operator is told of settings that
            contradict each other; a site has none.

    Returns:
        The configuration. Its ``data`` says how labelled images are normalised (``mean``, ``std`` of each channel), or
        is None: each site puts its own in its place.

    Raises:
        UserError: If an override is refused, or the configuration is none.
    """
    check_overrides(overrides)
    given = dict(override.split("=") for override in overrides if override.split("=")[0] in NORMALISATION)
    if given and len(given) < len(NORMALISATION):
        raise UserError(f"{next(iter(given))}: give {' and '.join(NORMALISATION)}, or neither")
    asked = [override for override in overrides if override.split("=")[0] not in NORMALISATION]
    # Presets may choose a set that needs a folder; the last choice wins, and is not read. It is none of photographs,
    # for which machines of other memory would come to another size (`with_size`).
    overrides = [*asked, *_UNREAD, "partition=pooled", *([] if coordinator else ["public=null"]), *own]
    config, data = compose(overrides), {}
    if not given and takes(config["task"], "classes"):
        given = dict.fromkeys(NORMALISATION, "0.5")
    if given:
        channels = config["image"]["channels"]
        data = {key.split(".")[1]: [float(value)] * channels for key, value in given.items()}
        config = compose([*overrides, *(f"data.{key}={values}" for key, values in data.items())])
    unset = dict.fromkeys(("partition", "out", "start"))
    config |= {"data": data or None, **unset, "callbacks": {}, "fresh": False}
    for override in overrides[: len(overrides) - len(own)]:
        _check_text(override, config)
    if coordinator:
        check_conflicts(config, asked)
    check_targets(config, Path("the federation's configuration"))
    if (config["federation"].get("privacy") or {}).get("seed") is not None:
        raise UserError(
            "federation.privacy.seed: whoever knows it can take the noise away; leave it out, and each machine draws a"
            " secret of its own"
        )
    return config


def with_size(overrides: Sequence[str]) -> list[str]:
    """Adds to a new federation's overrides the size at which photographs are looked at, where they name none.

    The coordinator decides it for all: sites of other memory must come to the same.

    Raises:
        UserError: See `compose_overrides`.
    """
    config = compose_overrides(overrides, coordinator=True)
    if takes(config["task"], "classes"):  # labelled images have the size of their set
        return list(overrides)
    size = compose([*overrides, "data=folders", "data.root=unread", "tracking=off"])["image"]["size"]
    return list(overrides) if size == config["image"]["size"] else [*overrides, f"image.size={size}"]


def packaged(overrides: Sequence[str]) -> Config:
    """Composes the choices alone that overrides make, as their packages have them."""
    groups = config_groups()
    chosen = [override for override in overrides if override.split("=")[0] in groups]
    return compose([*chosen, *_UNREAD])


def _check_text(override: str, config: Config) -> None:
    """Refuses a text that its setting does not list."""
    key = override.split("=")[0]
    above, _, last = key.rpartition(".")
    section, value = value_at(config, above) if above else config, value_at(config, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise OverrideError(override, "it is no number")
    if not isinstance(value, str) or key in config_groups():
        return
    listed = tuple(one for one in typing.get_args(_LISTED.get(key)) if one)
    if isinstance(section, Mapping) and "_target_" in section:
        target = locate(section["_target_"])
        listed = options_of(target, last)
        if target is create_backbone:
            listed = {"name": _packaged_backbones(), "weights": _WEIGHTS}.get(last, ())
    if value not in listed:
        raise OverrideError(
            override, f"{key} takes no text" + (f" but {', '.join(listed)}" if listed else "")
        )


@functools.cache
def _packaged_backbones() -> tuple[str, ...]:
    """Returns the names of the networks of the group ``backbone``."""
    return tuple(sorted({compose([f"backbone={name}"])["backbone"]["name"] for name in choices("backbone")}))


def of_one_client(overrides: Sequence[str]) -> bool:
    """Tells whether the method that overrides choose is meant for one client that holds all images."""
    # Presets beside it may have partitions too.
    method = [override for override in overrides if override.startswith("method=")]
    return locate(compose(method)["partition"]["_target_"]) is Pooled


def agreed(config: Config) -> str:
    """Computes the hash of what all machines of a federation must have in common."""
    own = {
        "calibration": {**config["calibration"], "group": None},
        "image": {**config["image"], "page": None},
    }
    return identity({**config, **own, "data": None, "partition": None, "public": None})
