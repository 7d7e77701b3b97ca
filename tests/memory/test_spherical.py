"""Spherical k-means against an independent loop."""

import functools

import numpy as np
import pytest
import torch

from lit_fedad.memory.kmeans import kmeans

spherical_kmeans = functools.partial(kmeans, tolerance=0, spherical=True)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(count: int = 60, width: int = 4) -> torch.Tensor:
    return torch.randn(count, width, generator=draw(5)) + torch.eye(width)[torch.arange(count) % width] * 4


def test_centres_are_normalised_sums_of_the_rows_nearest_in_angle():
    points = rows()
    found = spherical_kmeans(points, 4, generator=draw(), max_steps=30)
    unit = (points / points.norm(dim=1, keepdim=True)).double().numpy()
    centres = found.centroids.double().numpy()
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 1, rtol=1e-6)
    owner = (unit @ centres.T).argmax(1)
    np.testing.assert_array_equal(owner, found.assignment.numpy())
    for cluster in range(4):
        total = unit[owner == cluster].sum(0)
        np.testing.assert_allclose(centres[cluster], total / np.linalg.norm(total), atol=1e-5)
    assert found.counts.tolist() == np.bincount(owner, minlength=4).tolist()


def test_length_does_not_matter_and_weights_are_repetitions():
    points = rows()
    scale = torch.rand(len(points), 1, generator=draw(1)) + 0.5
    one = spherical_kmeans(points, 4, generator=draw(), max_steps=30)
    other = spherical_kmeans(scale * points, 4, generator=draw(), max_steps=30)
    torch.testing.assert_close(one.centroids, other.centroids, rtol=1e-4, atol=1e-5)
    weights = torch.tensor([3.0, 1.0, 1.0])
    three = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    found = spherical_kmeans(three[:2], 1, generator=draw(), weights=weights[:2])
    np.testing.assert_allclose(found.centroids[0].numpy(), np.array([3, 1]) / 10**0.5, rtol=1e-6)


@pytest.mark.parametrize("weights", [None, torch.tensor([2.0, 0.0])])
def test_fewer_rows_than_centres_come_back_themselves(weights):
    points = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    found = spherical_kmeans(points, 5, generator=draw(), weights=weights)
    assert found.centroids.shape == (5, 2)
    assert found.counts.sum().item() == 2
    torch.testing.assert_close(found.centroids[0], torch.tensor([0.6, 0.8]))
