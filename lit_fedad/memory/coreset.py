"""Greedy k-centre coresets: the farthest-point selection of PatchCore, exact, at matrix-product speed.

The textbook loop reads all points for each selection. But distances to the selected set only ever *shrink*. So
the greedy choice stays among the few points that are farthest now, the candidates, until the best of them is no
farther than all other points were. A batch of selections is therefore made on a small table of distances between
candidates; then one matrix product updates the distances of all points.
"""

import torch
from torch import Tensor

from lit_fedad.memory.knn import chunks, squared_distances, working_dtype

_MOST_CANDIDATES = 2048
_BLOCK_BYTES = 8 * 2**20  # a block of distances of this size stays in the shared cache


@torch.no_grad()
def greedy_k_center(
    points: Tensor,
    size: int,
    *,
    generator: torch.Generator,
    start: int | None = None,
    projection: int | None = None,
) -> Tensor:
    """Selects points one by one, each the farthest from all selected before (Gonzalez, 1985).

    The result is that of the textbook greedy loop, up to distances that are equal within the rounding of the
    working precision (ties go to the lowest index). The selected indices are distinct: once every point
    coincides with a selected one, the remaining places are filled with unselected duplicates.

    Args:
        points: Rows ``[n, channels]``; half precision is converted to single.
        size: Number of points to select; ``n`` or more selects all, in order.
        generator: Draws the first point and the projection.
        start: Index of the first point instead of a random one.
        projection: Selects in this many dimensions after a Gaussian random projection, as PatchCore does; the
            selection is then greedy for the projected distances.

    Returns:
        Indices in order of selection, ``[min(size, n)]`` int64, on the device of the points.

    Raises:
        ValueError: The points are not rows, ``size`` is not positive or ``start`` is not one of the points.

    Example:
        >>> line = torch.tensor([[0.0], [1.0], [10.0], [11.0], [5.0]])
        >>> greedy_k_center(line, 3, generator=torch.Generator(), start=0).tolist()
        [0, 3, 4]
    """
    count = len(points)
    if points.ndim != 2 or size < 1:
        raise ValueError(f"a coreset needs rows and a positive size, not {list(points.shape)} and {size}")
    if start is not None and not 0 <= start < count:
        raise ValueError(f"start={start} is not one of the {count} points")
    if size >= count:
        return torch.arange(count, device=points.device)
    if start is None:
        start = int(torch.randint(count, (), generator=generator, device=generator.device))
    if projection is not None and projection < points.shape[1]:
        points = _project(points, projection, generator)

    distances = torch.full((count,), torch.inf, dtype=working_dtype(points), device=points.device)
    centre = points.mean(0, dtype=distances.dtype)
    batch = torch.tensor([start], device=points.device)
    batches, selected = [batch], 1
    while selected < size:
        _update(distances, points, batch, centre)
        batch = _select_batch(distances, points, centre, size - selected)
        batches.append(batch)
        selected += len(batch)
    return torch.cat(batches)


def _update(distances: Tensor, points: Tensor, batch: Tensor, centre: Tensor) -> None:
    """Lowers the squared distances to the selected set by those to a batch of newly selected points."""
    new = points[batch].to(centre.dtype) - centre
    norms = new.square().sum(1)
    row_bytes = centre.dtype.itemsize * (len(new) + 2 * points.shape[1])
    for rows in chunks(len(points), row_bytes, _BLOCK_BYTES):
        block = squared_distances(points[rows].to(centre.dtype) - centre, new, norms).amin(1)
        distances[rows] = torch.minimum(distances[rows], block)
    distances[batch] = -1  # never selected again, not even among duplicates


def _select_batch(distances: Tensor, points: Tensor, centre: Tensor, at_most: int) -> Tensor:
    """Selects the next points, as many as are certain without looking at points outside the candidates."""
    count = min(max(64, len(points) // 32), _MOST_CANDIDATES, len(points) - 1)
    farthest = distances.topk(count + 1)
    bound = farthest.values[-1].item()  # no point outside the candidates is farther than this
    first = distances.argmax()  # the lowest index among ties, which topk may leave out
    candidates = torch.cat([first[None], farthest.indices[:-1]]).unique()

    rows = points[candidates].to(centre.dtype) - centre
    table = squared_distances(rows, rows, rows.square().sum(1)).cpu().numpy()
    current = distances[candidates].cpu().numpy()
    chosen = [int(current.argmax())]
    while len(chosen) < at_most:
        current.clip(max=table[chosen[-1]], out=current)
        current[chosen[-1]] = -1
        best = int(current.argmax())
        if current[best] <= bound:
            break
        chosen.append(best)
    return candidates[torch.tensor(chosen, device=candidates.device)]


def _project(points: Tensor, dimensions: int, generator: torch.Generator) -> Tensor:
    dtype = working_dtype(points)
    shape = (points.shape[1], dimensions)
    directions = torch.randn(shape, generator=generator, dtype=dtype, device=generator.device)
    directions = directions.to(points.device) / dimensions**0.5
    projected = torch.empty(len(points), dimensions, dtype=dtype, device=points.device)
    for rows in chunks(len(points), dtype.itemsize * points.shape[1]):
        projected[rows] = points[rows].to(dtype) @ directions
    return projected
