"""Lets libraries that take seconds to import wait until something is asked of them.

Lightning, torchmetrics and torchvision import torch's compiler, SciPy's signal processing and Matplotlib for a few
names that no command here uses while it starts: a class that no object has yet, decorators that do nothing without a
compiler, types in annotations. These names are answered here. Any other name loads the library, and the answers then
are the library's own. Where a library has been imported before this package, nothing waits.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, ClassVar


def _forward(module: str, name: str) -> Callable[..., Any]:
    """Makes a function that calls the one of that name in a module, which it imports when it is called."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        return getattr(_load(module), name)(*arguments, **keywords)

    return call


class _Compiled(type):
    """Nothing is compiled before the compiler is there."""

    def __instancecheck__(cls, thing: object) -> bool:
        return not _waits("torch._dynamo") and isinstance(thing, _load("torch._dynamo").OptimizedModule)


class _OptimizedModule(metaclass=_Compiled):
    """The class of compiled modules, for `isinstance`."""


def _disable(function: Callable[..., Any] | None = None, recursive: bool = True, **keywords: Any) -> Any:
    """Keeps the compiler away from a function: does nothing before there is one."""
    if function is None:
        return functools.partial(_disable, recursive=recursive, **keywords)
    kept_away: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if _waits("torch._dynamo"):
            return function(*given, **named)
        if not kept_away:
            kept_away.append(_load("torch._dynamo").disable(function, recursive, **keywords))
        return kept_away[0](*given, **named)

    return call


def _graph_break(*arguments: Any, **keywords: Any) -> None:
    """Ends a compiled graph: none is compiled before there is a compiler."""
    if not _waits("torch._dynamo"):
        _load("torch._dynamo").graph_break(*arguments, **keywords)


_PLOT = "torchmetrics.utilities.plot"
_ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "torch._dynamo": {
        "OptimizedModule": _OptimizedModule,
        "disable": _disable,
        "graph_break": _graph_break,
    },
    "torch._dynamo.utils": {"is_compile_supported": _forward("torch._dynamo.utils", "is_compile_supported")},
    "scipy.signal": {"hamming": _forward("scipy.signal.windows", "hamming")},  # torchmetrics puts it there
    _PLOT: {  # types of annotations as torchmetrics has them without Matplotlib
        "_AX_TYPE": object,
        "_CMAP_TYPE": object,
        "_PLOT_OUT_TYPE": tuple[object, object],
        **{
            name: _forward(_PLOT, name)
            for name in ("plot_single_or_multi_val", "plot_curve", "plot_confusion_matrix")
        },
    },
}
_lock = threading.RLock()


class _Later(ModuleType):
    """A module that has not been executed, with the answers that need no execution."""

    def __getattr__(self, name: str) -> Any:
        answers = _ANSWERS[self.__name__]
        if name in answers:
            return answers[name]
        if name.startswith("__") and name != "__all__":  # what looks over all modules asks for these
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'")
        return getattr(_load(self.__name__), name)


def _waits(name: str) -> bool:
    return isinstance(sys.modules.get(name), _Later)


def _load(name: str) -> ModuleType:
    """Imports a module; neither what it lies in nor what lies in it waits any more."""
    related = [
        other for other in _ANSWERS if f"{name}.".startswith(f"{other}.") or other.startswith(f"{name}.")
    ]
    with _lock:  # not held while a module is executed
        for other in related:
            _Finder.waits.discard(other)
            if _waits(other):
                del sys.modules[other]
    for other in related:
        module = import_module(other)
        for answered, answer in _ANSWERS[other].items():
            if not hasattr(module, answered):
                setattr(module, answered, answer)
    return import_module(name)


class _Unexecuted(Loader):
    """Puts a module in place that has not been executed."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Leaves it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Later


class _Loaded(Loader):
    """Returns a module that was imported with the package that it lies in, so that it is not executed again."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__
        module.__spec__ = None  # the import system would go by it, whatever a finder returns

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder:
    """Finds the modules above, so that they wait."""

    waits: ClassVar = {*_ANSWERS}

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module that waits; before a module within one is found, that one is executed."""
        if name in cls.waits:
            found = PathFinder.find_spec(name, path, target)
            if found is not None:
                found.loader = _Unexecuted()
            return found
        package = name.rpartition(".")[0]
        if not _waits(package):
            return None
        _load(package)
        return ModuleSpec(name, _Loaded(sys.modules[name])) if name in sys.modules else None


sys.meta_path.insert(0, _Finder)
