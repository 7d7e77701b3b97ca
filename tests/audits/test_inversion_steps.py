"""Attacks on drawn images whose answer is known, and the judgement of reconstructions."""

import math

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn

from lit_fedad.audits.reconstruction import as_sets, by_position, closest, invert_features, invert_gradients


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def psnr(first, second):
    return -10 * math.log10(float((first - second).double().square().mean()))


def orthogonal(size, seed=0):
    normal = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(normal).Q


def test_an_orthogonal_map_is_inverted_and_its_loss_is_the_pixels_error():
    """Rotations keep distances: the loss says what the PSNR must be."""
    private, rotation = draw(1, 3, 8, 8), orthogonal(192)
    target = (private.flatten(1) @ rotation)[0]
    found = invert_features(
        lambda images: images.flatten(1) @ rotation,
        target,
        private.shape,
        torch.Generator().manual_seed(1),
        smoothness=0,
    )
    assert psnr(found.images, private) > 60  # half a grey level of 255 is 54 dB
    assert len(found.losses) == 500
    start = (0.5 + 0.1 * torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
    expected = (start - private).square().mean() / target.var(correction=0)
    assert found.losses[0] == pytest.approx(float(expected), rel=1e-4)


def test_a_convolution_with_more_channels_than_pixels_is_inverted():
    """64 outputs of every 48 pixels: injective, so only the image itself fits."""
    private = draw(2, 3, 16, 16)
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 64, 4, stride=4)
    encode = lambda images: convolution(images).flatten(2).transpose(1, 2)  # noqa: E731
    with torch.no_grad():
        target = encode(private[:1])[0]
    found = invert_features(encode, target, (1, 3, 16, 16), torch.Generator(), 250, smoothness=0)
    assert psnr(found.images, private[:1]) > 40
    assert closest(found.images, private).nearest.tolist() == [0]


def test_pixels_that_no_feature_sees_stay_as_they_were():
    """Nothing can be said of them, and smoothness off says nothing."""
    private, seen = draw(1, 1, 8, 8), draw(1, 1, 8, 8, seed=1) < 0.5
    generator = torch.Generator().manual_seed(2)
    found = invert_features(
        lambda images: images[seen], private[seen], private.shape, generator, steps=300, smoothness=0
    )
    start = (0.5 + 0.1 * torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(2))).clamp(0, 1)
    torch.testing.assert_close(found.images[~seen], start[~seen])
    torch.testing.assert_close(found.images[seen], private[seen], rtol=0, atol=1e-3)


def test_smoothness_fills_what_no_feature_sees_from_its_neighbours():
    private = torch.full((1, 1, 8, 8), 0.8)
    seen = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    seen[..., ::2, ::2] = True
    private[0, 0, 0, 0] = 0.79  # a target without variance has no scale
    found = invert_features(
        lambda images: images[seen], private[seen], private.shape, torch.Generator(), 150, smoothness=1e-2
    )
    torch.testing.assert_close(found.images, private, rtol=0, atol=0.02)


def test_the_same_generator_gives_the_same_images_and_every_value_is_a_pixel():
    target = torch.full((12,), 9.0)  # out of reach
    target[0] = -9.0
    runs = [
        invert_features(
            lambda x: x.flatten(1), target, (1, 3, 2, 2), torch.Generator().manual_seed(4), 60, smoothness=0
        )
        for _ in range(2)
    ]
    assert torch.equal(runs[0].images, runs[1].images)
    assert runs[0].losses == runs[1].losses
    assert runs[0].images.flatten().tolist() == [0.0] + [1.0] * 11


def test_a_bank_without_order_gives_its_patches_back_in_some_order():
    """Single pixels as patches: their sorted values are all that an unordered bank says."""
    private = torch.linspace(0.05, 0.95, 16).view(1, 1, 4, 4)
    bank = private.flatten()[torch.randperm(16, generator=torch.Generator().manual_seed(0)), None]
    found = invert_features(
        lambda images: images.flatten(2).transpose(1, 2),
        bank,
        private.shape,
        torch.Generator(),
        steps=150,
        smoothness=0,
        discrepancy=as_sets,
    )
    # Within the step between two values, each pixel sits on one of the bank, and each value is taken; at first, some
    # are four steps from any pixel.
    gaps = (found.images.flatten()[:, None] - bank.flatten()).abs()
    assert float(gaps.amin(1).max()) < 0.06
    assert float(gaps.amin(0).max()) < 0.06
    assert found.losses[-1] < 0.05 * found.losses[0]


