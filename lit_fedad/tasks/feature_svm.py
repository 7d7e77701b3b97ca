"""A one-class SVM of frozen features, fitted by scikit-learn (Schoelkopf et al., 2001)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Prediction
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import above, within
from lit_fedad.guards.extras import require
from lit_fedad.memory.knn import squared_distances
from lit_fedad.tasks.frozen_detector import FrozenDetector


class FeatureSVM(FrozenDetector):
    """A one-class SVM with Gaussian kernel ``exp(-gamma |x - y|^2)``; the score is how far an image lies outside.

    Only fitting needs scikit-learn. What it finds, support vectors and their coefficients, are buffers.

    Args:
        encoder: See `FrozenDetector`.
        nu: Share of training images that may lie outside.
        gamma: gamma; None for scikit-learn's ``scale``, one over channels times the variance of all features.

    Raises:
        UserError: If a number is out of range.
    """

    local_buffers = ("vectors", "coefficients", "offset", "sharpness")
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
        found = OneClassSVM(nu=self.nu, gamma=gamma).fit(rows.numpy())
        self.vectors = torch.from_numpy(found.support_vectors_).to(self.vectors)
        self.coefficients = torch.from_numpy(found.dual_coef_[0]).to(self.coefficients)
        self.offset = self.offset.new_tensor(float(found.intercept_[0]))
        self.sharpness = self.sharpness.new_tensor(gamma)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes minus the decision function of each image."""
        if not len(self.vectors):
            raise UserError("there are no support vectors to score by: the client has no images")
        squares = squared_distances(features.float(), self.vectors, self.vectors.square().sum(1))
        kernel = (-self.sharpness * squares).exp()
        return Prediction(image_score=-(kernel @ self.coefficients + self.offset))
