"""Federated PaDiM: clients send the moments of features at each position once; sums give the central Gaussians.

Moments add up over clients and stages: the result is that of one client with all data, whatever the partition. Nothing
is trained, and in rounds clients send only the moments of images that have come since.

Under differential privacy four noised sums over images replace the moments. A covariance at each position has millions
of entries, and noise would hide them. Instead features are projected on a few directions of public pictures, each cell
of the image has a mean of its own, and all positions share one covariance around these means. The first two sums give
mean and scale as in `noised_subspace`, the others the cells' means and the covariance.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Evidence, Exchanges, Message, MessageSpec, TensorSpec
from lit_fedad.contracts.disclosure import Disclosures, summed
from lit_fedad.core.bounds import at_least
from lit_fedad.memory.moments import MomentSets, upper_triangle
from lit_fedad.methods.parts.bank_evidence import moments_sent
from lit_fedad.methods.parts.noised_subspace import (
    CONSTANT,
    NOISED_FRAME,
    ImageProducts,
    Projected,
    ProjectedSums,
    current_frame,
    weight_of,
    whitener,
)
from lit_fedad.methods.parts.pooled_moments import (
    ModelSums,
    MomentsClient,
    MomentsServer,
    NewMoments,
    PooledMoments,
)
from lit_fedad.tasks.padim import PaDiM


class FederatedPaDiMClient(MomentsClient):
    """A client that sends the moments of its features by position, and scores by the Gaussians of all clients.

    Args:
        task: Features and Gaussians.
        noised_directions: Number of directions that features are projected on under differential privacy.
        noised_cells: Number of cells along a side of the image under differential privacy; each cell has its own mean.

    Raises:
        UserError: If a number is out of range.
    """

    needs = PaDiM
    task: PaDiM

    def __init__(self, task: PaDiM, noised_directions: int = 16, noised_cells: int = 4) -> None:
        super().__init__(task)
        self.choose_directions(noised_directions)
        self.vectors_per_image = 1  # a set of moments is of one position
        at_least("method.client", 1, noised_cells=noised_cells)
        self.cells = min(noised_cells, *task.grid)

    @property
    def moments_disclosed(self) -> Disclosures:
        """What moments by position disclose."""
        return (summed("mean and covariance of the features at each position of the image"),)

    def receive(self, message: Message) -> None:
        """Loads the Gaussians."""
        self.task.load_gaussians(message["centres"], message["whiteners"])

    def moment_sets(self, loader: DataLoader) -> MomentSets:
        """Computes the moments of local features by position."""
        return self.task.position_moments(loader)

    def broadcast_spec(self) -> MessageSpec:
        """Declares a mean and the upper triangle of a whitener for each position."""
        channels = self.task.num_features
        return {
            "centres": TensorSpec((self.sets, channels)),
            "whiteners": TensorSpec((self.sets, channels * (channels + 1) // 2)),
        }


class FederatedPaDiMServer(MomentsServer):
    """The server, which adds up moments and fits the Gaussians.

    Args:
        client: A client, for sizes.

    Attributes:
        gaussians: The message to clients: ``centres`` and packed ``whiteners`` by position.
    """

    state_names = ("gaussians",)
    task: PaDiM

    def __init__(self, client: FederatedPaDiMClient) -> None:
        super().__init__(client)
        self.cells = client.cells
        self.gaussians: Message = {}

    def learn(self) -> None:
        """Fits the Gaussians to all features that clients have measured so far."""
        self.tell(*self.task.fit_gaussians(self.moment_sets()))

    def tell(self, centres: Tensor, whiteners: Tensor) -> None:
        """Sets the message to clients: means [P, d] and packed whiteners [P, d (d + 1) / 2]."""
        self.gaussians = {"centres": centres, "whiteners": whiteners}

    def broadcast(self, client_id: int) -> Message:
        """Returns the Gaussians, the same to every client."""
        return self.gaussians


class PositionSums(ModelSums):
    """The exchange after the rounds in which clients receive the moments of all images, to leave their own out."""

    def scores(
        self,
        client: MomentsClient,
        loaders: Sequence[DataLoader],
        score: Callable[[MomentsClient, DataLoader], Tensor],
    ) -> Iterator[Tensor | None]:
        """Yields for each loader the scores [n] of its images by the Gaussians of all other images."""
        if not int(client.sums["measured"]):
            return iter([score(client, loader) for loader in loaders])
        return cast("PaDiM", client.task).scores_without(loaders, client.sums_by_set())


_RIDGE = 1e-2
"""Share of the mean variance that is added to the variance of each direction."""


def cell_of(grid: tuple[int, int], cells: int) -> Tensor:
    """Returns the number of the cell of each position [H0 * W0], row by row; ``cells`` times ``cells`` divide the map.

    Example:
        >>> cell_of((2, 4), 2).tolist()
        [0, 0, 1, 1, 2, 2, 3, 3]
    """
    rows, columns = (torch.arange(side) * cells // side for side in grid)
    return (rows[:, None] * cells + columns).flatten()


class ImageCells(ProjectedSums):
    """The sums ``weight`` [1] and ``cells`` [cells * cells, k] over images.

    An image adds the constant 1/2 and the mean of each of its cells, together scaled to length 1.

    Args:
        client: See `ProjectedSums`; its ``cells`` is the number of cells along a side.
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
        # Divided so that the means of all cells together are about as long as the mean of the image.
        scaled = means / len(means[0]) ** 0.5
        return {"weight": projected.new_full((len(projected), 1), CONSTANT), "cells": scaled}

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes ``cells``; noisy means of cells are shrunk towards the mean of all images (James and Stein).

        Raises:
            HiddenByNoiseError: If the weight of all images lies within three deviations of the noise.
        """
        weight = weight_of(sums, noise)
        squares = sums["cells"].square().sum(1, keepdim=True).clamp(min=1e-300)
        shares = (1 - noise**2 * self.directions / squares).clamp(min=0)
        return {"cells": shares * sums["cells"] * len(sums["cells"]) ** 0.5 * CONSTANT / weight}

    @staticmethod
    def merge(server: MomentsServer, results: Message) -> None:
        """Keeps the means of cells [cells * cells, k], in coordinates of the frame."""
        server.moments = {**current_frame(server), "cells": results["cells"]}


class ImageSpread(ImageProducts):
    """The sum of products of features around the means of their cells."""

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        cells = self.frame["cells"].to(projected)
        cell = cell_of(self.task.grid, round(len(cells) ** 0.5)).to(projected.device)
        return super()._parts(projected - cells[cell])

    @staticmethod
    def merge(server: Any, results: Message) -> None:
        """Fits the Gaussians; distances are right up to a factor, since products were scaled to length 1 by image."""
        moments = server.moments
        frame = moments["frame"] @ whitener(results, _RIDGE)  # [d, k]
        # The upper triangular U of `frame frame^T = U^T U`, with rows of zeros.
        upper = torch.linalg.qr(frame.T, mode="r").R
        square = upper.new_zeros(len(frame), len(frame))
        square[: len(upper)] = upper
        inverse = torch.linalg.pinv(moments["frame"])  # [k, d]
        cell = cell_of(server.task.grid, server.cells)
        centres = moments["centre"] + moments["cells"][cell] @ inverse
        server.tell(centres.float(), upper_triangle(square.float()).repeat(len(cell), 1))


class NoisedSpread(Projected):
    """The exchange that estimates the covariance around the means of cells, and with it the Gaussians.

    Args:
        cells: Number of cells along a side of the image.
    """

    def __init__(self, cells: int) -> None:
        super().__init__("covariance", ImageSpread)
        self.cells = cells

    def broadcast(self, server: MomentsServer, client_id: int) -> Message:
        """Returns centre and frame, and the means of cells."""
        return {**super().broadcast(server, client_id), "cells": server.moments["cells"].float()}

    def broadcast_spec(self, client: MomentsClient) -> MessageSpec:
        """Declares centre and frame, and the means of cells."""
        return {**super().broadcast_spec(client), "cells": TensorSpec((self.cells**2, client.directions))}


def exchanges(client: FederatedPaDiMClient) -> Exchanges:
    """Lists moments before round 1; in rounds those of new data."""
    rounds = (NewMoments(),)
    noised = (*NOISED_FRAME, Projected("cells", ImageCells), NoisedSpread(client.cells))
    return Exchanges(
        (PooledMoments(),), rounds, PositionSums(), Exchanges(noised, rounds), Evidence(moments_sent)
    )
