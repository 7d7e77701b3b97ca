"""The merging of several clients' memories to one: the server's side of a memory bank."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest


class Aggregation(ABC):
    """The aggregation of N uploaded memories to one.

    Attributes:
        adds_up: Whether a merge into a last memory depends only on sums by slot over all clients' patches.
        needs_counts: Whether the aggregation uses the numbers of patches.
    """

    adds_up = False
    needs_counts = False

    @abstractmethod
    def __call__(
        self, vectors: Tensor, counts: Tensor, slots: int, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Aggregates the vectors of all memories to one memory [slots, C].

        Args:
            vectors: Uploaded memories, one after the other [n, C].
            counts: Number of patches of each vector [n].
            slots: Size of the memory.
            previous: The last shared memory [slots, C]; None for the first.
            generator: Draws initial centroids.
        """


class KMeansAggregation(Aggregation):
    """A clustering of all uploaded vectors to a new memory by k-means (FedDyMem Alg. 3).

    Args:
        weighted: Whether vectors are weighted by their numbers of patches; in the paper they are not.
        continued: Whether the last memory initialises Lloyd's algorithm, so that slots correspond between rounds; the
            paper draws new initial centroids in each round.
        max_steps: Number of Lloyd steps.
    """

    def __init__(self, weighted: bool = False, continued: bool = False, max_steps: int = 20) -> None:
        at_least("method.server.aggregation", 1, max_steps=max_steps)
        self.weighted, self.continued, self.max_steps = weighted, continued, max_steps
        self.needs_counts = weighted

    def __call__(
        self, vectors: Tensor, counts: Tensor, slots: int, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Clusters; see `Aggregation`."""
        weights, initial = counts if self.weighted else None, previous if self.continued else None
        steps = self.max_steps
        return kmeans(
            vectors, slots, weights=weights, initial=initial, generator=generator, max_steps=steps
        ).centroids


class MeanAggregation(Aggregation):
    """The mean of the memories slot by slot: the ablation without k-means (FedDyMem Table III)."""

    def __call__(
        self, vectors: Tensor, counts: Tensor, slots: int, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Averages; see `Aggregation`."""
        return vectors.unflatten(0, (-1, slots)).mean(0)


class LloydAggregation(Aggregation):
    """Federated Lloyd: the mean of all patches of each slot, computed from sums over clients.

    Clients assign their patches to the slots of the last memory and send each slot's mean m_ik and count n_ik::

        m_k = sum_i n_ik m_ik / sum_i n_ik

    That is one step of Lloyd's algorithm on the union of all patches, whatever their partition. A slot without a patch
    stays as it is. The first memory is a clustering of the vectors that clients send, weighted by counts.

    Args:
        patches_per_slot: Fewest patches for each slot of the first memory, on average. If clients have fewer, there are
            fewer clusters, and the other slots are copies.
    """

    adds_up = True
    needs_counts = True

    def __init__(self, patches_per_slot: int = 8) -> None:
        at_least("method.server.aggregation", 1, patches_per_slot=patches_per_slot)
        self.first, self.patches_per_slot = KMeansAggregation(weighted=True), patches_per_slot

    def __call__(
        self, vectors: Tensor, counts: Tensor, slots: int, previous: Tensor | None, generator: torch.Generator
    ) -> Tensor:
        """Averages by slot over all clients' patches; see `Aggregation`."""
        if previous is None:
            filled = min(slots, max(1, int(float(counts.double().sum()) / self.patches_per_slot)))
            memory = self.first(vectors, counts, filled, None, generator)
            return memory[torch.arange(slots) % filled]
        mass = counts.double().unflatten(0, (-1, slots))
        total = mass.sum(0)[:, None]
        sums = (mass[..., None] * vectors.double().unflatten(0, (-1, slots))).sum(0)
        return torch.where(total > 0, sums / total.clamp(min=1), previous.double()).float()


def shared_slots(memory: Tensor, images: Tensor, min_images: int) -> Tensor:
    """Finds, for every slot with too few images, the nearest slot with enough, which replaces it.

    Args:
        memory: Slots [slots, C].
        images: Number of different images with a patch in each slot [slots].
        min_images: Fewest images.

    Returns:
        The slot that is in each place [slots]; a slot with enough images keeps its place.

    Raises:
        UserError: If no slot has enough.
    """
    enough = images >= min_images
    if not enough.any():
        raise UserError(
            f"no slot of the memory has patches of {min_images} different images: lower"
            " method.client.min_images, or give fewer task.slots"
        )
    slots = torch.arange(len(memory), device=memory.device)
    if not enough.all():
        slots[~enough] = slots[enough][nearest(memory[~enough], memory[enough], 1)[1][:, 0]]
    return slots


def merge_radii(
    uploads: Sequence[Mapping[str, Tensor]], merged: Tensor, prior: float = 0.0, min_images: int = 1
) -> Tensor:
    """Computes the root mean square distance of all clients' patches to their merged slot.

    Uploaded vectors are means of their patches. So the mean square distance of patches to a merged slot is their mean
    square distance to the vector plus the square distance from the vector to the slot.

    If all patches of a slot are from one image, their distance to their mean says nothing about patches of other
    images. With `min_images`, the distance from a slot with too few images to the nearest slot with enough is added to
    the distances of its patches, as if their images were not part of the memory.

    Args:
        uploads: ``memory`` [n, C], ``counts``, ``radii`` and, if needed, ``image_counts`` [n] of each client.
        merged: The merged memory [slots, C], on the device that computes.
        prior: See `root_mean_squares`.
        min_images: Fewest different images with which the patches of a slot alone determine its radius.

    Returns:
        Radii [slots]; those of slots without a patch are the root mean square of the others.
    """
    names, device = ("memory", "radii", "counts"), merged.device
    vectors, radii, counts = (torch.cat([upload[name] for upload in uploads]).to(device) for name in names)
    offsets, nearest_slots = nearest(vectors, merged, 1)
    slots, radii, counts = nearest_slots[:, 0], radii.double(), counts.double()
    squares = radii.square() + offsets[:, 0].double().square()
    if min_images > 1:
        # Several vectors of a client may have patches of the same image: only the largest count of one is certain.
        images = torch.zeros(len(merged), dtype=torch.int64, device=device)
        for upload, client_slots in zip(
            uploads, slots.split([len(upload["memory"]) for upload in uploads]), strict=True
        ):
            client_images = upload["image_counts"].to(device)
            images += torch.zeros_like(images).scatter_reduce_(0, client_slots, client_images, "amax")
        if (images >= min_images).any():
            to_shared = (merged - merged[shared_slots(merged, images, min_images)]).double().square().sum(1)
            squares = squares + to_shared[slots]
    return pooled_radii(counts, squares, slots, len(merged), prior)


def pooled_radii(counts: Tensor, squares: Tensor, slots: Tensor, size: int, prior: float = 0.0) -> Tensor:
    """Computes the root mean square of patch values by slot.

    Args:
        counts: Number of patches of each entry [n].
        squares: Mean square value of these patches [n].
        slots: Slot of each entry [n].
        size: Number of slots.
        prior: See `root_mean_squares`.

    Returns:
        Radii [size]; those of slots without a patch are the root mean square of the others.
    """
    weights = counts.double()
    mass = torch.bincount(slots, weights, minlength=size)
    return root_mean_squares(torch.bincount(slots, weights * squares, minlength=size), mass, prior)


def root_mean_squares(totals: Tensor, counts: Tensor, prior: float = 0.0) -> Tensor:
    """Computes root mean squares from sums of squares and numbers of terms; without terms it is that of all terms.

    Args:
        totals: Sums of squares [n].
        counts: Numbers of terms [n].
        prior: Number of terms of the mean size that are added to each sum, since few terms estimate a mean badly.
    """
    typical = totals.sum() / counts.sum().clamp(min=1e-12)
    weights = counts + prior
    mean = (totals + prior * typical) / weights.clamp(min=1e-12)
    return torch.where(weights > 0, mean, typical).sqrt().float()


def agreement(memories: Tensor, merged: Tensor) -> float | None:
    """Computes the agreement of the clients: 1 if every upload lies in the merged memory, 0 if unrelated.

    It is the mean cosine between uploaded vectors and their nearest merged slots, both minus the merged memory's mean.
    It is None if all slots are equal: they have no direction from their mean with which uploads could agree.

    Args:
        memories: Uploaded vectors of all clients [n, C].
        merged: The merged memory [slots, C].
    """
    if (merged == merged[0]).all():
        return None
    centre = merged.mean(0)
    _, slots = nearest(memories, merged, 1)
    return float(torch.cosine_similarity(memories - centre, merged[slots[:, 0]] - centre, dim=1).mean())
