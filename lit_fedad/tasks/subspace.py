"""Anomaly detection by the distance of patch features to the linear subspace of normal ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import map_batches
from lit_fedad.core.bounds import at_least
from lit_fedad.memory.kmeans import KMeansResult, kmeans
from lit_fedad.memory.knn import nearest
from lit_fedad.memory.merge import root_mean_squares
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.reduce import SampleReduce
from lit_fedad.memory.subspace import Share, check_share, fit_subspaces, folds_of, least_residuals
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import CHANNEL_STATISTICS, SubspaceTask
from lit_fedad.tasks.slot_distances import LocalScale

PATCHES_PER_CLUSTER = 256
"""Number of local patches in the clustered sample, for each cluster."""


class Subspace(SubspaceTask):
    """The task whose patch score is the residual of a principal component analysis of normal patches.

    Image scores may be taken relative to the usual residual near the same cluster of normal patches, since some
    products vary more than others.

    A method may set the subspace and the clusters; otherwise the task fits them to local data. There is nothing to
    train.

    Args:
        backbone: Frozen feature extractor.
        share: Share of the variance of normal features that the subspace keeps, or ``"likelihood"`` (`fit_basis`).
        clusters: Number of clusters of normal patches; 0 for none.
        image_score: Patch score relative to the usual residual of the nearest cluster, for image scores.
        products: Names of the products that each have a subspace; all other images share one more. None for a single
            subspace. An image is scored by the subspace with the smallest residuals.
        **patches: See `PatchTask`.

    Raises:
        UserError: If a number is out of range.
    """

    prepares = True
    trains = False
    methods = "federated_subspace, local or centralised"
    local_buffers = (*CHANNEL_STATISTICS, "centre", "basis", "memory", "radii")

    def __init__(
        self,
        backbone: FeaturePyramid,
        share: Share = 0.99,
        clusters: int = 0,
        image_score: LocalScale | None = None,
        products: Sequence[str] | None = None,
        **patches: Any,
    ) -> None:
        super().__init__(backbone, **patches)
        check_share(share=share)
        at_least("task", 0, clusters=clusters)
        self.share, self.clusters, self.image_score = share, clusters, image_score
        self.products = tuple(products or ())
        self.register_buffer("centre", torch.zeros(1, self.num_features))
        self.register_buffer("basis", torch.empty(1, self.num_features, 0))
        self.register_buffer("memory", torch.zeros(clusters, self.num_features))
        self.register_buffer("radii", torch.ones(clusters))

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes frozen features [B, H0 * W0, C]."""
        return self.embed(batch)

    @property
    def moment_sets(self) -> int:
        """Number of sets of moments: the folds of each product's subspace."""
        return self.kinds * folds_of(self.share)

    def moments(self, loader: DataLoader) -> list[Moments]:
        """Computes the moments of frozen features by product and fold."""
        return self.second_moments(loader, folds_of(self.share), kinds=self.kinds)

    def fit_subspace(self, moments: Sequence[Moments]) -> tuple[Tensor, Tensor]:
        """Computes the arguments of `load_subspace` from the moments of all clients; see `fit_subspaces`."""
        return fit_subspaces(moments, self.share, self.shrinkage if self.standardise else None)

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fits subspace and clusters to local data, the first time."""
        if not first:
            return
        self.load_subspace(*self.fit_subspace(self.moments(loader)))
        if self.clusters:
            self.load_memory(self.cluster(loader, context).centroids)
            self.radii = root_mean_squares(*self.residuals_by_cluster(loader)).to(self.radii)

    @torch.no_grad()
    def cluster(self, loader: DataLoader, context: Context) -> KMeansResult:
        """Clusters a sample of local patches by k-means."""
        reservoir = SampleReduce()
        reservoir.start(None, 0, PATCHES_PER_CLUSTER * self.clusters, context.generator("clusters"))
        for features in map_batches(self, loader, self):
            reservoir.update(features.float())
        return kmeans(reservoir.finish().memory, self.clusters, generator=context.generator("k-means"))

    @torch.no_grad()
    def residuals_by_cluster(self, loader: DataLoader) -> tuple[Tensor, Tensor]:
        """Computes, by cluster, the sum of squared residuals of local patches and their number, both [K] float64."""
        squares = torch.zeros(self.clusters, dtype=torch.float64)
        counts = torch.zeros_like(squares)
        for features in map_batches(self, loader, self):
            patches = features.flatten(0, 1).float()
            cluster = nearest(patches, self.memory, 1)[1][:, 0].cpu()
            residuals = least_residuals(features, self.centre, self.basis)[0].flatten().double().cpu()
            squares += torch.bincount(cluster, residuals.square(), minlength=self.clusters)
            counts += torch.bincount(cluster, minlength=self.clusters)
        return squares, counts

    def nearest_kind(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Computes the product whose subspace has the smallest residuals of each image [B]; None for one subspace."""
        return least_residuals(self(batch), self.centre, self.basis)[1] if self.kinds > 1 else None

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by the residuals of their patches."""
        scores = image_values = least_residuals(features, self.centre, self.basis)[0].flatten()
        if self.clusters and self.image_score is not None:
            patches = features.flatten(0, 1).float()
            image_values = self.image_score(scores[:, None], self.radii, nearest(patches, self.memory, 1)[1])
        return Prediction(image_score=self.judge(image_values), anomaly_map=self.draw(scores))
