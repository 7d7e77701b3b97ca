"""Federated anomaly detection in PyTorch Lightning."""

from importlib import import_module
from typing import Any

from lit_fedad import _compat as _compat  # must run before anything imports torchvision

__version__ = "0.3.0"

# Imported when they are asked for: torch and Lightning take seconds. Their types are in __init__.pyi.
_NAMES = {
    "Federation": "api.Federation",
    "LiveDetector": "deployment.live_detector.LiveDetector",
    "Scored": "deployment.live_detector.Scored",
    "TrainedRun": "api.TrainedRun",
    "load": "deployment.live_detector.load_detector",
    "train": "api.train",
}
__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'lit_fedad' has no attribute '{name}'")
    module, _, attribute = _NAMES[name].rpartition(".")
    return getattr(import_module(f"lit_fedad.{module}"), attribute)


def __dir__() -> list[str]:
    return [*_NAMES, "__version__"]
