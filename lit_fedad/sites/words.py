"""The words that configure a federation: choices and scalar values, which a site can take from others.

A configuration can name any function (``_target_``), any file and any folder. What comes over the wire may not: it
chooses among the packaged files of a group, and sets numbers, truth values and names. Where images lie, where files are
written and on what device is computed, each site says itself.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from lit_fedad.core.building import locate, takes
from lit_fedad.core.config import Config, choices, compose, config_groups, identity
from lit_fedad.core.errors import UserError
from lit_fedad.data.strategies import Pooled
from lit_fedad.experiment.trusted_targets import check_targets

OWN = (
    "data",
    "partition",
    "public",
    "cache",
    "fabric",
    "simulation",
    "tracking",
    "callbacks",
    "out",
    "fresh",
    "start",
    "hydra",
)
"""Keys that every machine sets for itself."""

NORMALISATION = ("data.mean", "data.std")
"""Keys by which a federation says how labelled images are normalised: models depend on it, wherever images lie."""

_MOST = 200
_WORD = re.compile(r"([a-z][a-z0-9_]*(?:[./][a-z0-9][a-z0-9_]*)*)=(-?[A-Za-z0-9][A-Za-z0-9_.+-]{0,99})")


def check_words(words: Sequence[str]) -> None:
    """Checks that words only choose and set scalar values.

    Raises:
        UserError: If one does more, naming it.
    """
    if len(words) > _MOST:
        raise UserError(f"the federation's configuration has {len(words)} words; at most {_MOST} are taken")
    groups = config_groups()
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None:
            raise UserError(
                f"'{word[:100]}' is not taken from a federation: only group=choice and key=scalar are, no _target_,"
                " +, ~, ${}, list or path"
            )
        key, value = found.groups()
        if key in NORMALISATION:
            _number(word, value)
            continue
        if re.split("[./]", key)[0] in OWN:
            raise UserError(f"'{word}' is not taken from a federation: each site sets {key} for itself")
        if key in groups and value not in (*choices(key), "null"):
            raise UserError(f"'{word}' is not taken from a federation: {key} has no choice {value} here")
        if "/" in key and key not in groups:
            raise UserError(f"'{word}' is not taken from a federation: there is no group {key} here")


def compose_words(words: Sequence[str], own: Sequence[str] = (), coordinator: bool = False) -> Config:
    """Composes a federation's configuration, and this machine's own part of it.

    Args:
        words: Those of the federation; not trusted.
        own: Of ``fabric`` and ``cache``, as this machine's operator gave them.
        coordinator: Whether this machine's server may have public images; a site has none.

    Returns:
        The configuration. Its ``data`` says how labelled images are normalised (``mean``, ``std`` of each channel), or
        is None: each site puts its own in its place.

    Raises:
        UserError: If a word is refused, or the configuration is none.
    """
    check_words(words)
    given = dict(word.split("=") for word in words if word.split("=")[0] in NORMALISATION)
    if given and len(given) < len(NORMALISATION):
        raise UserError(f"{next(iter(given))}: give {' and '.join(NORMALISATION)}, or neither")
    words = [word for word in words if word.split("=")[0] not in NORMALISATION]
    # Presets may choose a set that needs a folder; the last choice wins, and is not read.
    public = [] if coordinator else ["public=null"]
    words = [*words, "data=textures", "partition=pooled", *public, "tracking=off", *own]
    config, data = compose(words), {}
    if not given and takes(config["task"], "classes"):
        given = dict.fromkeys(NORMALISATION, "0.5")
    if given:
        channels = config["image"]["channels"]
        data = {key.split(".")[1]: [float(value)] * channels for key, value in given.items()}
        config = compose([*words, *(f"+data.{key}={values}" for key, values in data.items())])
    config |= {
        "data": data or None,
        "partition": None,
        "out": None,
        "start": None,
        "callbacks": {},
        "fresh": False,
    }
    check_targets(config, Path("the federation's configuration"))
    if (config["federation"].get("privacy") or {}).get("seed") is not None:
        raise UserError(
            "federation.privacy.seed: whoever knows it can take the noise away; leave it out, and each machine draws a"
            " secret of its own"
        )
    return config


def of_one_client(words: Sequence[str]) -> bool:
    """Tells whether the method that words choose is meant for one client that holds all images."""
    method = [
        word for word in words if word.startswith("method=")
    ]  # presets beside it may have partitions too
    return locate(compose(method)["partition"]["_target_"]) is Pooled


def _number(word: str, value: str) -> None:
    try:
        if not math.isfinite(float(value)):
            raise ValueError("not finite")
    except ValueError as error:
        raise UserError(f"'{word}' is not taken from a federation: it is no number") from error


def agreed(config: Config) -> str:
    """Computes the hash of what all machines of a federation must have in common."""
    return identity({**config, "data": None, "partition": None, "public": None})
