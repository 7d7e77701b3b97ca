"""Federated anomaly detection in PyTorch Lightning."""

import os

# Before torch is loaded: its threads wait for each other spinning, for milliseconds unless told otherwise. Where other
# work holds a core, the one that all wait for does not run, and a round takes twenty times as long.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# Before they are loaded: onnxruntime tells its makers of every detector, and Ray of every cluster, unless told not to.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from lit_fedad import _compat as _compat  # must run before anything imports torchvision
from lit_fedad.core.lazy_names import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _NAMES)
