"""The subspace of normal vectors against scikit-learn's principal component analysis."""

import math

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from lit_fedad.contracts.task import channel_scale
from lit_fedad.core.errors import UserError
from lit_fedad.memory.moments import Moments, symmetric
from lit_fedad.memory.subspace import (
    check_share,
    fit_subspace,
    fit_subspaces,
    folds_of,
    least_residuals,
    likeliest_basis,
    log_likelihoods,
    residual_basis,
    residual_norms,
    statistics_of,
    typical_norm,
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


def test_the_share_is_of_the_variance_along_all_directions():
    """Of 4 + 3 + 3 the first direction has 0.4."""
    held = Moments(9, torch.zeros(3), torch.tensor([4.0, 3.0, 3.0]).double().diag())
    assert [residual_basis(held, share).shape[1] for share in (0.4, 0.5, 0.8)] == [2, 1, 1]


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


def test_the_unit_of_features_changes_all_likelihoods_alike(rows):
    fitted, scored, unit = moments(rows), moments(draw(300, 1)), torch.full((8,), 1e4)
    found = log_likelihoods(fitted.scaled(unit), scored.scaled(unit)) - log_likelihoods(fitted, scored)
    torch.testing.assert_close(found, torch.full((7,), 8 * math.log(1e4)).double())


def test_the_likeliest_dimensions_are_those_that_the_vectors_have():
    basis = likeliest_basis([moments(draw(500, 1)), moments(draw(500, 2))])
    assert basis.shape == (8, 5)


def test_a_fit_divides_channels_by_their_scale(rows):
    scale = channel_scale(rows.var(0, correction=0), 1.0)
    centre, basis = fit_subspace([moments(rows)], 0.99, shrinkage=1.0)
    new = draw(50, 1, noise=0.5)
    expected = residual_norms((new - rows.mean(0)) / scale, residual_basis(moments(rows / scale), 0.99))
    torch.testing.assert_close(residual_norms(new - centre, basis), expected, rtol=1e-3, atol=1e-4)


def test_residuals_get_the_length_that_is_asked_for(rows):
    other = 3 * draw(150, 4, noise=0.2) + 1
    centres, bases = fit_subspaces([moments(rows), moments(other)], 0.9, 1.0, torch.tensor(7.0))
    residuals = [residual_norms(x - c, b) for x, c, b in zip((rows, other), centres, bases, strict=True)]
    assert float(torch.cat(residuals).square().mean().sqrt()) == pytest.approx(7.0, rel=1e-3)


def test_images_left_out_of_one_product_leave_the_fits_of_all_others(rows, monkeypatch):
    """The decomposition is what leaving images out costs: only that of a product that they show is done again."""
    own, others = moments(rows), [moments(draw(150, seed)) for seed in range(4, 24)]
    fit_subspaces([own, *others], 0.9, 1.0)
    decomposed, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: decomposed.append(matrix) or eigh(matrix))
    remaining = [own.without(moments(rows[:40])), *(other.without(Moments.none(8)) for other in others)]
    centres, bases = fit_subspaces(remaining, 0.9, 1.0)
    assert len(decomposed) == 1
    for place, kept in enumerate((rows[40:], draw(150, 4))):
        centre, basis = fit_subspace([moments(kept)], 0.9, 1.0)
        torch.testing.assert_close(centres[place], centre, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(bases[place] @ bases[place].T, basis @ basis.T, rtol=1e-2, atol=1e-3)


def test_without_a_scale_the_basis_is_that_of_the_features(rows):
    _, basis = fit_subspace([moments(rows)], 0.99, shrinkage=None)
    expected = residual_basis(moments(rows), 0.99)
    # The basis is defined up to rotations: what it projects to is not.
    torch.testing.assert_close(basis @ basis.T, expected @ expected.T, rtol=1e-3, atol=1e-4)


def test_whitened_features_have_equal_variance_up_to_the_ridge(rows):
    found = statistics_of(moments(rows), standardise=True, shrinkage=0.0, whiten=1e-6)
    white = ((rows - found["mean"]) / found["scale"]) @ symmetric(found["whitening"], 8)
    np.testing.assert_allclose(np.cov(white.double().numpy().T, bias=True), np.eye(8), atol=2e-2)


@pytest.mark.parametrize(
    ("standardise", "scale", "whitened"), [(True, [3.0, 1.0], [1.5, 1.5]), (False, [1.0, 1.0], [11.5, 3.5])]
)
def test_half_of_the_mean_variance_is_added_to_that_of_features_as_they_are_scaled(
    standardise, scale, whitened
):
    held = Moments(9, torch.ones(2), torch.tensor([9.0, 1.0]).double().diag())
    found = statistics_of(held, standardise, shrinkage=0.0, whiten=0.5)
    torch.testing.assert_close(found["scale"], torch.tensor(scale), rtol=1e-4, atol=0)
    expected = torch.tensor(whitened).rsqrt().diag()
    torch.testing.assert_close(symmetric(found["whitening"], 2), expected, rtol=1e-4, atol=1e-6)
    assert statistics_of(held, standardise, 0.0, None)["scale"].equal(found["scale"])


@pytest.mark.parametrize("shrinkage", [None, 1.0])
def test_few_patches_that_leave_no_residual_still_have_a_measure(shrinkage):
    patches = 30 * torch.eye(4, 8)  # of equal variance in three directions, and of none in others
    _, directions = fit_subspaces([moments(patches)], 0.99, shrinkage, length=torch.tensor(1.0))
    assert 0 < directions.abs().max() * patches.var(0, correction=0).sum().sqrt() < 1e4


def test_patches_that_are_all_alike_have_no_measure():
    with pytest.raises(UserError, match="all alike"):
        fit_subspaces([moments(torch.ones(1, 8))], 0.99, 1.0, length=torch.tensor(1.0))


@pytest.mark.parametrize("standardise", [True, False])
def test_features_that_are_all_alike_can_be_whitened(standardise):
    found = statistics_of(moments(torch.ones(3, 8)), standardise, shrinkage=1.0, whiten=0.1)
    assert all(entry.isfinite().all() for entry in found.values())


@pytest.mark.parametrize("whiten", [None, 0.1])
def test_the_typical_norm_is_that_of_the_features(rows, whiten):
    found = statistics_of(moments(rows), standardise=True, shrinkage=1.0, whiten=whiten)
    features = (rows - found["mean"]) / found["scale"]
    if whiten is not None:
        features = features @ symmetric(found["whitening"], 8)
    expected = features.square().sum(1).mean().sqrt()
    torch.testing.assert_close(typical_norm(moments(rows), found), expected, rtol=1e-4, atol=0)
    plain = (rows - rows.mean(0)).square().sum(1).mean().sqrt()
    torch.testing.assert_close(typical_norm(moments(rows), {}), plain, rtol=1e-4, atol=0)


@pytest.mark.parametrize("share", [0, -1, 1.5, "most"])
def test_other_shares_are_refused(share):
    with pytest.raises(UserError, match="task.share"):
        check_share(share=share)


def test_only_the_likelihood_needs_two_sets_of_images():
    check_share(share="likelihood", other=None)
    assert (folds_of("likelihood"), folds_of(0.9), folds_of(None)) == (2, 1, 1)


def test_an_image_is_seen_by_the_subspace_with_the_least_squares_outside():
    """Outside the first lie 0 and 3, outside the second 2 and 2: more in sum, and less in squares."""
    patches = torch.tensor([[[0.0, 2.0], [3.0, 2.0]], [[0.0, 5.0], [1.0, 5.0]]])
    outside = torch.eye(2)[:, :, None]
    residuals, seen_by = least_residuals(patches, torch.zeros(2, 2), outside)
    assert seen_by.tolist() == [1, 0]
    assert residuals.tolist() == [[2.0, 2.0], [0.0, 1.0]]
