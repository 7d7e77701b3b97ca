"""Lets torchvision load beside a torch build whose C++ operators it was not compiled for.

The torchvision wheel on PyPI is a CUDA build. Beside a CPU-only torch its operator library does not load and
``import torchvision`` fails while it registers fake kernels for ``torchvision::nms``. Declaring the schemas of the
missing operators is enough: nothing in this library calls them. Where the operators load, this module does nothing.

It waits until torchvision is looked for: ``import lit_fedad`` imports no torch.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A torch.library.Library removes its operators when it is collected: it lives as long as the process.
_library: torch.library.Library | None = None


def _operators_load() -> bool:
    """Tells whether torchvision's own operator library can be loaded by this torch."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True  # no torchvision: its own import error says so better than we could
    import torch

    folder = Path(spec.submodule_search_locations[0])
    for library in sorted(folder.glob("_C*.so")) + sorted(folder.glob("_C*.pyd")):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
    return hasattr(torch.ops.torchvision, "nms")


def declare_missing_torchvision_operators() -> bool:
    """Declares the operator schemas that ``import torchvision`` needs, where they are missing.

    Returns:
        True if schemas had to be declared.
    """
    global _library
    if _library is not None or _operators_load():
        return False
    import torch

    _library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS.values():
        _library.define(schema)
    return True


class _BeforeTorchvision:
    """Finder of no module: it declares operators when torchvision is looked for the first time."""

    waits = True

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Declares the operators before another finder finds torchvision."""
        if name == "torchvision" and cls.waits:
            cls.waits = False  # looked for again while operators are declared
            declare_missing_torchvision_operators()


sys.meta_path.insert(0, _BeforeTorchvision)
