"""Reconstructing images from what was computed of them: inversion of features, and of a model's update.

Images are pixels in [0, 1]; who normalises them does so inside the function that is given.
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
"""How far features [n, P, C] are from their target: a scalar, differentiable in the features."""

_NOISE = 0.1  # standard deviation of the images that an attack starts from, around grey


class Inversion(NamedTuple):
    """What an attack came to.

    Attributes:
        images: Reconstructions in [0, 1] [n, ch, H, W].
        losses: What was minimised, before each step.
    """

    images: Tensor
    losses: list[float]


class Matches(NamedTuple):
    """Each reconstruction beside the private image that it is nearest to.

    Attributes:
        nearest: Which private image, int64 [n].
        psnr: Peak signal-to-noise ratio in dB [n]; infinite for equal images.
        ssim: Structural similarity [n].
    """

    nearest: Tensor
    psnr: Tensor
    ssim: Tensor


def by_position(features: Tensor, target: Tensor) -> Tensor:
    """Mean square error in units of the target's variance: position by position, for each image on its own.

    Args:
        features: Features [n, P, C].
        target: The target of every image [P, C].
    """
    return (features - target).square().mean() / target.var(correction=0)


def as_sets(features: Tensor, target: Tensor) -> Tensor:
    """Chamfer distance (Fan et al. 2017) of all images' patches to an unordered bank, in units of its variance.

    Every patch has to lie near some vector of the bank, and every vector near some patch.

    Args:
        features: Features [n, P, C], one set whichever image they belong to.
        target: The bank [slots, C].
    """
    patches = features.flatten(0, -2)
    with torch.no_grad():
        gaps = torch.cdist(patches, target)
    there, back = target[gaps.argmin(1)], patches[gaps.argmin(0)]
    error = (patches - there).square().mean() + (back - target).square().mean()
    return error / (2 * target.var(correction=0))


def invert_features(
    encode: Callable[[Tensor], Tensor],
    target: Tensor,
    shape: Sequence[int],
    generator: torch.Generator,
    steps: int = 500,
    learning_rate: float = 0.05,
    smoothness: float = 1.0,
    discrepancy: Discrepancy = by_position,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Inversion:
    """Looks for images whose features are the target (Mahendran and Vedaldi 2015).

    Args:
        encode: From images [n, ch, H, W] in [0, 1] to features; differentiable.
        target: What the features should be.
        shape: n, ch, H and W.
        generator: Draws what the search starts from: grey, with a little noise.
        steps: Steps of Adam; the learning rate falls to 0 along a cosine.
        learning_rate: The first step's, of pixels.
        smoothness: Weight of the mean absolute difference between neighbouring pixels.
        discrepancy: What is minimised beside it.
        on_step: Told of steps done and of all.

    Returns:
        The images, and the loss before each step.

    Examples:
        >>> private = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        >>> negative = lambda images: 1 - 2 * images
        >>> found = invert_features(negative, negative(private), (1, 1, 4, 4), torch.Generator(), smoothness=0)
        >>> bool((found.images - private).abs().max() < 1e-3)
        True
    """
    images = _start(shape, generator, target)

    def loss() -> Tensor:
        return discrepancy(encode(images), target) + smoothness * _roughness(images)

    losses = _minimise(loss, images, [], steps, learning_rate, on_step, signed=False)
    return Inversion(images.detach(), losses)


def invert_gradients(
    logits: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    update: Sequence[Tensor],
    shape: Sequence[int],
    generator: torch.Generator,
    classes: int,
    labels: Tensor | None = None,
    steps: int = 500,
    learning_rate: float = 0.05,
    smoothness: float = 0.1,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Inversion:
    """Looks for images on which a step down the gradient of the cross-entropy points where the update does.

    Dummy images as in deep leakage (Zhu et al. 2019), compared by cosine, smoothed, and moved by the sign alone as by
    Geiping et al. (2020, Eq. 4): minimises ``1 - cos(-grad, update) + smoothness * TV``.

    Args:
        logits: From images [n, ch, H, W] in [0, 1] to class logits [n, K]; differentiable twice.
        parameters: What was trained, as it was before the update.
        update: Weights after the update less those before, one for each of the parameters.
        shape: n, ch, H and W.
        generator: Draws what the search starts from.
        classes: K.
        labels: The images' classes, int64 [n]; None where the attacker does not know them and looks for soft ones.
        steps: As for `invert_features`.
        learning_rate: As there.
        smoothness: As there.
        on_step: As there.

    Returns:
        The images, and the loss before each step.
    """
    images = _start(shape, generator, update[0])
    soft = torch.zeros(shape[0], classes, device=images.device, requires_grad=True)
    descent = torch.cat([-part.flatten() for part in update])

    def loss() -> Tensor:
        target = soft.softmax(1) if labels is None else labels
        error = F.cross_entropy(logits(images), target)
        gradients = torch.autograd.grad(error, parameters, create_graph=True)
        found = torch.cat([part.flatten() for part in gradients])
        return 1 - F.cosine_similarity(found, descent, dim=0) + smoothness * _roughness(images)

    unknown = [soft] if labels is None else []
    losses = _minimise(loss, images, unknown, steps, learning_rate, on_step, signed=True)
    return Inversion(images.detach(), losses)


def closest(reconstructed: Tensor, private: Tensor) -> Matches:
    """Judges each reconstruction by the private image that it is nearest to in mean square.

    Args:
        reconstructed: Images in [0, 1] [n, ch, H, W], at least 6 pixels a side.
        private: Images in [0, 1] [m, ch, H, W].

    Examples:
        >>> private = torch.stack([torch.zeros(3, 8, 8), torch.ones(3, 8, 8)])
        >>> found = closest(private[1:] - 0.1, private)
        >>> found.nearest.tolist(), round(found.psnr.item(), 2)
        ([1], 20.0)
    """
    # Without cdist's short cut through products, which rounds what is nearly equal.
    gaps = torch.cdist(
        reconstructed.flatten(1), private.flatten(1), compute_mode="donot_use_mm_for_euclid_dist"
    )
    nearest = gaps.argmin(1)
    match = private[nearest]
    psnr = peak_signal_noise_ratio(reconstructed, match, data_range=1.0, dim=(1, 2, 3), reduction="none")
    ssim = structural_similarity_index_measure(reconstructed, match, data_range=1.0, reduction="none")
    assert isinstance(ssim, Tensor)
    return Matches(nearest, psnr, ssim.reshape(-1))


def _start(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    """Grey images with a little noise, drawn on the CPU so that every device starts alike."""
    noise = _NOISE * torch.randn(tuple(shape), generator=generator)
    return (0.5 + noise).clamp(0, 1).to(like.device).requires_grad_()


def _roughness(images: Tensor) -> Tensor:
    return total_variation(images, reduction="sum") / images.numel()


def _minimise(
    loss: Callable[[], Tensor],
    images: Tensor,
    others: list[Tensor],
    steps: int,
    learning_rate: float,
    on_step: Callable[[int, int], None],
    signed: bool,
) -> list[float]:
    """Adam on images, which stay in [0, 1], and on what else is not known; it may be told no more than the sign."""
    moved = [images, *others]
    optimizer = torch.optim.Adam(moved, learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    for step in range(steps):
        value = loss()
        # Not backward(): the gradients of weights are not wanted.
        for tensor, gradient in zip(moved, torch.autograd.grad(value, moved), strict=True):
            tensor.grad = gradient.sign() if signed else gradient
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
        losses.append(float(value.detach()))
        on_step(step + 1, steps)
    return losses
