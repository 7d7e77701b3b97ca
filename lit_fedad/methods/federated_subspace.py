"""Federated subspace: clients send second moments of features once; what lies outside their subspace is anomalous.

The score is the residual of SubspaceAD (arXiv 2602.23013), but not squared as it is there. The subspace is that of the
features of all clients, with each channel divided by its scale. Moments add up over clients and stages: the result is
that of one client with all data, whatever the partition. Nothing is trained, and in rounds clients send only the
moments of images that have come since.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Evidence, Exchange, Exchanges, Message, MessageSpec, Sums, TensorSpec, Update
from lit_fedad.contracts.disclosure import Disclosure, Kind, summed
from lit_fedad.contracts.message import LARGEST_SQUARES
from lit_fedad.core.errors import UserError
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.merge import root_mean_squares
from lit_fedad.memory.moments import Moments
from lit_fedad.methods.parts import pooled_moments
from lit_fedad.methods.parts.bank_evidence import moments_sent, subspace_received
from lit_fedad.methods.parts.feature_sums import ClusterSums
from lit_fedad.methods.parts.noised_subspace import NOISED_SUBSPACE
from lit_fedad.methods.parts.pooled_moments import (
    ModelSums,
    MomentsClient,
    MomentsServer,
    PooledMoments,
    subspace_spec,
)
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.subspace import Subspace


class FederatedSubspaceClient(MomentsClient):
    """A client that sends the moments of its features, and scores by the residual outside the common subspace.

    Args:
        task: Features and subspace.
        noised_directions: Number of directions that features are projected on under differential privacy.
        noised_share: Share of the variance along these directions that the subspace then keeps.

    Raises:
        UserError: If a number is out of range.
    """

    needs = Subspace
    task: Subspace

    def __init__(self, task: Subspace, noised_directions: int = 48, noised_share: float = 0.95) -> None:
        super().__init__(task)
        self.choose_directions(noised_directions, noised_share)

    def receive(self, message: Message) -> None:
        """Loads the subspace and, as far as the message holds them, clusters."""
        self.task.load_subspace(message["centre"], message["basis"])
        if "memory" in message:
            self.task.load_memory(message["memory"], message.get("radii"))

    def broadcast_spec(self, clusters: tuple[str, ...] = ("memory", "radii")) -> MessageSpec:
        """Declares the subspace and, if the task has clusters, the named values of clusters.

        Args:
            clusters: Names among ``memory`` and ``radii``.
        """
        channels, rows = self.task.num_features, self.task.clusters
        forms = {
            "memory": TensorSpec((rows, channels), unordered=True),
            "radii": TensorSpec((rows,), low=0),
        }
        chosen = {name: forms[name] for name in clusters} if rows else {}
        return {**subspace_spec(self.task), **chosen}

    def refit(self, moments: list[Moments], loader: DataLoader) -> None:
        """Fits the subspace to the moments of each set."""
        self.task.load_subspace(*self.task.fit_subspace(moments))


class FederatedSubspaceServer(MomentsServer):
    """The server, which adds up moments and computes the subspace.

    Args:
        client: A client, for sizes.
    """

    state_names = ("clusters",)
    task: Subspace

    def __init__(self, client: FederatedSubspaceClient) -> None:
        super().__init__(client)
        self.clusters: Message = {}

    def learn(self) -> None:
        """Computes the subspace of all features that clients have measured so far."""
        fitted = self.task.fit_subspace(list(self.moment_sets()))
        self.subspace = dict(zip(("centre", "basis"), fitted, strict=True))

    def broadcast(self, client_id: int) -> Message:
        """Returns subspace and clusters, the same to every client."""
        return {**self.subspace, **self.clusters}

    def diagnostics(self) -> dict[str, float]:
        """Returns the number of directions inside and outside the subspace."""
        if not self.subspace:
            return {}
        _, channels, outside = self.subspace["basis"].shape
        if "frame" in self.moments:
            channels = self.directions
        return {"dimensions": float(channels - outside), "residual_dimensions": float(outside)}


class _SendState(Exchange[FederatedSubspaceClient, FederatedSubspaceServer]):
    """An exchange in which clients receive all that the server has computed so far.

    Attributes:
        clusters: Names of the values of clusters that the server has by then.
    """

    clusters: tuple[str, ...] = ()
    down = True

    def broadcast_spec(self, client: FederatedSubspaceClient) -> MessageSpec:
        """Declares the server's message."""
        return client.broadcast_spec(self.clusters)


