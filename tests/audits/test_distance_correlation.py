import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from lit_fedad.audits.distance_correlation import density_privacy, distance_correlation_matrix


def r_squared_of(x, y, corrected=False) -> float:
    return distance_correlation_matrix([x, y], corrected)[0, 1].item()


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dependent(n=30, p=3, q=5):
    x = noise(n, p)
    return x, torch.cat([x[:, :2] ** 2, noise(n, q - 2, seed=1)], dim=1)


def v_covariance(x, y):
    """Squared distance covariance as S1 + S2 - 2 S3 (Székely, Rizzo and Bakirov 2007, Theorem 1)."""
    a, b, n = cdist(x, x), cdist(y, y), len(x)
    triples = sum(a[i, j] * b[i, k] for i in range(n) for j in range(n) for k in range(n))
    return (a * b).sum() / n**2 + a.sum() * b.sum() / n**4 - 2 * triples / n**3


def u_covariance(x, y):
    """Its unbiased estimate: means over tuples of distinct indices in place of means over all."""
    a, b, n = cdist(x, x), cdist(y, y), len(x)
    i, j = np.nonzero(~np.eye(n, dtype=bool))
    pairs = (a[i, j] * b[i, j]).mean()
    triples, quadruples = [], []
    for i in range(n):
        for j in set(range(n)) - {i}:
            rest = [k for k in range(n) if k not in (i, j)]
            triples += [a[i, j] * b[i, k] for k in rest]
            quadruples += [a[i, j] * b[k, m] for k in rest for m in rest if m != k]
    return pairs - 2 * np.mean(triples) + np.mean(quadruples)


@pytest.mark.parametrize(
    ("covariance", "corrected", "n"), [(v_covariance, False, 30), (u_covariance, True, 12)]
)
def test_agrees_with_the_sums_over_tuples_of_points(covariance, corrected, n):
    for x, y in (dependent(n), (noise(n, 4), noise(n, 2, seed=3))):
        expected = covariance(x, y) / math.sqrt(covariance(x, x) * covariance(y, y))
        assert r_squared_of(x, y, corrected) == pytest.approx(expected, rel=1e-9)


def test_two_values_give_the_correlation_of_the_two_classes():
    # Between binary variables R is the absolute value of Pearson's correlation.
    x = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0.0]).unsqueeze(1)
    y = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0.0]).unsqueeze(1)
    pearson = np.corrcoef(x[:, 0], y[:, 0])[0, 1]
    assert r_squared_of(x, 1 - y) == pytest.approx(pearson**2)


@pytest.mark.parametrize("corrected", [False, True])
def test_a_sample_and_its_similar_copy_give_one(corrected):
    x = noise(40, 6)
    rotation = torch.linalg.qr(noise(6, 6, seed=2)).Q
    for copy in (x, 3 * x @ rotation - 7):
        assert r_squared_of(x, copy, corrected) == pytest.approx(1)


@pytest.mark.parametrize("corrected", [False, True])
def test_rotation_shift_and_scale_change_nothing(corrected):
    x, y = dependent()
    rotation = torch.linalg.qr(noise(3, 3, seed=2)).Q
    moved = r_squared_of(0.01 * x @ rotation + 1000, 50 * y - 3, corrected)
    assert moved == pytest.approx(r_squared_of(x, y, corrected), rel=1e-6)
    assert r_squared_of(y, x, corrected) == pytest.approx(r_squared_of(x, y, corrected))


def test_independent_samples_of_high_dimension_look_dependent_until_the_bias_is_removed():
    pairs = [(noise(100, 128, seed=s), noise(100, 128, seed=100 + s)) for s in range(20)]
    plain = [math.sqrt(r_squared_of(*pair)) for pair in pairs]
    corrected = [r_squared_of(*pair, corrected=True) for pair in pairs]
    assert min(plain) > 0.9
    assert max(map(abs, corrected)) < 0.06
    assert min(corrected) < 0 < max(corrected)


