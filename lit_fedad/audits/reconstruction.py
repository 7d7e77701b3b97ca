"""Reconstruction of images from their features, and from a model's update.

Images are pixels in [0, 1]; normalisation is part of the function that is inverted.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.image import (
    peak_signal_noise_ratio,
    structural_similarity_index_measure,
    total_variation,
)

Discrepancy = Callable[[Tensor, Tensor], Tensor]
"""Distance of features [n, P, C] from their target: a scalar, differentiable in the features."""

_RATE = 0.05  # learning rate of the first step, for pixels in [0, 1]
_NOISE = 0.1  # standard deviation of the images that an attack starts from, around grey


class Inversion(NamedTuple):
    """Result of an attack.

    Attributes:
        images: Reconstructions in [0, 1] [n, ch, H, W], on the CPU, like the images that they are compared with.
        losses: The loss before each step.
    """

    images: Tensor
    losses: list[float]


class Matches(NamedTuple):
    """Comparison of each reconstruction with the private image that it is nearest to.

    Attributes:
        nearest: Position of that private image, int64 [n].
        psnr: Peak signal-to-noise ratio in dB [n]; infinite for equal images.
        ssim: Structural similarity [n].
    """

    nearest: Tensor
    psnr: Tensor
    ssim: Tensor


def by_position(features: Tensor, target: Tensor) -> Tensor:
    """Computes the mean square error of features [n, P, C] from a target [P, C], in units of its variance."""
    return (features - target).square().mean() / target.var(correction=0)


def as_sets(features: Tensor, target: Tensor) -> Tensor:
    """Computes the Chamfer distance of all patches to an unordered bank, in units of its variance (Fan et al., 2017).

    Every patch of features [n, P, C] has to lie near some vector of a bank [slots, C], and every vector near a patch.
    """
    patches = features.flatten(0, -2)
    with torch.no_grad():
        distances = torch.cdist(patches, target)
    nearest_vectors, nearest_patches = target[distances.argmin(1)], patches[distances.argmin(0)]
    error = (patches - nearest_vectors).square().mean() + (nearest_patches - target).square().mean()
    return error / (2 * target.var(correction=0))


def invert_features(
    encode: Callable[[Tensor], Tensor],
    target: Tensor,
    shape: Sequence[int],
    generator: torch.Generator,
    steps: int = 500,
    smoothness: float = 1.0,
    discrepancy: Discrepancy = by_position,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Inversion:
    """Searches images whose features are the target (Mahendran and Vedaldi, 2015).

    Args:
        encode: Function from images [n, ch, H, W] in [0, 1] to features; differentiable.
        target: Features that the images should have.
        shape: n, ch, H and W.
        generator: Source of the noise of the starting images, which are grey otherwise.
        steps: Steps of Adam; the learning rate falls to 0 along a cosine.
        smoothness: Weight of the mean absolute difference between neighbouring pixels.
        discrepancy: Distance between features and target, which is minimised.
        on_step: Called with the number of steps done and of all.

    """
    images = _start(shape, generator, target)

    def loss() -> Tensor:
        return discrepancy(encode(images), target) + smoothness * _roughness(images)

    losses = _minimise(loss, [images], steps, on_step)
    return Inversion(images.detach().cpu(), losses)


def invert_gradients(
    logits: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    update: Sequence[Tensor],
    shape: Sequence[int],
    generator: torch.Generator,
    classes: int,
    labels: Tensor | None = None,
    steps: int = 500,
    smoothness: float = 0.1,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Inversion:
    """Searches images for which the negative gradient of the cross-entropy has the direction of an update.

    Minimises ``1 - cos(-grad, update) + smoothness * TV`` over dummy images (Zhu et al., NeurIPS 2019) by the sign of
    the gradient (Geiping et al., NeurIPS 2020, Geiping Eq. 4).

    Args:
        logits: Function from images [n, ch, H, W] in [0, 1] to class logits [n, K]; differentiable twice.
        parameters: Trained parameters before the update.
        update: Difference of each parameter after and before the update.
        shape: n, ch, H and W.
        generator: Source of the noise of the starting images.
        classes: Number of classes K.
        labels: The images' classes, int64 [n]; None where the attacker does not know them and optimises soft ones.
        steps: As in `invert_features`.
        smoothness: As in `invert_features`.
        on_step: As in `invert_features`.
    """
    images = _start(shape, generator, update[0])
    soft_labels = torch.zeros(shape[0], classes, device=images.device, requires_grad=True)
    descent = torch.cat([-part.flatten() for part in update])

    def loss() -> Tensor:
        target = soft_labels.softmax(1) if labels is None else labels
        error = F.cross_entropy(logits(images), target)
        gradients = torch.autograd.grad(error, parameters, create_graph=True)
        gradient = torch.cat([part.flatten() for part in gradients])
        return 1 - F.cosine_similarity(gradient, descent, dim=0) + smoothness * _roughness(images)

    variables = [images, soft_labels] if labels is None else [images]
    losses = _minimise(loss, variables, steps, on_step, signed=True)
    return Inversion(images.detach().cpu(), losses)


def closest(reconstructed: Tensor, private: Tensor) -> Matches:
    """Compares each reconstruction with the private image that it is nearest to in mean square.

    Args:
        reconstructed: Images in [0, 1] [n, ch, H, W], at least 6 pixels a side.
        private: Images in [0, 1] [m, ch, H, W].
    """
    # cdist's short cut through products would round distances of nearly equal images.
    distances = torch.cdist(
        reconstructed.flatten(1), private.flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    nearest = distances.argmin(1)
    match = private[nearest]
    psnr = peak_signal_noise_ratio(reconstructed, match, data_range=1.0, dim=(1, 2, 3), reduction="none")
    ssim = structural_similarity_index_measure(reconstructed, match, data_range=1.0, reduction="none")
    assert isinstance(ssim, Tensor)
    return Matches(nearest, psnr, ssim.reshape(-1))


def _start(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Draws grey images with a little noise, on the CPU so that every device starts alike."""
    noise = _NOISE * torch.randn(tuple(shape), generator=generator)
    return (0.5 + noise).clamp(0, 1).to(like.device).requires_grad_()


def _roughness(images: Tensor) -> Tensor:
    return total_variation(images, reduction="sum") / images.numel()


def _minimise(
    loss: Callable[[], Tensor],
    moved: Sequence[Tensor],
    steps: int,
    on_step: Callable[[int, int], None],
    signed: bool = False,
) -> list[float]:
    """Runs Adam, at a learning rate that falls to 0 along a cosine, and returns the loss before each step.

    The first of the ``moved`` tensors holds images, which stay in [0, 1]. With ``signed`` only the signs of gradients
    count.
    """
    optimizer = torch.optim.Adam(moved, _RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        value = loss()
        # Not backward(), which would compute gradients of other weights too.
        for tensor, gradient in zip(moved, torch.autograd.grad(value, moved), strict=True):
            tensor.grad = gradient.sign() if signed else gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            moved[0].clamp_(0, 1)
        losses.append(float(value.detach()))
        on_step(step + 1, steps)
    return losses
