"""Checks the ``_target_`` entries of a stored configuration: they may only name code that computes.

A run's folder may come from anybody, and the code that its configuration names is imported and called when the run is
opened.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_fedad.core.building import locate, targets
from lit_fedad.core.config_groups import conf_folder
from lit_fedad.core.errors import UserError
from lit_fedad.core.own_files import PACKAGES, own_packages

# Modules whose classes only store and compute. Their functions are not allowed: some of them write files.
_COMPUTING = (
    *("methods", "tasks", "models", "memory", "condensation"),
    *("federation.channel", "federation.sampling"),
    *("data.strategies", "data.stage_strategies", "data.partition"),
)
_OWN = tuple(f"lit_fedad.{module}." for module in _COMPUTING)
_LIBRARIES = (
    "torch.nn.",
    "torch.optim.",
    "torchvision.models.",
    "torchvision.ops.",
    "timm.models.",
    "timm.layers.",
)


def check_targets(config: Mapping[str, Any], path: Path) -> None:
    """Checks every ``_target_`` of a stored configuration before any of them is called.

    Allowed are targets that the packaged configuration names, classes of this package that only compute, modules and
    optimisers of torch, torchvision and timm, and anything in a package that ``LIT_FEDAD_PACKAGES`` names.

    Raises:
        UserError: If a target is not allowed.
    """
    for target in targets(config):
        if not isinstance(target, str) or not _allowed(target):
            raise UserError(
                f"{path}: names {target!r} as _target_, which a stored run must not call; if you trust that package,"
                f" set {PACKAGES}=PACKAGE"
            )


def _allowed(target: str) -> bool:
    """Returns whether a stored configuration may name this target."""
    if target in _packaged():
        return True
    if any(target.startswith(f"{name}.") for name in own_packages()):
        return True
    if not target.startswith((*_OWN, *_LIBRARIES)):
        return False
    located = locate(target)
    # The class must also be defined in such a module: a module has the names that it imports as well.
    if not inspect.isclass(located) or not f"{located.__module__}.".startswith((*_OWN, *_LIBRARIES)):
        return False
    return target.startswith(_OWN) or issubclass(located, (nn.Module, Optimizer, LRScheduler))


@functools.cache
def _packaged() -> frozenset[str]:
    """Returns the targets that the packaged configuration names."""
    files = conf_folder().rglob("*.yaml")
    return frozenset(
        target for file in files for target in re.findall(r"_target_: *([\w.]+)", file.read_text())
    )
