"""Detectors that are fitted to frozen features: nearest neighbours, and a one-class SVM (Schoelkopf et al., 2001)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction, Task
from lit_fedad.contracts.compute import full_precision, map_batches
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError, not_there
from lit_fedad.core.extras import require
from lit_fedad.memory.knn import nearest, squared_distances
from lit_fedad.models.encoders import FrozenEncoder


class FrozenDetector(Task):
    """A task that fits a detector to the frozen features of a client's images, once, and trains nothing.

    It fits its buffers, which are personal. With one client that holds all images (``METHOD=centralised``) they are the
    detector of pooled images.

    Args:
        encoder: A `FrozenEncoder` without a network.

    Raises:
        UserError: If the encoder is trained.
    """

    trains = False
    prepares = True

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        if not isinstance(encoder, FrozenEncoder) or encoder.network is not None:
            raise UserError(
                f"task {type(self).__name__} looks at frozen features, and trains nothing: give features=frozen"
                " features.hidden=0"
            )
        self.encoder, self.num_features = encoder, encoder.num_features

    def fit(self, features: Tensor) -> None:
        """Fits the buffers to local features [n, C], on the CPU."""
        raise not_there(self, "fit")

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes features [B, C], of length 1 where the encoder scales them."""
        features = self.encoder(batch["image"])
        return features / self.encoder.length if self.encoder.unit_length else features

    @torch.no_grad()
    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fits the detector to local images, the first time."""
        if first:
            self.fit(torch.cat([features.float().cpu() for features in map_batches(self, loader, self)]))


def neighbour_scores(features: Tensor, bank: Tensor, neighbours: int) -> Tensor:
    """Computes the sum of squared distances of features [B, C] to their nearest neighbours in a bank [n, C]."""
    distances, _ = nearest(features.float(), bank, min(neighbours, len(bank)))
    return distances.square().sum(1)


class FeatureNeighbours(FrozenDetector):
    """DN2: the score is the sum of squared distances to the nearest frozen features of the client's images.

    Features are not scaled to length 1. Before training, `Panda` is the same detector, with the cluster centres of all
    clients or the client's own features as bank.

    Args:
        encoder: See `FrozenDetector`.
        neighbours: Number of nearest features.

    Raises:
        UserError: If there are no neighbours.
    """

    local_buffers = free_buffers = ("bank",)
    scoring_buffers = local_buffers
    bank: Tensor

    def __init__(self, encoder: nn.Module, neighbours: int = 2) -> None:
        super().__init__(encoder)
        at_least("task", 1, neighbours=neighbours)
        self.neighbours, self.encoder.unit_length = neighbours, False
        self.register_buffer("bank", torch.empty(0, self.num_features))

    def fit(self, features: Tensor) -> None:
        """Fills the bank."""
        self.bank = features.to(self.bank)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes each image's sum of squared distances."""
        if not len(self.bank):
            raise UserError("there is no bank to score by: the client has no images")
        return Prediction(image_score=neighbour_scores(features, self.bank, self.neighbours))


class FeatureSVM(FrozenDetector):
    """A one-class SVM with Gaussian kernel ``exp(-gamma |x - y|^2)``; the score is minus its decision function.

    Only fitting needs scikit-learn. The fitted support vectors and their coefficients are buffers.

    Args:
        encoder: See `FrozenDetector`.
        nu: Share of training images that may lie outside.
        gamma: Factor gamma of the kernel; None for scikit-learn's ``scale``: one over the product of the number of
            channels and the variance of all features.

    Raises:
        UserError: If a number is out of range.
    """

    local_buffers = free_buffers = ("vectors", "coefficients", "offset", "sharpness")
    scoring_buffers = local_buffers
    vectors: Tensor
    coefficients: Tensor
    offset: Tensor
    sharpness: Tensor

    def __init__(self, encoder: nn.Module, nu: float = 0.1, gamma: float | None = None) -> None:
        super().__init__(encoder)
        above("task", 0, nu=nu, gamma=gamma)
        within("task", 0, 1, nu=nu)
        self.nu, self.gamma = nu, gamma
        self.register_buffer("vectors", torch.empty(0, self.num_features))
        self.register_buffer("coefficients", torch.empty(0))
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("sharpness", torch.zeros(()))

    def fit(self, features: Tensor) -> None:
        """Finds the support vectors.

        Raises:
            UserError: If scikit-learn is missing.
        """
        require("train", "task feature_svm, to fit,")
        from sklearn.svm import OneClassSVM

        rows = features.double()
        gamma = self.gamma or 1 / (rows.shape[1] * max(float(rows.var(correction=0)), 1e-12))
        svm = OneClassSVM(nu=self.nu, gamma=gamma).fit(rows.numpy())
        self.vectors = torch.from_numpy(svm.support_vectors_).to(self.vectors)
        self.coefficients = torch.from_numpy(svm.dual_coef_[0]).to(self.coefficients)
        self.offset = self.offset.new_tensor(float(svm.intercept_[0]))
        self.sharpness = self.sharpness.new_tensor(gamma)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes minus the decision function of each image."""
        if not len(self.vectors):
            raise UserError("there are no support vectors to score by: the client has no images")
        with full_precision(features):
            squares = squared_distances(features.float(), self.vectors, self.vectors.square().sum(1))
            kernel = (-self.sharpness * squares).exp()
            return Prediction(image_score=-(kernel @ self.coefficients + self.offset))
