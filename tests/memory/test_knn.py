import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from lit_fedad.core.errors import UserError
from lit_fedad.memory import knn
from lit_fedad.memory.knn import chunks, nearest, neighbour_distances, squared_distances

FAISS = pytest.param("faiss", marks=pytest.mark.skipif(find_spec("faiss") is None, reason="needs faiss"))
BACKENDS = ["torch", FAISS, "auto"]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def rows(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_nearest_agrees_with_scipy(backend, k, device):
    queries, bank = rows(200, 12), rows(50, 12, seed=1)
    found = nearest(queries.to(device), bank.to(device), k, backend=backend)
    distances, indices = (values.cpu() for values in found)
    reference = cdist(queries.double().numpy(), bank.double().numpy())
    order = np.argsort(reference, axis=1)[:, :k]
    assert indices.dtype == torch.int64
    np.testing.assert_array_equal(indices.numpy(), order)
    np.testing.assert_allclose(distances.numpy(), np.take_along_axis(reference, order, 1), rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_equal_to_a_slot_has_distance_exactly_zero(backend):
    bank = 100 + rows(64, 48)
    for k in (1, 3):
        distances, indices = nearest(bank, bank, k, backend=backend)
        assert (distances[:, 0] == 0).all()
        assert indices[:, 0].tolist() == list(range(64))


@pytest.mark.parametrize("backend", ["torch", FAISS])
def test_a_large_common_offset_does_not_change_the_neighbours(backend):
    # The plain expansion loses all digits here: |q|^2 is about 1e9, its rounding error about 100.
    queries, bank = (
        8192 + rows(300, 16).mul(64).round() / 64,
        8192 + rows(40, 16, seed=1).mul(64).round() / 64,
    )
    reference = cdist(queries.double().numpy(), bank.double().numpy())
    distances, indices = nearest(queries, bank, 1, backend=backend)
    np.testing.assert_array_equal(indices[:, 0].numpy(), reference.argmin(1))
    np.testing.assert_allclose(distances[:, 0].numpy(), reference.min(1), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("far", [1, 15])
@pytest.mark.parametrize("backend", ["torch", FAISS])
def test_rows_far_away_do_not_blur_the_others(backend, far, k):
    """Whole numbers: squared distances are equal or at least 1 apart, so that no rounding decides."""
    queries, bank = rows(300, 16).mul(8).round(), rows(40, 16, seed=1).mul(8).round()
    bank[:far] += 2.0**20
    reference = np.sort(cdist(queries.double().numpy(), bank.double().numpy()), axis=1)
    distances, indices = nearest(queries, bank, k, backend=backend)
    np.testing.assert_allclose(distances.numpy(), reference[:, :k], rtol=1e-6)
    assert indices.min() >= far


def test_autocast_does_not_round_the_search():
    queries, bank = 4 + rows(200, 32), 4 + rows(60, 32, seed=1)
    expected = nearest(queries, bank, 3, backend="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = nearest(queries, bank, 3, backend="torch")
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0], expected[0])


def test_small_chunks_give_the_same_neighbours(monkeypatch):
    queries, bank = rows(101, 8), rows(33, 8, seed=1)
    whole = nearest(queries, bank, 4, backend="torch")
    monkeypatch.setattr(knn, "chunks", lambda length, row_bytes, *_: chunks(length, row_bytes, 1000))
    small = nearest(queries, bank, 4, backend="torch")
    assert torch.equal(whole[1], small[1])
    torch.testing.assert_close(whole[0], small[0])


def test_near_ties_come_out_ascending():
    bank = torch.cat([rows(1, 32)] * 20) + 1e-6 * rows(20, 32, seed=1)
    distances, _ = nearest(5 + rows(40, 32, seed=2), bank, 6)
    assert (distances.diff(dim=1) >= 0).all()


def test_double_rows_stay_double_and_half_rows_become_single():
    queries, bank = rows(20, 6, dtype=torch.float64), rows(9, 6, seed=1, dtype=torch.float64)
    distances, _ = nearest(queries, bank, 1)
    assert distances.dtype == torch.float64
    np.testing.assert_allclose(distances[:, 0].numpy(), cdist(queries, bank).min(1), rtol=1e-14)
    half = nearest(queries.half(), bank.half(), 1)[0]
    assert half.dtype == torch.float32
    expected = cdist(queries.half().double(), bank.half().double()).min(1)
    np.testing.assert_allclose(half[:, 0].numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", FAISS])
def test_a_query_with_nan_has_a_distance_of_nan_and_a_valid_slot(backend):
    queries = rows(3, 4)
    queries[1, 2] = torch.nan
    distances, indices = nearest(queries, rows(5, 4, seed=1), 2, backend=backend)
    assert distances.isnan().any(1).tolist() == [False, True, False]
    assert indices.min() >= 0
    assert indices.max() < 5


def test_nearest_carries_no_gradient():
    queries = rows(4, 3).requires_grad_()
    assert not nearest(queries, rows(5, 3, seed=1), 2)[0].requires_grad


def test_no_query_gives_an_empty_answer():
    distances, indices = nearest(rows(0, 4), rows(5, 4), 3)
    assert distances.shape == indices.shape == (0, 3)


def test_a_missing_faiss_matters_only_when_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    queries, bank = rows(4, 3), rows(5, 3, seed=1)
    torch.testing.assert_close(nearest(queries, bank, 1)[0], nearest(queries, bank, 1, backend="torch")[0])
    with pytest.raises(UserError, match="pip install 'lit-fedad.faiss.'"):
        nearest(queries, bank, 1, backend="faiss")


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="'annoy'"):
        nearest(rows(2, 3), rows(4, 3), 1, backend="annoy")
    with pytest.raises(ValueError, match=r"k=5 .* 4 slots"):
        nearest(rows(2, 3), rows(4, 3), 5)
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[4, 2\]"):
        nearest(rows(2, 3), rows(4, 2), 1)
    with pytest.raises(ValueError, match=r"\[2, k\]"):
        neighbour_distances(rows(2, 3), rows(4, 3), torch.zeros(3, 1, dtype=torch.int64))


def test_neighbour_distances_pass_gradcheck():
    queries = rows(7, 5, dtype=torch.float64).requires_grad_()
    bank = rows(6, 5, seed=1, dtype=torch.float64)
    indices = nearest(queries, bank, 3)[1]
    assert torch.autograd.gradcheck(lambda q: neighbour_distances(q, bank, indices), queries)


def test_neighbour_distances_match_plain_autograd():
    plain = rows(1500, 300).requires_grad_()  # more than one cache block
    ours = plain.detach().clone().requires_grad_()
    bank = rows(40, 300, seed=1)
    indices = torch.randint(40, (1500, 4), generator=torch.Generator().manual_seed(2))
    factors = rows(1500, 4, seed=3)
    expected = (plain[:, None] - bank[indices]).norm(dim=2)
    (expected * factors).sum().backward()
    distances = neighbour_distances(ours, bank, indices)
    (distances * factors).sum().backward()
    torch.testing.assert_close(distances, expected)
    torch.testing.assert_close(ours.grad, plain.grad)


def test_neighbour_distances_leave_the_bank_alone_and_have_gradient_zero_at_zero():
    bank = rows(3, 4).requires_grad_()
    queries = bank.detach()[:2].clone().requires_grad_()
    distances = neighbour_distances(queries, bank, torch.tensor([[0, 1], [1, 0]]))
    distances[:, 0].sum().mul(100).backward()
    assert distances[:, 0].tolist() == [0, 0]
    assert bank.grad is None
    assert torch.equal(queries.grad, torch.zeros(2, 4))


def test_the_gradient_keeps_its_digits_very_close_to_a_slot():
    bank = 100 + rows(1, 8)
    queries = (bank + 1e-4 * torch.eye(8)[:1]).requires_grad_()
    neighbour_distances(queries, bank, torch.zeros(1, 1, dtype=torch.int64)).sum().backward()
    torch.testing.assert_close(queries.grad, torch.eye(8)[:1])


def test_half_queries_get_half_gradients():
    queries = rows(5, 4).bfloat16().requires_grad_()
    distances = neighbour_distances(queries, rows(3, 4, seed=1), torch.tensor([[0], [1], [2], [0], [1]]))
    distances.sum().backward()
    assert distances.dtype == torch.float32
    assert queries.grad.dtype == torch.bfloat16
    torch.testing.assert_close(queries.grad.float().norm(dim=1), torch.ones(5), rtol=0.01, atol=0)


def test_squared_distances_match_scipy_and_are_never_negative():
    points, bank = rows(30, 6), rows(10, 6, seed=1)
    found = squared_distances(points, bank, bank.square().sum(1))
    np.testing.assert_allclose(found.numpy(), cdist(points, bank, "sqeuclidean"), rtol=1e-4, atol=1e-5)
    near = 1000 + points
    assert (squared_distances(near, near, near.square().sum(1)) >= 0).all()


def test_chunks_cover_every_row_once_and_hold_the_bound():
    for length, row_bytes, chunk_bytes in [(0, 4, 8), (10, 4, 12), (10, 100, 8), (7, 1, 100)]:
        slices = list(chunks(length, row_bytes, chunk_bytes))
        assert [i for part in slices for i in range(part.start, part.stop)] == list(range(length))
        assert all((part.stop - part.start) * row_bytes <= max(chunk_bytes, row_bytes) for part in slices)
