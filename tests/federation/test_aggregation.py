"""Pooling against the pooled data itself."""

import torch

from lit_fedad.federation.aggregation import pool_moments, pool_quantile


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
