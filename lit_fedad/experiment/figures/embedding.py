"""Embedded images and their distances to densities, for figures and audits of semantic anomalies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lit_fedad.contracts import Client, Context, Exchanges, Task
from lit_fedad.contracts.compute import map_batches
from lit_fedad.experiment.build import Data
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


def loader_of(dataset: Dataset, indices: Tensor, data: Data) -> DataLoader:
    """Returns batches of some images, in their order."""
    return DataLoader(
        Subset(dataset, indices.tolist()),
        data.module.eval_batch_size,
        collate_fn=lambda batch: batch,
        generator=torch.Generator(),
    )


def density_scores(mean: Tensor, covariance: Tensor, z: Tensor) -> Tensor:
    """Computes distances to the nearest density [n]; none where there is no density."""
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
    """Returns the generator of a figure's draws."""
    return Context(federation.seed, federation.rounds).generator(purpose)
