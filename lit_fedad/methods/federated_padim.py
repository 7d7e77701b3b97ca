"""Federated PaDiM: clients send the moments of features at each position once; sums give the central Gaussians.

Moments add up over clients and stages: the result is that of one client with all data, whatever the partition. Nothing
is trained, and rounds send nothing but the moments of data that have come since.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Evidence, Exchanges, Message, MessageSpec, TensorSpec
from lit_fedad.contracts.disclosure import Disclosures, summed
from lit_fedad.core.bounds import at_least
from lit_fedad.memory.moments import MomentSets
from lit_fedad.methods.parts.evidence import moments_sent
from lit_fedad.methods.parts.noised_padim import noised_padim
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
        noised_directions: Number of directions of features that are looked at under differential privacy.
        noised_cells: Cells along a side of the image whose means are told apart then; covariances are not.

    Raises:
        UserError: If a number is out of range.
    """

    needs = PaDiM
    task: PaDiM

    def __init__(self, task: PaDiM, noised_directions: int = 16, noised_cells: int = 4) -> None:
        super().__init__(task)
        self.choose_directions(noised_directions)
        self.vectors_per_image = 1  # at each position
        at_least("method.client", 1, noised_cells=noised_cells)
        self.cells = min(noised_cells, *task.grid)

    @property
    def moments_disclosed(self) -> Disclosures:
        """What moments by position tell."""
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
    """The server, which adds moments up and fits the Gaussians.

    Args:
        client: A client, for sizes.

    Attributes:
        gaussians: The message to clients.
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
        """Sets what clients are sent: means [P, d] and packed whiteners [P, d (d + 1) / 2]."""
        self.gaussians = {"centres": centres, "whiteners": whiteners}

    def broadcast(self, client_id: int) -> Message:
        """Returns the Gaussians, the same to every client."""
        return self.gaussians


class PositionSums(ModelSums):
    """The exchange after the rounds in which clients receive the moments of all images."""

    def scores(
        self,
        client: MomentsClient,
        loaders: Sequence[DataLoader],
        score: Callable[[MomentsClient, DataLoader], Tensor],
    ) -> Iterator[Tensor | None]:
        """Computes the scores [n] of a client's images by the Gaussians of all images but these, loader by loader."""
        if not int(client.sums["measured"]):
            return iter([score(client, loader) for loader in loaders])
        return cast("PaDiM", client.task).scores_without(loaders, client.sums_by_set())


def exchanges(client: FederatedPaDiMClient) -> Exchanges:
    """Moments before round 1; in rounds those of new data."""
    rounds = (NewMoments(),)
    noised = Exchanges(noised_padim(client.cells), rounds)
    return Exchanges((PooledMoments(),), rounds, PositionSums(), noised, Evidence(moments_sent))
