"""Lazy imports: public names of a package that are imported on first access."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Builds the functions ``__getattr__`` and ``__dir__`` of a package.

    Type checkers read the names from the package's ``__init__.pyi``.

    Args:
        package: Name of the package.
        names: For each public name, the path within the package that it stands for: ``module.attribute``.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, _, attribute = names[name].rpartition(".")
        return getattr(import_module(f"{package}.{module}"), attribute)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, listed
