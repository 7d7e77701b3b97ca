"""Federated anomaly detection in PyTorch Lightning."""

from lit_fedad import _compat as _compat  # must run before anything imports torchvision

__version__ = "0.3.0"