def test_discrepancies_are_what_they_say():
    features, target = draw(2, 5, 3), draw(4, 3, seed=1)
    patches, bank = features.reshape(-1, 3).double().numpy(), target.double().numpy()
    gaps = ((patches[:, None] - bank) ** 2).mean(2)
    expected = (gaps.min(1).mean() + gaps.min(0).mean()) / 2 / bank.var()
    assert float(as_sets(features, target)) == pytest.approx(expected, rel=1e-5)
    ordered = draw(5, 3, seed=2)
    expected = ((features - ordered).double().numpy() ** 2).mean() / ordered.double().numpy().var()
    assert float(by_position(features, ordered)) == pytest.approx(expected, rel=1e-5)


def network(pixels):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 24), nn.Sigmoid(), nn.Linear(24, 4))


def one_step(model, images, labels):
    """Differences of weights after one step of gradient descent."""
    loss = nn.functional.cross_entropy(model(images), labels)
    return [-0.1 * gradient for gradient in torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("known", [True, False])
def test_one_image_comes_back_from_its_gradient(known):
    """A linear layer's gradient is d x^T, and its bias's d: their ratio is the image, so there is no other answer."""
    private, labels = draw(1, 1, 6, 6), torch.tensor([2])
    model = network(36)
    update = one_step(model, private, labels)
    row = update[1].abs().argmax()
    torch.testing.assert_close(update[0][row] / update[1][row], private.flatten(), rtol=1e-3, atol=1e-4)
    found = invert_gradients(
        model,
        list(model.parameters()),
        update,
        private.shape,
        torch.Generator().manual_seed(0),
        classes=4,
        labels=labels if known else None,
        steps=200,
        smoothness=0,
    )
    assert psnr(found.images, private) > 30
    assert found.losses[-1] < 1e-4


def test_the_loss_is_one_minus_the_cosine():
    private, labels = draw(2, 1, 4, 4), torch.tensor([0, 3])
    model = network(16)
    update = one_step(model, private, labels)
    found = invert_gradients(
        model, list(model.parameters()), update, private.shape, torch.Generator(), 4, labels, steps=1
    )
    generator = torch.Generator()
    start = (0.5 + 0.1 * torch.randn(2, 1, 4, 4, generator=generator)).clamp(0, 1)
    dummy = np.concatenate([g.flatten().numpy() for g in one_step(model, start, labels)]).astype(float)
    true = np.concatenate([u.flatten().numpy() for u in update]).astype(float)
    cosine = dummy @ true / np.linalg.norm(dummy) / np.linalg.norm(true)
    pixels = start.double().numpy()
    variation = np.abs(np.diff(pixels, axis=2)).sum() + np.abs(np.diff(pixels, axis=3)).sum()
    assert found.losses == pytest.approx([1 - cosine + 0.1 * variation / pixels.size], abs=1e-5)


def ssim(first, second):
    """Wang et al. 2004 with windows of 11 pixels over reflected borders, channel by channel."""
    place = np.arange(-5, 6)
    window = np.exp(-(place**2) / (2 * 1.5**2))
    window = np.outer(window, window) / window.sum() ** 2

    def mean(image):
        return (sliding_window_view(np.pad(image, 5, mode="reflect"), (11, 11)) * window).sum((2, 3))

    scores = []
    for x, y in zip(first, second, strict=True):
        mx, my = mean(x), mean(y)
        vx, vy, both = mean(x * x) - mx**2, mean(y * y) - my**2, mean(x * y) - mx * my
        c1, c2 = 0.01**2, 0.03**2
        scores.append((2 * mx * my + c1) * (2 * both + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2)))
    return np.mean(scores)


def test_closest_is_the_nearest_private_image_by_hand():
    private = draw(5, 3, 16, 16)
    shown = (private[[3, 0]] + 0.2 * (draw(2, 3, 16, 16, seed=1) - 0.5)).clamp(0, 1)
    found = closest(shown, private)
    assert found.nearest.tolist() == [3, 0]
    for place, index in enumerate([3, 0]):
        first, second = shown[place].double().numpy(), private[index].double().numpy()
        assert float(found.psnr[place]) == pytest.approx(
            -10 * np.log10(((first - second) ** 2).mean()), abs=1e-3
        )
        assert float(found.ssim[place]) == pytest.approx(ssim(first, second), abs=1e-3)


def test_an_equal_image_is_matched_without_error():
    private = draw(4, 1, 8, 8)
    found = closest(private[2:3], private)
    assert found.nearest.tolist() == [2]
    assert found.psnr.tolist() == [math.inf]
    assert found.ssim.tolist() == pytest.approx([1.0])
