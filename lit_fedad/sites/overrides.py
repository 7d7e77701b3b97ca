"""The overrides that configure a federation: choices and scalar values, which a site can safely take from others.

A configuration can name any function (``_target_``), any file and any folder. Overrides that come over the network may
not: they choose among the packaged files of a group and the names that a setting lists, and set numbers and truth
values. Their text is never opened as a file, fetched or compiled. Each site itself says where its images lie, where
files are written and which device computes.
"""

from __future__ import annotations

import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_fedad.core.building import locate, options_of, takes, targets
from lit_fedad.core.config import Config, compose
from lit_fedad.core.config_groups import choices, config_groups
from lit_fedad.core.config_schema import TYPES
from lit_fedad.core.conflicts import check_conflicts
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import CIRCUMSTANCES, identity
from lit_fedad.core.nested import value_at
from lit_fedad.core.own_files import PACKAGES, code_of
from lit_fedad.core.text import printable
from lit_fedad.data.strategies import Pooled
from lit_fedad.data.transform import Fit
from lit_fedad.evaluation.accuracy_stream import ClientTest
from lit_fedad.experiment.trusted_targets import check_targets
from lit_fedad.models.backbones import create_backbone

OWN = (*CIRCUMSTANCES, "data", "partition", "public", "start", "hydra")
"""Sections and keys that every machine sets for itself."""

NORMALISATION: Mapping[str, tuple[float, float]] = {"data.mean": (0.0, 1.0), "data.std": (0.01, 100.0)}
"""Keys by which a federation normalises labelled images, with the range of their values. All sites need the same, since
models depend on them; the range is bounded, since the size of gradients depends on the divisor ``data.std``."""

OPERATORS = ("calibration.group", "image.page")
"""Keys that only a site's own operator may set: a regular expression over the names of its files, and their page."""

_OWN_CHOICE = f"if it is of a package of your own, install that and set {PACKAGES}"

_CALLED = ("method.name", "method.paper", "method.under")
"""Keys of a method's names, which only the packaged file of the method sets."""

_LISTED: Mapping[str, Any] = {
    "image.fit": Fit,
    "calibration.by": TYPES["calibration.by"],
    "evaluation.client_test": ClientTest,
    "learning_rate_decay": TYPES["learning_rate_decay"],
}
"""By key of a setting that belongs to no class: the type that lists the texts that it may have."""

_WEIGHTS = ("auto", "imagenet", "own", "random")
"""Names of a backbone's weights that do not stand for a file."""

_UNREAD = ("data=packed", "data.root=unread", "data.train=unread", "tracking=off")
"""Placeholders for choices that each machine makes for itself; nothing reads them."""

_MOST, _LONGEST = 200, 250  # overrides of a federation; characters of one override
_WORD = re.compile(r"([a-z][a-z0-9_]*(?:[./][a-z0-9][a-z0-9_]*)*)=(-?[A-Za-z0-9][A-Za-z0-9_.+-]{0,99})")


def check_overrides(overrides: Sequence[str]) -> None:
    """Checks that overrides only make choices and set scalar values.

    Raises:
        OverrideError: If an override does more; the message names it.
        UserError: If there are too many.
    """
    if len(overrides) > _MOST:
        raise UserError(
            f"the federation's configuration has {len(overrides)} overrides; at most {_MOST} are taken"
        )
    groups = config_groups()
    for number, override in enumerate(overrides, start=1):
        if len(override) > _LONGEST or (match := _WORD.fullmatch(override)) is None:
            allowed = "only group=choice and key=scalar are, no _target_, +, ~, ${}, list or path"
            raise OverrideError(override[:100], allowed, number)
        key, value = match.groups()
        if key in NORMALISATION:
            low, high = NORMALISATION[key]
            try:
                in_range = low <= float(value) <= high
            except ValueError:
                in_range = False
            if not in_range:
                raise OverrideError(override, f"it is no number in [{low:g}, {high:g}]", number)
        elif re.split("[./]", key)[0] in OWN or key in OPERATORS + _CALLED:
            raise OverrideError(override, f"each site sets {key} for itself", number)
        elif key in groups and value not in (*choices(key), "null"):
            raise OverrideError(override, f"{key} has no choice {value} here; {_OWN_CHOICE}", number)
        elif "/" in key and key not in groups:
            raise OverrideError(override, f"there is no group {key} here", number)


class OverrideError(UserError):
    """An override that a site does not take from a federation.

    Args:
        override: The override.
        why: Why it is not taken.
        number: Its number among the federation's overrides, from 1; 0 if that is not known.
    """

    def __init__(self, override: str, why: str, number: int = 0) -> None:
        super().__init__(f"'{printable(override)}' is not taken from a federation: {why}")
        self.number = number


