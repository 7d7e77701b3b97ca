"""The exchanges that find Gaussians by position under differential privacy: four noised sums over images.

A covariance at each position has millions of entries, and noise would hide them. Here cells of the image have means of
their own, in a few directions of public pictures, and all positions one covariance around these. Mean and scale are
found as in `noised_subspace`, before the cells' means and the covariance.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts import Exchange, Message, MessageSpec, TensorSpec
from lit_fedad.memory.moments import upper_triangle
from lit_fedad.methods.parts.noised_subspace import (
    CONSTANT,
    ImageMeans,
    ImageProducts,
    Projected,
    ProjectedSums,
    held_frame,
    weight_of,
    whitener,
)
from lit_fedad.methods.parts.pooled_moments import MomentsClient, MomentsServer

_LEAST = 1e-2
"""Variance that is added to each direction's, as a share of the mean variance."""


def cell_of(grid: tuple[int, int], cells: int) -> Tensor:
    """Returns the cell of each position [H0 * W0], row by row, in ``cells`` times ``cells`` of them.

    Example:
        >>> cell_of((2, 4), 2).tolist()
        [0, 0, 1, 1, 2, 2, 3, 3]
    """
    rows, columns = (torch.arange(side) * cells // side for side in grid)
    return (rows[:, None] * cells + columns).flatten()


class ImageCells(ProjectedSums):
    """The sums ``weight`` [1] and ``cells`` [cells * cells, k]: 1/2 and the mean of each cell, at length 1.

    Args:
        client: See `ProjectedSums`; its ``cells`` are those along a side.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        shares = F.one_hot(cell_of(self.task.grid, client.cells), client.cells**2).float()
        self.shares = shares / shares.sum(0)  # [H0 * W0, cells * cells]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {"weight": (1,), "cells": (self.shares.shape[1], self.directions)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        means = self.shares.T.to(projected) @ projected
        # Of cells together as long as the image's mean is.
        scaled = means / len(means[0]) ** 0.5
        return {"weight": projected.new_full((len(projected), 1), CONSTANT), "cells": scaled}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``cells``; means that noise may have made are shrunk towards that of all (James and Stein).

        Raises:
            HiddenByNoiseError: If the weight of all images lies within three deviations of the noise.
        """
        weight = weight_of(sums, noise)
        squares = sums["cells"].square().sum(1, keepdim=True).clamp(min=1e-300)
        shares = (1 - noise**2 * self.directions / squares).clamp(min=0)
        return {"cells": shares * sums["cells"] * len(sums["cells"]) ** 0.5 * CONSTANT / weight}

    @staticmethod
    def merge(server: MomentsServer, found: Message) -> None:
        """Keeps the means of cells [cells * cells, k], in the frame."""
        server.moments = {**held_frame(server), "cells": found["cells"]}


class ImageSpread(ImageProducts):
    """The sum of products of features around the means of their cells."""

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        cells = self.frame["cells"].to(projected)
        at = cell_of(self.task.grid, round(len(cells) ** 0.5)).to(projected.device)
        return super()._parts(projected - cells[at])

    @staticmethod
    def merge(server: Any, found: Message) -> None:
        """Fits the Gaussians; distances are true up to a factor, as images count alike whatever their contrast."""
        moments = server.moments
        frame = moments["frame"] @ whitener(found, _LEAST)  # [d, k]
        # The upper triangular U of `frame frame^T = U^T U`, with rows of zeros.
        upper = torch.linalg.qr(frame.T, mode="r").R
        whole = upper.new_zeros(len(frame), len(frame))
        whole[: len(upper)] = upper
        back = torch.linalg.pinv(moments["frame"])  # [k, d]
        at = cell_of(server.task.grid, server.cells)
        centres = moments["centre"] + moments["cells"][at] @ back
        server.tell(centres.float(), upper_triangle(whole.float()).repeat(len(at), 1))


class NoisedSpread(Projected):
    """The exchange that finds the covariance around the means of cells, and with it the Gaussians.

    Args:
        name: Name in reports.
        cells: Cells along a side.
    """

    def __init__(self, name: str, cells: int) -> None:
        super().__init__(name, ImageSpread)
        self.cells = cells

    def broadcast(self, server: MomentsServer, client_id: int) -> Message:
        """Returns centre and frame, and the means of cells."""
        return {**super().broadcast(server, client_id), "cells": server.moments["cells"].float()}

    def broadcast_spec(self, client: MomentsClient) -> MessageSpec:
        """Declares centre and frame, and the means of cells."""
        return {**super().broadcast_spec(client), "cells": TensorSpec((self.cells**2, client.directions))}


def noised_padim(cells: int) -> tuple[Exchange, ...]:
    """Builds the exchanges, before round 1."""
    return (
        Projected("mean", ImageMeans),
        Projected("spread", ImageProducts),
        Projected("cells", ImageCells),
        NoisedSpread("covariance", cells),
    )
