"""Exact nearest neighbours in a memory bank, and distances to them that can be differentiated.

Everything works on rows: a bank is ``[slots, channels]``, patches are ``[n, channels]``.

The expansion ``|q|^2 - 2 q.b + |b|^2`` turns the search into one matrix product, but its rounding error is
about ``eps * |q|^2``: a distance near zero comes out wrong, even negative. It therefore only *ranks* the
slots, on rows minus the middle of the bank, for which the error is smallest. The distances of the nearest slots
are then recomputed from the differences.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.errors import UserError

Backend = Literal["auto", "torch", "faiss"]
Search = Callable[[Tensor], Tensor]

CHUNK_BYTES = 64 * 2**20
_CACHE_BYTES = 2**20  # memory speed limits the differences: blocks of this size stay in a core's cache


@torch.no_grad()
def nearest(queries: Tensor, bank: Tensor, k: int, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """Finds the ``k`` nearest slots of every query, exactly and without gradient.

    Temporaries for the queries take at most `CHUNK_BYTES`, and a centred copy of the bank is made beside them. The
    distance to a slot equal to the query is exactly 0. Only slots whose squared distances differ by less than the
    rounding of the matrix product (about ``1e-7 |q - c|^2`` in single precision, with c the `mean_of_middle_half` of
    the bank) may be mistaken for each other. Autocast has no effect here.

    Args:
        queries: Rows ``[n, channels]``, any floating type; half precision is converted to single.
        bank: Rows ``[slots, channels]`` on the same device.
        k: Number of neighbours, 1 to ``slots``.
        backend: ``torch`` (any device), ``faiss`` (searches in single precision, on a GPU with faiss-gpu)
            or ``auto``: faiss where it was measured faster (single precision on a Linux CPU), else torch.

    Returns:
        Euclidean distances ``[n, k]``, ascending, and the slots they belong to, ``[n, k]`` int64.

    Raises:
        UserError: The backend is ``faiss``, and faiss is not installed.
        ValueError: The shapes do not fit, or ``k`` is not in 1 to ``slots``.

    Example:
        >>> bank = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> distances, slots = nearest(torch.zeros(1, 2), bank, k=2)
        >>> distances.tolist(), slots.tolist()
        ([[1.0, 5.0]], [[1, 0]])
    """
    _check_rows(queries, bank)
    if not 1 <= k <= len(bank):
        raise ValueError(f"k={k} neighbours asked of a bank of {len(bank)} slots: choose 1 to {len(bank)}")
    dtype = working_dtype(queries, bank)
    bank = bank.to(dtype)
    centre = mean_of_middle_half(bank)
    centred = bank - centre
    search = _faiss_search(centred, k) if _uses_faiss(backend, centred) else _torch_search(centred, k)

    distances = torch.empty(queries.shape[0], k, dtype=dtype, device=bank.device)
    indices = torch.empty(queries.shape[0], k, dtype=torch.int64, device=bank.device)
    row_bytes = dtype.itemsize * (len(bank) + 2 * bank.shape[1])
    for rows in chunks(queries.shape[0], row_bytes):
        block = queries[rows].to(dtype)
        with full_precision(bank):
            indices[rows] = search(block - centre)
        distances[rows] = _distances(block, bank, indices[rows])
    if k > 1:  # the recomputed distances may reorder near ties
        distances, order = distances.topk(k, dim=1, largest=False)
        indices = indices.gather(1, order)
    return distances, indices


def neighbour_distances(queries: Tensor, bank: Tensor, indices: Tensor) -> Tensor:
    """Computes Euclidean distances of every query to given slots, differentiable in the queries.

    The bank is a constant. No ``[n, k, channels]`` tensor is ever formed, forwards or backwards. A
    distance of 0 gets the sub-gradient 0.

    Args:
        queries: Rows ``[n, channels]``.
        bank: Rows ``[slots, channels]``.
        indices: Slots to measure to, ``[n, k]`` int64, as :func:`nearest` returns them.

    Returns:
        Distances ``[n, k]``, at least single precision.

    Raises:
        ValueError: The shapes do not fit.

    Example:
        >>> query = torch.tensor([[3.0, 4.0]], requires_grad=True)
        >>> neighbour_distances(query, torch.zeros(1, 2), torch.tensor([[0]])).sum().backward()
        >>> [round(value, 4) for value in query.grad[0].tolist()]
        [0.6, 0.8]
    """
    _check_rows(queries, bank)
    if indices.ndim != 2 or len(indices) != len(queries):
        raise ValueError(f"indices must be [{len(queries)}, k], one row a query, not {list(indices.shape)}")
    distances: Tensor = _NeighbourDistances.apply(queries, bank.detach(), indices)
    return distances


def squared_distances(rows: Tensor, bank: Tensor, bank_norms: Tensor) -> Tensor:
    """Computes squared distances by one matrix product, with the rounding error of the expansion.

    Args:
        rows: Rows ``[n, channels]``; the error is smallest if the `mean_of_middle_half` of the data was subtracted.
        bank: Rows ``[slots, channels]``, from which the same has been subtracted.
        bank_norms: Squared norms of the bank's rows, ``[slots]``.

    Returns:
        Squared distances ``[n, slots]``, not negative.

    Example:
        >>> squared_distances(torch.tensor([[1.0]]), torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 9.0]))
        tensor([[0., 4.]])
    """
    product = torch.addmm(bank_norms, rows, bank.T, alpha=-2)
    return product.add_(rows.square().sum(1, keepdim=True)).clamp_(min=0)


def mean_of_middle_half(rows: Tensor) -> Tensor:
    """Computes the mean of the half of the rows nearest to the mean of all; unlike that mean, it resists outliers.

    Args:
        rows: Rows ``[n, channels]``.

    Returns:
        The middle ``[channels]``.

    Example:
        >>> mean_of_middle_half(torch.tensor([[1.0], [2.0], [3.0], [1e6]]))
        tensor([2.5000])
    """
    distances = (rows - rows.mean(0)).square().sum(1)
    return rows[distances.topk((len(rows) + 1) // 2, largest=False).indices].mean(0)


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the widest type of the tensors, but at least single precision.

    Example:
        >>> working_dtype(torch.zeros(1, dtype=torch.float16))
        torch.float32
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def chunks(length: int, row_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[slice]:
    """Yields slices that cover ``range(length)`` in blocks of at most ``chunk_bytes``, but at least one row.

    Example:
        >>> list(chunks(5, row_bytes=4, chunk_bytes=8))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if torch.compiler.is_exporting():  # the graph must not depend on how many rows there are
        yield slice(None)
        return
    step = max(1, chunk_bytes // max(1, row_bytes))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class _NeighbourDistances(torch.autograd.Function):
    """The function d_k = |q - b_k|, with gradient sum_k g_k (q - b_k) / d_k with respect to q."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, bank: Tensor, indices: Tensor) -> Tensor:
        dtype = working_dtype(queries, bank)
        distances = _distances(queries.to(dtype), bank.to(dtype), indices)
        ctx.save_for_backward(queries, bank, indices, distances)
        return distances

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        queries, bank, indices, distances = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = torch.where(distances > 0, grad / distances, 0)
        gradient = torch.zeros(queries.shape, dtype=distances.dtype, device=queries.device)
        for rows in _cache_blocks(queries, distances.dtype):
            block = queries[rows].to(distances.dtype)
            for column in range(indices.shape[1]):
                difference = block - bank[indices[rows, column]]
                gradient[rows].addcmul_(difference, scale[rows, column, None])
        return gradient.to(queries.dtype), None, None


def _distances(queries: Tensor, bank: Tensor, indices: Tensor) -> Tensor:
    """Computes |q - b_k| from the differences, one neighbour at a time."""
    distances = torch.empty(indices.shape, dtype=queries.dtype, device=queries.device)
    for rows in _cache_blocks(queries, queries.dtype):
        for column in range(indices.shape[1]):
            difference = bank[indices[rows, column]].sub_(queries[rows])
            distances[rows, column] = torch.linalg.vector_norm(difference, dim=1)
    return distances


def _cache_blocks(queries: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    size = _CACHE_BYTES if queries.device.type == "cpu" else CHUNK_BYTES
    return chunks(queries.shape[0], dtype.itemsize * queries.shape[1], size)


def _torch_search(bank: Tensor, k: int) -> Search:
    norms = bank.square().sum(1)

    def search(rows: Tensor) -> Tensor:
        scores = torch.addmm(norms, rows, bank.T, alpha=-2)  # |q|^2 does not change the ranking
        return scores.argmin(1, keepdim=True) if k == 1 else scores.topk(k, dim=1, largest=False).indices

    return search


def _faiss_search(bank: Tensor, k: int) -> Search:
    import faiss

    if bank.is_cuda and hasattr(faiss, "StandardGpuResources"):
        return _faiss_gpu_search(bank, k)
    index: Any = faiss.IndexFlatL2(bank.shape[1])
    index.add(_numpy(bank))

    def search(rows: Tensor) -> Tensor:
        faiss.omp_set_num_threads(torch.get_num_threads())  # faiss has its own thread pool
        slots = torch.from_numpy(index.search(_numpy(rows), k)[1])
        return slots.clamp_(min=0).to(rows.device)  # -1 marks a row with NaN, whose distance is NaN anyway

    return search


def _faiss_gpu_search(bank: Tensor, k: int) -> Search:
    import faiss
    import faiss.contrib.torch_utils  # makes faiss take tensors on their device

    device = bank.device.index or 0
    resources, vectors = _gpu_resources(device), bank.float().contiguous()

    def search(rows: Tensor) -> Tensor:
        slots: Tensor = faiss.knn_gpu(resources, rows.float().contiguous(), vectors, k, device=device)[1]
        return slots.clamp_(min=0)

    return search


@cache
def _gpu_resources(device: int) -> Any:
    """Returns the resources that faiss reserves on a GPU; kept, because reserving takes a tenth of a second."""
    import faiss

    return faiss.StandardGpuResources()


def _numpy(rows: Tensor) -> Any:
    return rows.to("cpu", torch.float32).contiguous().numpy()


def _uses_faiss(backend: Backend, bank: Tensor) -> bool:
    if backend not in ("auto", "torch", "faiss"):
        raise UserError(f"unknown neighbour backend {backend!r}: choose auto, torch or faiss")
    if backend == "torch" or torch.compiler.is_exporting():
        return False
    installed = find_spec("faiss") is not None
    if backend == "faiss" and not installed:
        raise UserError("backend=faiss needs faiss: pip install 'lit-fedad[faiss]', or choose backend=auto")
    # On macOS the OpenMP runtimes of torch and faiss clash in one process: faiss is used there only on request.
    fast_here = bank.device.type == "cpu" and bank.dtype == torch.float32 and sys.platform == "linux"
    return backend == "faiss" or (installed and fast_here)


def _check_rows(queries: Tensor, bank: Tensor) -> None:
    if queries.ndim != 2 or bank.ndim != 2 or queries.shape[1] != bank.shape[1]:
        raise ValueError(
            f"queries and bank must be rows of equal width, not {list(queries.shape)} and {list(bank.shape)}"
        )
