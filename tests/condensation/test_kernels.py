"""Kernels and discrepancies against SciPy's distances and loops over pairs."""

from itertools import product

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist, pdist

from lit_fedad.condensation.kernels import class_mmd, kernel_matrix, mean_squared_distance, mmd

KERNELS = ("linear", "polynomial", "gaussian", "laplace")


def reference_kernel(x, y, kernel, bandwidth):
    if kernel == "linear":
        return np.inner(x, y)
    if kernel == "polynomial":
        return (np.inner(x, y) + 1) ** 2
    squared = cdist(x, y, "sqeuclidean")
    if kernel == "laplace":
        return np.exp(-0.1 * squared) + np.exp(-squared) + np.exp(-5 * squared)
    return sum(np.exp(-squared / (bandwidth * factor)) for factor in (0.25, 0.5, 1, 2, 4))


def reference_mmd(real, synthetic, kernel):
    """The mean over all pairs, one by one."""
    bandwidth = pdist(np.concatenate([real, synthetic]), "sqeuclidean").mean()

    def mean(a, b):
        values = [reference_kernel(p[None], q[None], kernel, bandwidth).item() for p, q in product(a, b)]
        return sum(values) / len(values)

    return mean(real, real) + mean(synthetic, synthetic) - 2 * mean(real, synthetic)


def features(count, dimensions=4, seed=0, shift=0.0):
    return torch.randn(count, dimensions, generator=torch.Generator().manual_seed(seed)) * 0.7 + shift


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_values_are_those_of_the_formulas(kernel):
    x, y = features(5), features(3, seed=1)
    expected = reference_kernel(x.double().numpy(), y.double().numpy(), kernel, 2.5)
    np.testing.assert_allclose(kernel_matrix(x, y, kernel, 2.5), expected, rtol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_mmd_is_the_mean_over_all_pairs(kernel):
    real, synthetic = features(7), features(4, seed=1, shift=0.5)
    expected = reference_mmd(real.double().numpy(), synthetic.double().numpy(), kernel)
    assert expected > 0.01
    assert mmd(real, synthetic, kernel).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_set_is_at_no_distance_from_itself(kernel):
    x = features(6, dimensions=100, shift=3)
    assert mmd(x, x[torch.randperm(6)], kernel).item() == pytest.approx(0, abs=1e-8)  # of values of some 1e6


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_sum_over_classes_keeps_them_apart(kernel):
    real, synthetic = features(3 * 5), features(2 + 1 + 4, seed=1)
    expected = sum(
        reference_mmd(a.double().numpy(), b.double().numpy(), kernel)
        for a, b in zip(real.split(5), synthetic.split([2, 1, 4]), strict=True)
    )
    assert class_mmd(real, synthetic, torch.ones(15), [5, 5, 5], [2, 1, 4], kernel).item() == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_agree_with_finite_differences(kernel):
    real = features(2 * 3).double()
    synthetic = features(4, seed=1).double().requires_grad_()
    if kernel == "gaussian":  # whose bandwidth moves with the features, but not in the gradient

        def loss(x):
            return kernel_matrix(x, x, kernel, 2.0).mean() - 2 * kernel_matrix(real, x, kernel, 2.0).mean()
    else:

        def loss(x):
            return class_mmd(real, x, torch.ones(6), [3, 3], [1, 3], kernel)

    assert torch.autograd.gradcheck(loss, synthetic)


def test_the_gaussian_gradient_takes_the_bandwidth_for_a_constant():
    real, synthetic = features(6), features(4, seed=1).requires_grad_()
    bandwidth = mean_squared_distance(
        torch.cat([real, synthetic]), torch.ones(len(real) + len(synthetic), dtype=torch.float64)
    )
    (actual,) = torch.autograd.grad(mmd(real, synthetic, "gaussian"), synthetic)
    within = kernel_matrix(synthetic, synthetic, "gaussian", bandwidth).mean()
    between = kernel_matrix(real, synthetic, "gaussian", bandwidth).mean()
    (expected,) = torch.autograd.grad(within - 2 * between, synthetic)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("kernel", "step", "bandwidth"), [("gaussian", 2.0**-16, 1e-9), ("laplace", 0.5, 1)])
def test_points_far_out_and_almost_equal_are_told_apart(kernel, step, bandwidth):
    """Their squared norms, 10^8, leave no digits to squared distances of 10^-10, even in double precision."""
    x = torch.full((3, 10_000), 100.0)
    x[:, 0] = step * torch.arange(3)
    expected = reference_kernel(x.double().numpy(), x.double().numpy(), kernel, bandwidth)
    assert expected.min() < 0.9 * expected.max()
    np.testing.assert_allclose(kernel_matrix(x, x, kernel, bandwidth), expected, rtol=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_at_distance_zero_the_gradient_is_zero(kernel):
    point = features(1)
    synthetic = point.repeat(3, 1).requires_grad_()
    loss = mmd(point.repeat(2, 1), synthetic, kernel)
    (gradient,) = torch.autograd.grad(loss, synthetic)
    assert loss.item() == 0
    assert gradient.tolist() == torch.zeros(3, 4).tolist()


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_costs_no_precision(kernel):
    real, synthetic = features(8, shift=2), features(6, seed=1, shift=2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = class_mmd(real, synthetic, torch.ones(8), [4, 4], [3, 3], kernel)
    assert inside.item() == pytest.approx(
        class_mmd(real, synthetic, torch.ones(8), [4, 4], [3, 3], kernel).item(), rel=1e-12
    )


@pytest.mark.parametrize("kernel", ["linear", "polynomial", "gaussian", "laplace"])
def test_what_was_drawn_twice_counts_twice(kernel):
    real, synthetic = torch.randn(9, 3, generator=torch.Generator().manual_seed(0)).split([4, 5])
    times = torch.tensor([1, 3, 2, 1])
    repeated = real.repeat_interleave(times, 0)
    assert mmd(real, synthetic, kernel, times).item() == pytest.approx(
        mmd(repeated, synthetic, kernel).item()
    )
    once = class_mmd(real, synthetic, times, [1, 3], [2, 3], kernel)
    ones = torch.ones(7)
    assert once.item() == pytest.approx(class_mmd(repeated, synthetic, ones, [1, 6], [2, 3], kernel).item())
