"""Gaussian densities: how many are found in what, and how they score."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.draws import generator, normals
from helpers.refusals import refusal
from torch import nn

from lit_fedad.core.errors import UserError
from lit_fedad.memory import density
from lit_fedad.memory.density import DensitySet, estimate_densities
from lit_fedad.memory.kmeans import kmeans


def random_covariances(count: int, width: int, seed: int = 0) -> torch.Tensor:
    root = normals(count, width, width, seed=seed)
    return root @ root.mT / width + 0.05 * torch.eye(width)


def mahalanobis(features, mean, covariance) -> np.ndarray:
    """Brute force, in double precision [n, M]."""
    differences = features.double().numpy()[:, None] - mean.double().numpy()
    inverse = np.linalg.inv(covariance.double().numpy())
    return np.einsum("nmi,mij,nmj->nm", differences, inverse, differences)


@pytest.fixture
def filled() -> DensitySet:
    densities = DensitySet(4)
    densities.set(normals(3, 4), random_covariances(3, 4))
    return densities


@pytest.mark.parametrize("rho", [0.0, 0.25, 1.0])
def test_separated_clusters_get_a_density_each(rho):
    parts = [normals(10 + 5 * k, 3, seed=k) + 100 * k for k in range(3)]
    found = estimate_densities(torch.cat(parts), 3, rho, generator())
    for mean, covariance, count in zip(found.mean, found.covariance, found.count, strict=True):
        part = parts[round(float(mean.mean() / 100))].double()
        sample = np.cov(part.numpy(), rowvar=False, bias=True)
        expected = (1 - rho) * sample + rho * np.trace(sample) / 3 * np.eye(3)
        assert count == len(part)
        np.testing.assert_allclose(mean.numpy(), part.mean(0).numpy(), rtol=1e-6)
        # Features near 200 hold five digits of a deviation.
        np.testing.assert_allclose(covariance.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert sorted(found.count.tolist()) == [10, 15, 20]
    assert found.mean.dtype == found.covariance.dtype == torch.float32


def test_clustering_stops_after_five_steps(monkeypatch):
    taken = []

    def spy(*arguments, **options):
        taken.append(kmeans(*arguments, **options))
        return taken[-1]

    monkeypatch.setattr(density, "kmeans", spy)
    features = normals(400, 4)
    found = estimate_densities(features, 8, 0.1, generator())
    assert taken[0].steps == 5
    assert kmeans(features.double(), 8, generator=generator(), max_steps=100, tolerance=0).steps > 5
    assert len(found.mean) == 8


def test_a_lone_feature_joins_the_nearest_cluster_that_has_more():
    near, far = 0.1 * normals(6, 2), 0.1 * normals(6, 2, seed=1) + 50
    features = torch.cat([near, far, torch.tensor([[90.0, 90.0]]), torch.tensor([[160.0, 160.0]])])
    assert kmeans(features, 4, generator=generator()).counts.sort()[0].tolist() == [1, 1, 6, 6]
    found = estimate_densities(features, 4, 0.0, generator())
    order = found.count.argsort()
    # The nearest cluster of the last feature is a lone one, and does not count.
    assert found.count[order].tolist() == [6, 8]
    np.testing.assert_allclose(found.mean[order[0]].numpy(), near.mean(0).numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.mean[order[1]].numpy(), features[6:].mean(0).numpy(), rtol=1e-5)
    of_two = torch.tensor([[0.0], [0.1], [0.2], [50.0], [50.1], [90.0]])
    assert kmeans(of_two, 3, generator=generator()).counts.sort()[0].tolist() == [1, 2, 3]
    assert estimate_densities(of_two, 3, 0.0, generator()).mean.max() > 60


@pytest.mark.parametrize(("size", "most"), [(2, 1), (3, 1), (5, 2), (9, 4)])
def test_fewer_features_than_clusters(size, most):
    found = estimate_densities(normals(size, 3), 10, 0.1, generator())
    assert 1 <= len(found.count) <= most
    assert found.count.min() >= 2
    assert found.count.sum() == size
    assert found.covariance.isfinite().all()


def test_there_may_be_a_cluster_for_every_two_features():
    pairs = torch.tensor([[0.0, 0.0], [0.0, 1.0], [90.0, 0.0], [90.0, 1.0]])
    assert estimate_densities(pairs, 10, 0.1, generator()).count.tolist() == [2, 2]


@pytest.mark.parametrize("size", [0, 1])
def test_less_than_two_features_have_no_density(size):
    found = estimate_densities(normals(size, 3), 2, 0.1, generator())
    assert (found.mean.shape, found.covariance.shape, found.count.shape) == ((0, 3), (0, 3, 3), (0,))


def test_two_equal_images_can_be_scored_by():
    """Or else a client that holds them could not take part."""
    image = normals(1, 3)
    found = estimate_densities(image.repeat(2, 1), 1, 0.1, generator())
    densities = DensitySet(3)
    densities.set(found.mean, found.covariance)
    scores = densities(torch.cat([image, normals(4, 3, seed=1)]))
    assert scores.isfinite().all()
    assert scores.argmin() == 0


def test_features_that_have_collapsed_have_a_variance_as_large_as_their_rounding():
    """1e-10 of their mean square, of which shrinkage keeps a tenth."""
    found = estimate_densities(torch.tensor([[3000.0, 1000.0]] * 3), 1, 0.1, generator())
    torch.testing.assert_close(found.covariance[0], 0.1 * 1e-10 * 5e6 * torch.eye(2))


def test_shrinkage_makes_few_features_in_many_dimensions_scorable():
    features = nn.functional.normalize(normals(20, 32), dim=1)
    found = estimate_densities(features, 1, 0.1, generator())
    assert torch.linalg.eigvalsh(found.covariance[0]).min() > 0
    densities = DensitySet(32)
    densities.set(found.mean, found.covariance)
    expected = mahalanobis(features, found.mean, found.covariance)[:, 0]
    np.testing.assert_allclose(densities(features).numpy(), expected, rtol=1e-4)


def test_scores_are_squared_mahalanobis_distances_to_the_nearest(filled):
    features = 2 * normals(50, 4, seed=5)
    distances = mahalanobis(features, filled.mean, filled.covariance)
    assert len(set(distances.argmin(1))) == 3
    np.testing.assert_allclose(filled(features).numpy(), distances.min(1), rtol=1e-4)
    np.testing.assert_allclose(filled(filled.mean).numpy(), 0, atol=1e-6)


def test_a_narrow_density_far_from_the_origin_keeps_its_digits():
    densities = DensitySet(8)
    mean = nn.functional.normalize(normals(1, 8), dim=1)
    densities.set(mean, 1e-4 * random_covariances(1, 8))
    features = mean + 1e-2 * normals(20, 8, seed=1)
    expected = mahalanobis(features, densities.mean, densities.covariance)[:, 0]
    np.testing.assert_allclose(densities(features).numpy(), expected, rtol=1e-3)


def test_mixed_precision_around_it_changes_nothing(filled):
    features = normals(20, 4, seed=5)
    expected = filled(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(filled(features), expected)


def test_scores_follow_what_is_set(filled):
    features = normals(9, 4, seed=5)
    filled(features)
    mean, covariance = normals(5, 4, seed=7), random_covariances(5, 4, seed=8)
    filled.set(mean, covariance)
    assert len(filled) == 5
    expected = mahalanobis(features, mean, covariance).min(1)
    np.testing.assert_allclose(filled(features).numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_state_of_any_size_loads_and_is_scored_by(filled, count):
    features, other = normals(9, 4, seed=5), DensitySet(4)
    other.set(normals(count, 4, seed=7), random_covariances(count, 4, seed=8))
    filled(features)
    holder = nn.ModuleDict({"densities": filled})
    holder.load_state_dict({f"densities.{name}": entry for name, entry in other.state_dict().items()})
    assert len(filled) == count
    assert torch.equal(filled(features), other(features))
    # What was loaded is a copy.
    other.mean.zero_()
    expected = mahalanobis(features, filled.mean, filled.covariance).min(1)
    np.testing.assert_allclose(filled(features).numpy(), expected, rtol=1e-4)


def test_an_empty_state_loads(filled):
    filled.load_state_dict(DensitySet(4).state_dict())
    assert len(filled) == 0
    with pytest.raises(UserError, match="no densities to score by"):
        filled(normals(2, 4))


def test_a_state_without_densities_leaves_them_alone(filled):
    before = filled(normals(5, 4))
    nn.ModuleDict({"densities": filled}).load_state_dict({}, strict=False)
    assert torch.equal(filled(normals(5, 4)), before)


def test_covariances_are_inverted_once_however_often_they_come(filled, monkeypatch):
    inverted, invert = [], torch.linalg.cholesky_ex
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda given: inverted.append(len(given)) or invert(given)
    )
    features, state = normals(5, 4), {name: entry.clone() for name, entry in filled.state_dict().items()}
    before = filled(features)
    filled.load_state_dict(state)
    filled.set(state["mean"], state["covariance"].clone())
    assert torch.equal(filled(features), before)
    filled.set(state["mean"] + 1, state["covariance"])  # means alone
    assert not torch.equal(filled(features), before)
    assert inverted == [3]
    filled.set(state["mean"], 4 * state["covariance"])
    torch.testing.assert_close(filled(features), before / 4)
    assert inverted == [3, 3]


def test_a_copy_has_densities_of_its_own(filled):
    features = normals(5, 4)
    before, copied = filled(features), copy.deepcopy(filled)
    copied.set(normals(1, 4, seed=9), random_covariances(1, 4, seed=9))
    assert not torch.equal(copied(features), before)
    assert torch.equal(filled(features), before)


@pytest.mark.parametrize(
    ("number", "break_it"),
    [
        (1, partial(torch.diag, torch.tensor([1.0, 1.0, 1.0, -1.0]))),
        (2, partial(torch.zeros, 4, 4)),
        (2, partial(torch.full, (4, 4), torch.nan)),
    ],
)
def test_a_density_that_is_not_positive_definite_is_named(filled, number, break_it):
    covariance = filled.covariance.clone()
    covariance[number] = break_it()
    filled.set(filled.mean, covariance)
    with refusal(f"density {number} is not positive definite: raise task.shrinkage"):
        filled(normals(2, 4))