def compose_overrides(overrides: Sequence[str], own: Sequence[str] = (), coordinator: bool = False) -> Config:
    """Composes a federation's configuration, with this machine's own settings in it.

    Args:
        overrides: The overrides of the federation; not trusted.
        own: Overrides of ``fabric`` and ``cache`` from this machine's operator.
        coordinator: Whether this machine is the coordinator: it may have public images, and settings that contradict
            each other are refused. A site has no public images.

    Returns:
        The configuration. Its section ``data`` says how labelled images are normalised (``mean``, ``std`` of each
        channel), or is None; each site replaces it by its own.

    Raises:
        UserError: If an override is refused, or the configuration is invalid.
    """
    check_overrides(overrides)
    normalisation = dict(word.split("=") for word in overrides if word.split("=")[0] in NORMALISATION)
    if normalisation and len(normalisation) < len(NORMALISATION):
        raise UserError(f"{next(iter(normalisation))}: give {' and '.join(NORMALISATION)}, or neither")
    others = [override for override in overrides if override.split("=")[0] not in NORMALISATION]
    # Presets may choose a data set that needs a folder. `_UNREAD` comes later and so replaces it, by a set without
    # photographs: for these, machines with different memory would choose different sizes of images (`with_size`).
    overrides = [*others, *_UNREAD, "partition=pooled", *([] if coordinator else ["public=null"]), *own]
    config, data = compose(overrides), {}
    if not normalisation and takes(config["task"], "classes"):
        normalisation = dict.fromkeys(NORMALISATION, "0.5")
    if normalisation:
        channels = config["image"]["channels"]
        data = {key.split(".")[1]: [float(value)] * channels for key, value in normalisation.items()}
        config = compose([*overrides, *(f"data.{key}={values}" for key, values in data.items())])
    unset = dict.fromkeys(("partition", "out", "start"))
    config |= {"data": data or None, **unset, "callbacks": {}, "fresh": False}
    for override in overrides[: len(overrides) - len(own)]:
        _check_text(override, config)
    if coordinator:
        check_conflicts(config, others)
    check_targets(config, Path("the federation's configuration"))
    if (config["federation"].get("privacy") or {}).get("seed") is not None:
        raise UserError(
            "federation.privacy.seed: whoever knows it can take the noise away; leave it out, and each machine draws a"
            " secret of its own"
        )
    return config


def with_size(overrides: Sequence[str]) -> list[str]:
    """Adds the size of photographs to a new federation's overrides, if they do not set it.

    The coordinator decides the size for all sites: by themselves, sites with different memory would choose different
    sizes.

    Raises:
        UserError: See `compose_overrides`.
    """
    config = compose_overrides(overrides, coordinator=True)
    if takes(config["task"], "classes"):  # labelled images have the size of their set
        return list(overrides)
    size = compose([*overrides, "data=folders", "data.root=unread", "tracking=off"])["image"]["size"]
    return list(overrides) if size == config["image"]["size"] else [*overrides, f"image.size={size}"]


def packaged(overrides: Sequence[str]) -> Config:
    """Composes the configuration of the choices among overrides alone: with the values of the packaged files."""
    groups = config_groups()
    made = [override for override in overrides if override.split("=")[0] in groups]
    return compose([*made, *_UNREAD])


def _check_text(override: str, config: Config) -> None:
    """Refuses an override that sets a setting to a text that the setting does not list, or to an infinite number."""
    key = override.split("=")[0]
    parent, _, name = key.rpartition(".")
    section, value = value_at(config, parent) if parent else config, value_at(config, key)
    if isinstance(value, float) and not math.isfinite(value):
        raise OverrideError(override, "it is no number")
    if not isinstance(value, str) or key in config_groups():
        return
    listed = tuple(one for one in typing.get_args(_LISTED.get(key)) if one)
    if isinstance(section, Mapping) and "_target_" in section:
        target = locate(section["_target_"])
        listed = options_of(target, name)
        if target is create_backbone:
            listed = {"name": _packaged_backbones(), "weights": _WEIGHTS}.get(name, ())
    if value not in listed:
        raise OverrideError(
            override, f"{key} takes no text" + (f" but {', '.join(listed)}" if listed else "")
        )


@functools.cache
def _packaged_backbones() -> tuple[str, ...]:
    """Returns the names of the networks that the choices of the group ``backbone`` use."""
    return tuple(sorted({compose([f"backbone={name}"])["backbone"]["name"] for name in choices("backbone")}))


def of_one_client(overrides: Sequence[str]) -> bool:
    """Tells whether the method that overrides choose is meant for one client that holds all images."""
    # The method is composed without presets, which may choose partitions too.
    method = [override for override in overrides if override.startswith("method=")]
    return locate(compose(method)["partition"]["_target_"]) is Pooled


def agreed_hash(config: Config) -> str:
    """Computes the hash of what all machines of a federation must have in common: settings, and the code of own parts.

    The library's code is compared by its version; a package of the user's own may have none.
    """
    shared = {
        "calibration": {**config["calibration"], "group": None},
        "image": {**config["image"], "page": None},
    }
    agreed = {**config, **shared, "data": None, "partition": None, "public": None}
    code = code_of(map(str, targets(agreed)))
    return identity({**agreed, "code": code} if code else agreed)
