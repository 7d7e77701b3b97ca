"""The words that configure a federation: choices and scalar values, which a site can take from others.

A configuration can name any function (``_target_``), any file and any folder. What comes over the wire may not: it
chooses among the packaged files of a group, and sets numbers, truth values and names. Where images lie, where files are
written and on what device is computed, each site says itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lit_fedad.config import Config, choices, compose, config_groups, identity
from lit_fedad.errors import UserError
from lit_fedad.experiment.trusted_targets import check_targets

OWN = (
    "data",
    "partition",
    "public",
    "cache",
    "fabric",
    "tracking",
    "callbacks",
    "out",
    "fresh",
    "start",
    "hydra",
)
"""Keys that every machine sets for itself."""

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
        if re.split("[./]", key)[0] in OWN:
            raise UserError(f"'{word}' is not taken from a federation: each site sets {key} for itself")
        if key in groups and value not in (*choices(key), "null"):
            raise UserError(f"'{word}' is not taken from a federation: {key} has no choice {value} here")
        if "/" in key and key not in groups:
            raise UserError(f"'{word}' is not taken from a federation: there is no group {key} here")


def compose_words(words: Sequence[str], own: Sequence[str] = ()) -> Config:
    """Composes a federation's configuration, and this machine's own part of it.

    Args:
        words: Those of the federation; not trusted.
        own: Of ``fabric`` and ``cache``, as this machine's operator gave them.

    Returns:
        The configuration, without data: each site puts its own in their place.

    Raises:
        UserError: If a word is refused, or the configuration is none.
    """
    check_words(words)
    # Presets may choose a set that needs a folder; the last choice wins, and is not read.
    config = compose([*words, "data=textures", "partition=pooled", "public=null", "tracking=off", *own])
    config |= {"data": None, "partition": None, "out": None, "start": None, "callbacks": {}, "fresh": False}
    check_targets(config, Path("the federation's configuration"))
    return config


def agreed(config: Config) -> str:
    """Computes the hash of what all machines of a federation must have in common."""
    return identity({**config, "data": None, "partition": None})
