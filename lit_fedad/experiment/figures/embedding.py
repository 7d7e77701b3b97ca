"""Embeds images, lays them out in the plane and scores them by densities, for figures and audits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context, Exchanges, Task
from lit_fedad.contracts.compute import map_batches
from lit_fedad.federation.loop import Federation
from lit_fedad.memory.density import DensitySet
from lit_fedad.methods.parts.functional import pooled
from lit_fedad.tasks.contrastive import Contrastive


@torch.no_grad()
def embed_images(task: Task, loader: DataLoader) -> Tensor:
    """Computes representations of all images [n, D]: z of contrastive tasks, or features averaged over positions."""
    if isinstance(task, Contrastive):
        return task.embed(loader)[0].cpu()
    return torch.cat(list(map_batches(task, loader, lambda batch: pooled(task(batch)).cpu())))


def tsne_layout(features: ArrayLike) -> np.ndarray:
    """Lays features out in the plane with t-SNE.

    On one machine the same features always get the same positions. On CPUs of different kinds they may not: t-SNE
    amplifies differences in rounding until groups are placed elsewhere. Only neighbourhoods have a meaning.

    Args:
        features: Features [n, D] with n >= 4; up to about 2,000 take well under a minute.

    Returns:
        Positions [n, 2].
    """
    from sklearn.manifold import TSNE  # takes long to import; few runs draw a layout

    points = np.asarray(features, dtype=np.float32)
    perplexity = min(30.0, len(points) / 4)
    # Two principal components are needed: equal features have none, and one-dimensional features have only one.
    init = "pca" if points.shape[1] > 1 and np.ptp(points, axis=0).any() else "random"
    return np.asarray(TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(points))


def density_scores(mean: Tensor, covariance: Tensor, z: Tensor) -> Tensor:
    """Computes the distances [n] of embeddings z [n, D] to the nearest density; empty if there is no density."""
    if not len(mean):
        return z.new_empty(0)
    densities = DensitySet(z.shape[1])
    densities.set(mean, covariance)
    return densities(z)


def last_exchange(client: Client, exchanges: Exchanges) -> Context:
    """Returns the context in which the client last estimated densities, so that clusters are drawn identically."""
    round = client.context.round - 1
    return replace(client.context, round=round, exchange=len(exchanges.rounds) - 1 if round > 0 else 0)


def generator_of(federation: Federation, purpose: str) -> torch.Generator:
    """Returns the random generator for a figure with this purpose, after the last round."""
    return Context(federation.seed, federation.rounds).generator(purpose)