def test_dependence_without_linear_correlation_is_seen():
    x = torch.linspace(-1, 1, 201).unsqueeze(1)
    assert abs(np.corrcoef(x[:, 0], x[:, 0] ** 2)[0, 1]) < 1e-6
    assert r_squared_of(x, x**2, corrected=True) > 0.4**2


@pytest.mark.parametrize("corrected", [False, True])
def test_a_sample_without_spread_gives_zero(corrected):
    constant = torch.full((10, 3), 0.1)
    assert r_squared_of(noise(10, 2), constant, corrected) == 0
    assert r_squared_of(constant, constant, corrected) == 0


def test_points_all_equally_far_apart_have_no_corrected_spread():
    corners = torch.eye(10) / 3
    assert r_squared_of(corners, noise(10, 2), corrected=True) == 0
    assert r_squared_of(corners, noise(10, 2)) > 0


def test_the_matrix_holds_every_pair():
    samples = [noise(20, p, seed=p) for p in (1, 4, 9)]
    for corrected in (False, True):
        matrix = distance_correlation_matrix(samples, corrected)
        expected = [[r_squared_of(a, b, corrected) for b in samples] for a in samples]
        torch.testing.assert_close(matrix, torch.tensor(expected, dtype=torch.float64))


def privacy(means, covariances, raw, seed=0):
    return density_privacy(means, covariances, raw, torch.Generator().manual_seed(seed))


def test_of_one_density_nothing_but_noise_is_seen():
    root = noise(16, 16)
    names, r_squared, r, corrected = privacy(
        noise(1, 16), (root @ root.T)[None], [noise(120, 3, 4, 4, seed=5)]
    )
    assert names == ("raw data", "shared densities", "Gaussian 1", "Gaussian 2", "uniform")
    off = ~torch.eye(5, dtype=torch.bool)
    assert r[off].min() > 0.3
    assert corrected[off].abs().max() < 0.05
    torch.testing.assert_close(r**2, r_squared)
    for matrix in (r_squared, r, corrected):
        torch.testing.assert_close(matrix, matrix.T)
        torch.testing.assert_close(matrix.diagonal(), torch.ones(5, dtype=torch.float64))


def test_densities_that_differ_as_their_clients_do_are_seen():
    means = torch.tensor([[0.0] * 4, [9.0] * 4])
    raw = [noise(30, 12, seed=1), 9 + noise(50, 12, seed=2)]
    corrected = privacy(means, torch.eye(4).expand(2, 4, 4), raw).corrected
    assert corrected[0, 1] > 0.8
    assert corrected[0, 2:].abs().max() < 0.1


def test_samples_follow_the_density_of_their_raw_data():
    # Without variance every sample is its mean, so R^2 is that of the means themselves.
    means, raw = noise(3, 2), [noise(n, 5, seed=n) for n in (4, 7, 9)]
    shared = means.repeat_interleave(torch.tensor([4, 7, 9]), dim=0)
    result = privacy(means, torch.zeros(3, 2, 2), raw)
    assert result.r_squared[0, 1].item() == pytest.approx(r_squared_of(torch.cat(raw), shared))


def test_samples_of_a_singular_covariance_lie_on_its_line():
    covariance = torch.tensor([[4.0, 2.0], [2.0, 1.0]])
    n = 400
    result = privacy(torch.zeros(1, 2), covariance[None], [noise(n, 1)], seed=3)
    white = torch.randn(n, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # Of rank 1, so the samples are one coordinate of the white noise, stretched along one direction.
    line = r_squared_of(noise(n, 1), white[:, 1:])
    assert result.r_squared[0, 1].item() == pytest.approx(line, rel=1e-4)


def test_the_generator_alone_decides():
    arguments = (noise(2, 3), torch.eye(3).expand(2, 3, 3), [noise(6, 4), noise(6, 4, seed=1)])
    first, again, other = privacy(*arguments), privacy(*arguments), privacy(*arguments, seed=1)
    torch.testing.assert_close(first.r, again.r, rtol=0, atol=0)
    assert not torch.equal(first.r, other.r)
