"""Means by hand, and pooling against the pooled data itself."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Update, spec_of
from lit_fedad.federation.aggregation import mean_scalars, pool_moments, pool_quantile, weighted_mean


def updates_of(sizes, seed: int = 0) -> dict[int, Update]:
    """Clients of these sizes with random weights, and as many batches counted as their number."""
    draw = torch.Generator().manual_seed(seed)
    return {
        client: Update({"w": torch.randn(5, 3, generator=draw), "batches": torch.tensor(client)}, size)
        for client, size in enumerate(sizes)
    }


@pytest.mark.parametrize("equal", [False, True])
def test_mean_by_hand(equal):
    sizes = np.array([3, 17, 200, 36])
    updates = updates_of(sizes.tolist())
    weights = np.stack([update.message["w"].double().numpy() for update in updates.values()])
    expected = np.average(weights, axis=0, weights=None if equal else sizes)
    # The shares are dyadic: double precision sums without rounding, and float32 is rounded once.
    np.testing.assert_array_equal(weighted_mean(updates, equal)["w"].numpy(), expected.astype(np.float32))


def test_golden_mean():
    updates = {
        4: Update({"w": torch.tensor([1.0, -2.0])}, 1),
        7: Update({"w": torch.tensor([3.0, 6.0])}, 3),
    }
    assert weighted_mean(updates)["w"].tolist() == [2.5, 4.0]
    assert weighted_mean(updates, equal=True)["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("sizes", [(1,), (3, 7, 13), (1, 1, 1), tuple(range(1, 50))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_messages_come_back_as_they_are(sizes, dtype):
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    merged = weighted_mean({c: Update({"w": weights}, size) for c, size in enumerate(sizes)})["w"]
    assert merged.dtype == dtype
    assert torch.equal(merged, weights)


def test_order_does_not_matter():
    """Bit for bit where shares are dyadic; others may round to either side of a tie."""
    updates = updates_of([3, 17, 200, 36])
    forward, backward = weighted_mean(updates), weighted_mean(dict(reversed(updates.items())))
    assert all(torch.equal(forward[name], backward[name]) for name in forward)


@pytest.mark.parametrize("sizes", [(0, 3, 17), (3, 0, 17), (3, 17, 0)])
def test_a_client_without_weight_has_no_effect(sizes):
    updates = updates_of(sizes)
    with_empty = weighted_mean(updates)
    without = weighted_mean({c: update for c, update in updates.items() if update.num_samples})
    assert all(torch.equal(with_empty[name], without[name]) for name in without)


@pytest.mark.parametrize("equal", [False, True])
def test_whole_numbers_are_the_largest_clients(equal):
    merged = weighted_mean(updates_of([3, 17, 200, 36]), equal)["batches"]
    assert (merged.item(), merged.dtype) == (2, torch.int64)


def test_a_count_at_its_bound_leaves_clients_room_to_count_on():
    """Or else what honest clients send in the next round is out of bounds."""
    updates = {0: Update({"batches": torch.tensor(3)}, 1), 1: Update({"batches": torch.tensor(10**9)}, 2)}
    declared = spec_of(updates[0].message)["batches"]
    assert weighted_mean(updates)["batches"] + 10**8 < declared.high


def test_the_mean_shares_no_memory_with_messages():
    updates = updates_of([5])
    for entry in weighted_mean(updates).values():
        entry.zero_()
    assert updates[0].message["w"].all()


def test_whole_numbers_share_no_memory_with_messages():
    updates = {0: Update({"batches": torch.tensor(3)}, 1)}
    weighted_mean(updates)["batches"].zero_()
    assert updates[0].message["batches"].item() == 3


def test_pooled_moments_are_those_of_the_union():
    draw = torch.Generator().manual_seed(0)
    sets = [torch.randn(n, 4, generator=draw) * n + n for n in (3, 17, 200)]
    mean, variance = pool_moments(
        torch.tensor([float(len(s)) for s in sets]),
        torch.stack([s.mean(0) for s in sets]),
        torch.stack([s.var(0, correction=0) for s in sets]),
    )
    union = torch.cat(sets)
    torch.testing.assert_close(mean, union.mean(0))
    torch.testing.assert_close(variance, union.var(0, correction=0))


def test_pooled_quantile_is_that_of_the_union_up_to_the_spacing():
    draw = torch.Generator().manual_seed(0)
    sets = [torch.rand(n, generator=draw) * scale for n, scale in ((5000, 1.0), (500, 10.0), (20_000, 2.0))]
    sketches = [torch.quantile(s, torch.linspace(0, 1, 257)) for s in sets]
    for level in (0.1, 0.5, 0.9):
        exact = float(torch.quantile(torch.cat(sets), level))
        assert abs(pool_quantile(sketches, [len(s) for s in sets], level) - exact) < 0.02 * exact + 0.005


def test_one_set_is_its_own_pool():
    sketch = torch.arange(11.0)
    assert pool_quantile([sketch], [1000], 0.5) == 5.0


def test_entries_after_a_count_are_averaged_too():
    sent = {
        client: {"steps": torch.tensor(5), "w": torch.tensor([value])}
        for client, value in ((0, 1.0), (1, 3.0))
    }
    merged = weighted_mean({client: Update(message, 1) for client, message in sent.items()})
    assert {name: entry.tolist() for name, entry in merged.items()} == {"steps": 5, "w": [2.0]}


def test_a_scalar_that_one_client_reports_is_the_mean_over_that_client():
    scalars = {0: {"loss": 1.0}, 1: {"loss": 3.0, "norm": 7.0}}
    assert mean_scalars(scalars, {0: 1, 1: 3}) == {"loss": 2.5, "norm": 7.0}


def test_a_sketch_of_more_quantiles_stands_for_no_more_values():
    few, many = torch.tensor([0.0]), torch.tensor([1.0, 1.0, 1.0])
    assert pool_quantile([few, many], [1, 1], 0.5) == 0
