"""Maximum mean discrepancy: the distance between two sets of features by their means in a kernel's space."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["linear", "polynomial", "gaussian", "laplace"]


def kernel_matrix(x: Tensor, y: Tensor, kernel: Kernel, bandwidth: Tensor | float = 1.0) -> Tensor:
    """Computes kernel values of all pairs, with d the Euclidean distance.

    - ``linear``: x . y
    - ``polynomial``: (x . y + 1)^2
    - ``gaussian``: sum over k = -2..2 of exp(-d^2 / (s 2^k)), s being the bandwidth
    - ``laplace``: sum over g in 0.1, 1, 5 of exp(-g d^2). The distance is squared, as in a Gaussian; the name is that
      of FedVCK's released code.

    The computation is in double precision.

    Args:
        x: Features [n, D].
        y: Features [m, D].
        kernel: Name of the kernel.
        bandwidth: Bandwidth s of the Gaussian kernel.

    Returns:
        Float64 [n, m].

    Example:
        >>> kernel_matrix(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0], [0.0, 0.0]]), "polynomial")
        tensor([[36.,  1.]], dtype=torch.float64)
    """
    x, y = x.double(), y.double()
    if kernel == "linear":
        return x @ y.T
    if kernel == "polynomial":
        return (x @ y.T + 1).square()
    # One of the points is subtracted: squared norms are then no larger than squared distances, which keeps digits.
    x, y = x - y[0].detach(), y - y[0].detach()
    squared = (x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T).clamp(min=0)
    if kernel == "laplace":
        return torch.stack([torch.exp(-rate * squared) for rate in (0.1, 1.0, 5.0)]).sum(0)
    return torch.stack([torch.exp(-squared / (bandwidth * 2.0**k)) for k in range(-2, 3)]).sum(0)


def mmd(real: Tensor, synthetic: Tensor, kernel: Kernel = "linear", times: Tensor | None = None) -> Tensor:
    """Computes the squared maximum mean discrepancy: mean K(B, B) + mean K(S, S) - 2 mean K(B, S).

    The Gaussian kernel's bandwidth is the mean squared distance among real and synthetic features together, over
    pairs of different draws. With the linear kernel the value is the squared distance of the means. The estimate is
    biased.

    Args:
        real: Features B [n, D].
        synthetic: Features S [m, D].
        kernel: Name of the kernel.
        times: How often each of B was drawn [n]; None for once.

    Returns:
        A float64 scalar, 0 where both sets are equal.

    Source:
        FedVCK Eq. 3; with the linear kernel FedVCK Eq. 2.

    Example:
        >>> mmd(torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([[1.0, 2.0]]))
        tensor(1., dtype=torch.float64)
    """
    real, synthetic = real.double(), synthetic.double()
    real_times = real.new_ones(len(real)) if times is None else times.double()
    shares = real_times / real_times.sum()
    if kernel == "linear":
        return (shares @ real - synthetic.mean(0)).square().sum()
    bandwidth = 1.0
    if kernel == "gaussian":
        all_times = torch.cat([real_times, real_times.new_ones(len(synthetic))])
        bandwidth = mean_squared_distance(torch.cat([real, synthetic]), all_times)
    within_real = shares @ kernel_matrix(real, real, kernel, bandwidth) @ shares
    between = (shares @ kernel_matrix(real, synthetic, kernel, bandwidth)).mean()
    return within_real + kernel_matrix(synthetic, synthetic, kernel, bandwidth).mean() - 2 * between


def mean_squared_distance(features: Tensor, times: Tensor) -> float:
    """Computes the mean squared distance over all pairs of different draws: twice the total variance.

    Args:
        features: Features [n, D]; no gradient reaches them.
        times: How often each feature was drawn [n].
    """
    points = features.detach().double()
    centred = points - times @ points / times.sum()
    mean_square = 2 * (times @ centred.square().sum(1)) / (times.sum() - 1)
    # For equal points any bandwidth gives 0, but a bandwidth of 0 gives NaN.
    return max(float(mean_square), 1e-30)


def class_mmd(
    real: Tensor,
    synthetic: Tensor,
    times: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    kernel: Kernel = "linear",
) -> Tensor:
    """Computes the sum over classes of the discrepancy between their real and their synthetic features.

    Args:
        real: Features [sum(sizes), D], sorted by class.
        synthetic: Features [sum(counts), D], sorted by class.
        times: How often each real image was drawn [sum(sizes)].
        sizes: Number of real images of each of the k classes.
        counts: Number of synthetic images of each class.
        kernel: Name of the kernel.

    Returns:
        A float64 scalar.

    Source:
        FedVCK Eq. 9.
    """
    if kernel != "linear":
        parts = zip(
            real.split(list(sizes)), synthetic.split(list(counts)), times.split(list(sizes)), strict=True
        )
        return torch.stack(
            [mmd(images, condensed, kernel, class_times) for images, condensed, class_times in parts]
        ).sum()
    once = torch.ones(len(synthetic), device=synthetic.device)
    return (_class_means(real, times, sizes) - _class_means(synthetic, once, counts)).square().sum()


def _class_means(features: Tensor, times: Tensor, sizes: Sequence[int]) -> Tensor:
    """Computes the mean feature of each class [k, D]."""
    classes = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(features.device)
    weights = times.double()
    total = weights.new_zeros(len(sizes)).index_add(0, classes, weights)
    weighted = features.double() * (weights / total[classes])[:, None]
    return weighted.new_zeros(len(sizes), features.shape[1]).index_add(0, classes, weighted)
