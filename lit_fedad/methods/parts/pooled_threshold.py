"""The set-up exchange that pools a median distance to a shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchange, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import counted
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import pool_quantile
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.memory_bank import QUANTILES


class PooledThreshold(Exchange[Any, Any]):
    """The exchange in which clients send quantiles of distances to the first memory; th is their median.

    Args:
        neighbours: Number of distances of each patch.
    """

    name = "threshold"
    joining = "skip"
    discloses = (counted("quantiles of the distances between patches and the bank"),)

    def __init__(self, neighbours: int) -> None:
        self.neighbours = neighbours

    def broadcast_spec(self, client: Any) -> MessageSpec:
        """Declares statistics and memory."""
        return {**client.features_spec(), **client.memory_spec("radii")}

    def send(self, client: Any, loader: DataLoader) -> Message:
        """Returns the number of the client's distances, and their quantiles."""
        quantiles, count = client.task.neighbour_quantiles(loader)
        return {"count": torch.tensor(count), "quantiles": quantiles}

    def upload_spec(self, client: Any) -> MessageSpec:
        """Declares the form of `send`."""
        return {"count": TensorSpec((), torch.int64, low=1), "quantiles": TensorSpec((QUANTILES,), low=0)}

    def validate(self, server: Any, client_id: int, update: Update) -> None:
        """Checks the number of distances, and that the quantiles ascend."""
        count, most = int(update.message["count"]), update.num_samples * server.counts_per_image
        check_count(count, most * self.neighbours)
        if (update.message["quantiles"].diff() < 0).any():
            raise UserError("the client's quantiles do not ascend")

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Computes the pooled median."""
        messages = [update.message for update in updates.values()]
        median = pool_quantile([m["quantiles"] for m in messages], [float(m["count"]) for m in messages], 0.5)
        server.known["threshold"] = torch.tensor(median)
