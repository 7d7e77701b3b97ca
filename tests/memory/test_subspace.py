"""The subspace of normal vectors against scikit-learn's principal component analysis."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from lit_fedad.errors import UserError
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.subspace import (
    check_share,
    fit_subspace,
    folds_of,
    likeliest_basis,
    log_likelihoods,
    residual_basis,
    residual_norms,
)


def draw(rows, seed, noise=0.1, inner=3, channels=8):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inner, channels, generator=torch.Generator().manual_seed(99)) * 2
    inside = torch.randn(rows, inner, generator=generator) @ mix
    return inside + noise * torch.randn(rows, channels, generator=generator) + 1


@pytest.fixture
def rows():
    return draw(2000, 0)


def moments(rows):
    return Moments.of([rows], rows.shape[1])


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9, 0.99])
def test_residuals_are_those_of_scikit_learn(rows, share):
    fitted = PCA(n_components=share, svd_solver="full").fit(rows.double().numpy())
    new = draw(50, 1, noise=0.5)
    expected = np.linalg.norm(
        new.double().numpy() - fitted.inverse_transform(fitted.transform(new.double().numpy())), axis=1
    )
    basis = residual_basis(moments(rows), share)
    assert basis.shape == (8, 8 - fitted.n_components_)
    np.testing.assert_allclose(residual_norms(new - rows.mean(0), basis), expected, rtol=1e-3)


def test_all_variance_leaves_one_direction(rows):
    assert residual_basis(moments(rows), 1.0).shape == (8, 1)


def test_likelihoods_are_those_of_probabilistic_pca(rows):
    new = draw(300, 1)
    found = log_likelihoods(moments(rows), moments(new))
    expected = [
        PCA(n_components=k, svd_solver="full").fit(rows.double().numpy()).score(new.double().numpy())
        for k in range(1, 8)
    ]
    # scikit-learn divides by n - 1.
    np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_the_likeliest_dimensions_are_those_that_the_vectors_have():
    basis = likeliest_basis([moments(draw(500, 1)), moments(draw(500, 2))])
    assert basis.shape == (8, 5)


def test_a_fit_is_made_in_standardised_features(rows):
    mean, scale = torch.arange(8.0), torch.linspace(0.5, 2, 8)
    centre, basis = fit_subspace([moments(rows)], 0.99, mean, scale)
    scaled = (rows - mean) / scale
    torch.testing.assert_close(centre, scaled.mean(0), rtol=1e-4, atol=1e-5)
    expected = residual_basis(moments(scaled), 0.99)
    # The basis is defined up to rotations: what it projects to is not.
    torch.testing.assert_close(basis @ basis.T, expected @ expected.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("share", [0, -1, 1.5, "most"])
def test_other_shares_are_refused(share):
    with pytest.raises(UserError, match="task.share"):
        check_share("task", share=share)


def test_only_the_likelihood_needs_two_sets_of_images():
    check_share("task", share="likelihood", other=None)
    assert (folds_of("likelihood"), folds_of(0.9), folds_of(None)) == (2, 1, 1)