class Centres(_SendState):
    """The set-up exchange in which clients send centres of clusters of their patches; the server clusters these."""

    name = "clusters"

    discloses = (
        Disclosure(Kind.PATCHES, "centres of clusters of patches' features (a cluster may be one patch)"),
    )

    def send(self, client: FederatedSubspaceClient, loader: DataLoader) -> Message:
        """Returns the centres of clusters of a sample of patches, and the number of patches of each."""
        clusters = client.task.cluster(loader, client.context)
        return {"memory": clusters.centroids.float().cpu(), "counts": clusters.counts.float().cpu()}

    def upload_spec(self, client: FederatedSubspaceClient) -> MessageSpec:
        """Declares the form of `send`."""
        rows = client.task.clusters
        return {
            "memory": TensorSpec((rows, client.task.num_features), unordered=True),
            "counts": TensorSpec((rows,), low=0, counted=True),
        }

    def validate(self, server: FederatedSubspaceServer, client_id: int, update: Update) -> None:
        """Checks that not all counts are 0."""
        if not update.message["counts"].any():
            raise UserError("the client's clusters count no patch")

    def aggregate(self, server: FederatedSubspaceServer, updates: Mapping[int, Update]) -> None:
        """Clusters the centres, each client weighted by its number of images."""
        weights = [
            update.message["counts"] / update.message["counts"].sum() * update.num_samples
            for update in updates.values()
        ]
        clusters = kmeans(
            torch.cat([update.message["memory"] for update in updates.values()]),
            server.task.clusters,
            weights=torch.cat(weights),
            generator=server.context.generator("clusters"),
        )
        server.clusters = {"memory": clusters.centroids.contiguous()}


class Residuals(_SendState):
    """The set-up exchange in which clients send sums of squared residuals by cluster."""

    name = "residuals"
    clusters = ("memory",)
    sums = Sums(lambda client: ClusterSums(client.task.vectors_per_image))

    discloses = (summed("squared distances of patches to a subspace, by cluster", images=1),)

    def send(self, client: FederatedSubspaceClient, loader: DataLoader) -> Message:
        """Returns ``squares`` and ``counts`` [K]."""
        squares, counts = client.task.residuals_by_cluster(loader)
        return {"squares": squares.float(), "counts": counts.float()}

    def upload_spec(self, client: FederatedSubspaceClient) -> MessageSpec:
        """Declares the form of `send`."""
        sums = partial(TensorSpec, (client.task.clusters,), low=0, counted=True)
        return {"squares": sums(high=LARGEST_SQUARES), "counts": sums()}

    def validate(self, server: FederatedSubspaceServer, client_id: int, update: Update) -> None:
        """Checks the counts."""
        total = float(update.message["counts"].double().sum())
        check_count(total, update.num_samples * server.set_vectors)

    def aggregate(self, server: FederatedSubspaceServer, updates: Mapping[int, Update]) -> None:
        """Computes the root mean square residual of each cluster."""

        def summed(name: str) -> Tensor:
            return torch.stack([update.message[name].double() for update in updates.values()]).sum(0)

        server.clusters["radii"] = root_mean_squares(summed("squares"), summed("counts"))


class NewMoments(_SendState, pooled_moments.NewMoments):
    """The exchange of a round, in which clients receive clusters too."""

    clusters = ("memory", "radii")


def exchanges(client: FederatedSubspaceClient) -> Exchanges:
    """Lists moments, and clusters if the task has any, before round 1; in rounds the moments of new data."""
    clusters = (Centres(), Residuals()) if client.task.clusters else ()
    # Images cannot be subtracted from the radii of clusters, nor from the folds by which a share may be chosen.
    made_of_moments = not isinstance(client.task.share, str) and not client.task.clusters
    setup, rounds = (PooledMoments(), *clusters), (NewMoments(),)
    evidence = Evidence(moments_sent, subspace_received)
    if not made_of_moments:
        return Exchanges(setup, rounds, evidence=evidence)
    noised = Exchanges(NOISED_SUBSPACE, rounds)
    return Exchanges(setup, rounds, ModelSums(), noised, evidence)
