"""Suggests keys in place of one that the configuration lacks."""

import difflib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from lit_fedad.core.building import locate, parameters_of
from lit_fedad.core.errors import UserError
from lit_fedad.core.nested import flatten


def instead(key: str, config: Mapping[str, Any], target: str | None, files: Sequence[str]) -> str:
    """Returns the end of an error message about an unknown key.

    Args:
        key: The key.
        config: The configuration without it, unresolved; empty where it cannot be composed.
        target: ``_target_`` of the key's section; None where it has none.
        files: Names of the files of a configuration group that the key's section may be.
    """
    section, _, name = key.rpartition(".")
    if key.partition(".")[0] == "callbacks":
        return f"; a new callback needs a plus sign: +{key}=..."
    if target and _takes(target, name):
        return f"; {target.rpartition('.')[2]} takes it: give +{key}=..."
    keys = {prefix for one in flatten(config) for prefix in accumulate(one.split("."), "{}.{}".format)}
    keys.discard(key)
    siblings = {other.rpartition(".")[2]: other for other in keys if other.rpartition(".")[0] == section}
    siblings.pop("_target_", None)
    if not siblings and files:
        return f"; choose {section.replace('.', '/')}= first: {', '.join(files)}"
    elsewhere = sorted(other for other in keys if other.endswith(f".{name}"))
    near = [siblings[close] for close in difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.6)]
    if meant := elsewhere[:3] or near:
        return f"; did you mean {' or '.join(map(repr, meant))}?"
    return f"; {section} has {', '.join(sorted(siblings))}" if section and siblings else ""


def _takes(target: str, name: str) -> bool:
    """Returns whether a class or function takes an argument of this name; False if it cannot be imported."""
    try:
        return name in parameters_of(locate(target))
    except UserError:
        return False
