"""Memory-reduce: compression of a client's feature maps, a stream of batches, to the memory that it uploads.

The rules share one protocol. ``PositionReduce`` is FedDyMem's own: slot k is position k of the map.
``SlotReduce`` applies the same equations slot by slot, so neither images nor clients need to be aligned.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError, not_there
from lit_fedad.memory.kmeans import add_by_slot, kmeans
from lit_fedad.memory.knn import nearest, neighbour_distances, working_dtype

Judge = Callable[[Tensor], Tensor]
"""Function from the distances of a batch's patches to their slots [n] to other values of these patches [n]."""


class Reduced(NamedTuple):
    """Compressed feature maps of a client.

    Attributes:
        memory: The slots ``[slots, channels]``.
        counts: Number of features of each slot ``[slots]``.
        radii: Root mean square distance of these features to their slot (from round 1 on to the slot of the
            received memory), or root mean square of their `Judge` values ``[slots]``; 0 for an empty slot.
        images: Number of different images with features in each slot ``[slots]`` int64.
    """

    memory: Tensor
    counts: Tensor
    radii: Tensor
    images: Tensor

    def message(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns ``memory`` and the named ones of ``counts``, ``radii`` and ``image_counts``."""
        values = {"counts": self.counts, "radii": self.radii, "image_counts": self.images}
        return {"memory": self.memory.float(), **{name: values[name] for name in names}}


class MemoryReduce(ABC):
    """Compresses a stream of feature maps to a memory of fixed size (FedDyMem Eq. 13).

    Call :meth:`start` once a round, :meth:`update` with every batch of maps, then :meth:`finish`. The maps
    are never held all at once, and the batch size does not matter.
    """

    _memory: Tensor | None

    def start(self, memory: Tensor | None, round: int, slots: int, generator: torch.Generator) -> None:
        """Begins a round.

        Args:
            memory: The shared memory of the round before, ``[slots, channels]``; not used in round 0.
            round: Number of the round, from 0.
            slots: Size of the memory.
            generator: Source of all randomness.

        Raises:
            ValueError: A round after 0 comes without a memory of that size.
        """
        self._memory, self._round, self._slots, self._generator = None, round, slots, generator
        if round > 0:
            if memory is None or len(memory) != slots:
                raise ValueError(f"round {round} needs the memory of the round before, with {slots} slots")
            # In single precision at least.
            self._memory = memory.detach().to(working_dtype(memory))
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Resets the sums of a rule."""

    @abstractmethod
    def update(self, maps: Tensor, judge: Judge | None = None) -> None:
        """Adds a batch of feature maps.

        Args:
            maps: ``[images, patches, channels]``.
            judge: Computes the values that the radii are of; None for distances.
        """

    @abstractmethod
    def finish(self) -> Reduced:
        """Ends the round.

        Raises:
            UserError: Round 0 saw no image.
        """

    @property
    def adds_up(self) -> bool:
        """Whether memories are plain means of patches, so that with counts they add up to the means of a union."""
        return False

    def remember(self, past: Reduced) -> None:
        """Adds the compressed patches of earlier stages.

        Raises:
            NotImplementedError: If memories do not add up.
        """
        raise not_there(self, "remember")


class PositionReduce(MemoryReduce):
    """Weighted mean over images, position by position.

    With M_i the map of image i and M' the memory of the round before, the weighted mean (FedDyMem Eq. 14,
    FedDyMem Eq. 15) and the moving average (FedDyMem Eq. 16)::

        Mhat     = sum_i w_i M_i / sum_i w_i,  w_i = 1 in round 0, else |M_i - M'| (Frobenius)
        M_reduce = a Mhat + (1 - a) M',        a = 1 / (t + 1)

    If all weights are zero, every map equals M' and so does the result. Each slot counts the images.

    Example:
        >>> reduce = PositionReduce()
        >>> reduce.start(torch.zeros(1, 1), round=1, slots=1, generator=torch.Generator())
        >>> reduce.update(torch.tensor([[[1.0]], [[3.0]]]))
        >>> reduce.finish().memory.item()  # half of (1 * 1 + 3 * 3) / (1 + 3)
        1.25
    """

    @staticmethod
    def check(slots: int, patches: int, has_judge: bool) -> None:
        """Checks that there are as many slots as an image has patches, and that radii are of distances.

        Raises:
            UserError: If one of these does not hold.
        """
        if has_judge:
            raise UserError("PositionReduce knows radii of distances alone: leave task.subspace out")
        if patches != slots:
            needed = f"an image has {patches} patches; give task.slots={patches}"
            raise UserError(f"task.slots={slots}: PositionReduce needs a slot a patch, and {needed}")

    def _begin(self) -> None:
        self._images, self._weight = 0, 0.0
        self._sum: Tensor | None = None  # of weighted maps; `_plain` and `_squares` are not weighted

    @torch.no_grad()
    def update(self, maps: Tensor, judge: Judge | None = None) -> None:
        """Adds a batch of feature maps ``[images, slots, channels]``."""
        self.check(self._slots, maps.shape[1], judge is not None)
        if self._sum is None:
            self._sum = torch.zeros(maps.shape[1:], dtype=torch.float64, device=maps.device)
            self._plain = torch.zeros_like(self._sum)
            self._squares = torch.zeros_like(self._sum[:, 0])
        for image in maps:
            self._images += 1
            self._plain += image
            self._squares += image.double().square().sum(1)
            weight = 1.0
            if self._memory is not None:
                weight = torch.linalg.vector_norm(image.to(self._memory.dtype) - self._memory).item()
            self._sum.add_(image, alpha=weight)
            self._weight += weight

    def finish(self) -> Reduced:
        """Ends the round, see :class:`MemoryReduce`."""
        if self._sum is None:
            if self._memory is None:
                raise _no_image()
            empty = torch.zeros(self._slots, device=self._memory.device)
            return Reduced(self._memory.clone(), empty, empty.clone(), empty.long())
        mean = self._sum / self._weight if self._memory is None or self._weight > 0 else self._memory
        memory = _moving_average(mean, self._memory, self._round)
        centre = (memory if self._memory is None else self._memory).double()
        counts = torch.full((self._slots,), float(self._images), device=memory.device)
        squares = self._squares - 2 * (self._plain * centre).sum(1) + self._images * centre.square().sum(1)
        radii = (squares.clamp(min=0) / self._images).sqrt().float()
        return Reduced(memory, counts, radii, torch.full_like(counts, self._images, dtype=torch.int64))


Weights = Literal["distance", "clipped", "none"]


class SlotReduce(MemoryReduce):
    """Weighted mean over patches, memory slot by memory slot.

    Round 0: k-means++ with a few Lloyd steps over all patches. Rounds t >= 1, with m'_k the memory of the
    round before and every patch q assigned to its nearest slot a(q)::

        mhat_k = sum w_q q / sum w_q over a(q) = k,  w_q = |q - m'_a(q)|
        m_k    = mhat_k / (t + 1) + (1 - 1 / (t + 1)) m'_k

    A slot that is empty, or whose patches all equal m'_k, keeps m'_k. Each slot counts its patches.

    With ``weights="none"`` and ``average=False`` the memory is the plain mean of each slot's patches: with the counts
    as weights, such means of several clients add up to one step of Lloyd's algorithm over all of their patches.

    Args:
        weights: ``"distance"`` for w_q as above (FedDyMem Eq. 15); ``"clipped"`` for the same, up to the slot's
            distance to the nearest other slot, so that a single outlier does not pull a slot away; ``"none"`` for 1.
        average: Whether a slot moves by 1 / (t + 1) of the way only (FedDyMem Eq. 16).
        max_patches: Largest number of patches that round 0 clusters: a uniform sample of the stream, whose counts
            are scaled up to all patches.
        steps: Number of Lloyd steps of round 0.

    Raises:
        UserError: If the weights are unknown, or ``max_patches`` is below 1.

    Example:
        >>> reduce = SlotReduce()
        >>> reduce.start(torch.tensor([[0.0], [10.0]]), round=1, slots=2, generator=torch.Generator())
        >>> reduce.update(torch.tensor([[[1.0], [3.0]]]))
        >>> memory, counts, radii, images = reduce.finish()
        >>> memory.flatten().tolist(), counts.tolist(), [round(radius, 4) for radius in radii.tolist()]
        ([1.25, 10.0], [2.0, 0.0], [2.2361, 0.0])
        >>> images.tolist()
        [1, 0]
    """

    def __init__(
        self,
        weights: Weights = "distance",
        average: bool = True,
        max_patches: int = 200_000,
        steps: int = 10,
    ) -> None:
        if weights not in get_args(Weights):
            raise UserError(f"task.reduce.weights={weights}: give {', '.join(get_args(Weights))}")
        at_least("task.reduce", 1, max_patches=max_patches)
        self.weights, self.average = weights, average
        self.max_patches, self.steps = max_patches, steps

    def _begin(self) -> None:
        slots = self._slots
        self._reservoir, self._seen = _Reservoir(self.max_patches, self._generator), 0
        if self._memory is not None:
            self._sums = torch.zeros_like(self._memory, dtype=torch.float64)
            self._weights = torch.zeros(slots, dtype=torch.float64, device=self._memory.device)
            self._squares = torch.zeros_like(self._weights)
            self._counts = torch.zeros(slots, dtype=torch.int64, device=self._memory.device)
            self._images = torch.zeros_like(self._counts)
            if self.weights == "clipped":
                others = self._memory.unique(dim=0)  # a copy of a slot does not count as another slot
                self._spacing = torch.full_like(self._weights, torch.inf)
                if len(others) > 1:
                    self._spacing = nearest(self._memory, others, k=2)[0][:, 1].double()

    @torch.no_grad()
    def update(self, maps: Tensor, judge: Judge | None = None) -> None:
        """Adds a batch of feature maps ``[images, patches, channels]``."""
        patches = maps.flatten(0, 1)
        if self._memory is None:
            # The reservoir keeps each patch with the number of its image in one more column.
            numbers = torch.arange(self._seen, self._seen + len(maps), device=maps.device)
            numbers = numbers.repeat_interleave(maps.shape[1])[:, None]
            self._seen += len(maps)
            self._reservoir.add(torch.cat([patches.to(working_dtype(patches)), numbers], dim=1))
            return
        distances, slots = nearest(patches, self._memory, k=1)
        assignment, distance = slots[:, 0], distances[:, 0].double()
        weights = torch.ones_like(distance) if self.weights == "none" else distance
        if self.weights == "clipped":
            weights = torch.minimum(distance, self._spacing[assignment])
        add_by_slot(self._sums, patches, assignment, weights)
        self._weights += torch.bincount(assignment, weights, minlength=self._slots)
        squares = (distance if judge is None else judge(distances[:, 0]).double()).square()
        self._squares += torch.bincount(assignment, squares, minlength=self._slots)
        self._counts += torch.bincount(assignment, minlength=self._slots)
        in_slot = torch.zeros(len(maps), self._slots, dtype=torch.bool, device=maps.device)
        self._images += in_slot.scatter_(1, assignment.view(len(maps), -1), True).sum(0)

    @property
    def adds_up(self) -> bool:
        """Whether memories are plain means of patches."""
        return self.weights == "none" and not self.average

    @torch.no_grad()
    def remember(self, past: Reduced) -> None:
        """Adds each vector of ``past`` to its nearest slot, as many times as it counts patches."""
        assert self._memory is not None, "the first memory has no past"
        device = self._memory.device
        vectors, counts, radii, images = (tensor.to(device) for tensor in past)
        slots, mass = nearest(vectors, self._memory, k=1)[1][:, 0], counts.double()
        add_by_slot(self._sums, vectors, slots, mass)
        self._weights += torch.bincount(slots, mass, minlength=self._slots)
        self._squares += torch.bincount(slots, mass * radii.double().square(), minlength=self._slots)
        self._counts += torch.bincount(slots, mass, minlength=self._slots).long()
        # Several vectors of a slot may have patches of the same image: only the largest count of one is certain.
        past_images = torch.zeros_like(self._images).scatter_reduce_(0, slots, images, "amax")
        self._images += past_images

    def finish(self) -> Reduced:
        """Ends the round, see :class:`MemoryReduce`."""
        if self._memory is None:
            return self._cluster()
        weights = self._weights[:, None]
        mean = torch.where(weights > 0, self._sums / weights, self._memory)
        memory = _moving_average(mean, self._memory, self._round if self.average else 0)
        radii = _root_mean(self._squares, self._counts)
        return Reduced(memory, self._counts.float(), radii, self._images)

    def _cluster(self) -> Reduced:
        rows = self._reservoir.rows()
        sample, numbers = rows[:, :-1], rows[:, -1].long()
        clusters = kmeans(sample, self._slots, generator=self._generator, max_steps=self.steps, tolerance=0)
        distances = neighbour_distances(sample, clusters.centroids, clusters.assignment[:, None])[:, 0]
        squares = torch.bincount(clusters.assignment, distances.double().square(), minlength=self._slots)
        counts = (clusters.counts * (self._reservoir.seen / len(sample))).float()
        radii = _root_mean(squares, clusters.counts)
        pairs = (clusters.assignment * self._seen + numbers).unique()
        return Reduced(
            clusters.centroids, counts, radii, (pairs // self._seen).bincount(minlength=self._slots)
        )


class SampleReduce(MemoryReduce):
    """Uniform sample of the patches: the bank of a plain nearest-neighbour detector.

    The memory of the round before is not used. With fewer patches than slots, some patches are repeated.
    Each slot counts one patch and has radius 0.

    Example:
        >>> reduce = SampleReduce()
        >>> reduce.start(None, round=0, slots=2, generator=torch.Generator())
        >>> reduce.update(torch.tensor([[[1.0], [3.0]]]))
        >>> reduce.finish().memory.flatten().tolist()
        [1.0, 3.0]
    """

    def _begin(self) -> None:
        self._reservoir = _Reservoir(self._slots, self._generator)

    @torch.no_grad()
    def update(self, maps: Tensor, judge: Judge | None = None) -> None:
        """Adds a batch of feature maps ``[images, patches, channels]``; ``judge`` is ignored."""
        self._reservoir.add(maps.flatten(0, 1))

    def finish(self) -> Reduced:
        """Ends the round, see :class:`MemoryReduce`."""
        rows = self._reservoir.rows()
        if len(rows) < self._slots:
            extra = torch.randint(len(rows), (self._slots - len(rows),), generator=self._generator)
            rows = torch.cat([rows, rows[extra.to(rows.device)]])
        counts = torch.ones(self._slots, device=rows.device)
        memory = rows.to(working_dtype(rows), copy=True)
        return Reduced(memory, counts, torch.zeros_like(counts), torch.ones_like(counts, dtype=torch.int64))


class _Reservoir:
    """A uniform sample of a stream of rows (algorithm R of Vitter, 1985), which does not depend on the batches."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self._size = size
        self._generator = generator
        self._kept: Tensor | None = None
        self.seen = 0

    def add(self, rows: Tensor) -> None:
        if self._kept is None:  # allocated in full, since memory pages that are never written cost nothing
            self._kept = torch.empty(self._size, rows.shape[1], dtype=rows.dtype, device=rows.device)
        start = self.seen
        fitting = min(len(rows), max(0, self._size - start))
        self._kept[start : start + fitting] = rows[:fitting]
        self.seen += len(rows)
        if fitting < len(rows):
            self._replace(rows[fitting:], first=start + fitting)

    def _replace(self, rows: Tensor, first: int) -> None:
        """Puts row t of the stream into a random place below t + 1, if that place is in the reservoir."""
        assert self._kept is not None
        device = self._generator.device
        order = torch.arange(len(rows), device=device)
        draws = torch.rand(len(rows), generator=self._generator, dtype=torch.float64, device=device)
        places = (draws * (order + first + 1)).long()
        inside = places < self._size
        # If several rows draw one place the last of them stays, as it would if rows came one by one.
        last = torch.full((self._size,), -1, device=device)
        last.scatter_reduce_(0, places[inside], order[inside], "amax")
        replaced = last >= 0
        self._kept[replaced.to(rows.device)] = rows[last[replaced].to(rows.device)]

    def rows(self) -> Tensor:
        if self._kept is None:
            raise _no_image()
        return self._kept[: self.seen]


def _root_mean(squares: Tensor, counts: Tensor) -> Tensor:
    return (squares / counts.double().clamp(min=1)).sqrt().float()


def _moving_average(mean: Tensor, memory: Tensor | None, round: int) -> Tensor:
    """Computes the moving average of FedDyMem Eq. 16; it equals the memory exactly if the mean does."""
    if memory is None:
        return mean.float()
    previous = memory.double()
    return (previous + (mean - previous) / (round + 1)).to(memory.dtype)


def _no_image() -> UserError:
    return UserError("memory-reduce saw no image in round 0: leave out clients without training images")
