"""Latent distribution constraints against NumPy, and against batch normalisation in training mode."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from helpers.refusals import refused
from helpers.tiny_pyramid import TinyPyramid
from timm.layers import BatchNormAct2d
from torch import nn

from lit_fedad.condensation.batch_statistics import apply, check_encoder, record, unconstrained
from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import BatchNorm, ConvNet, ResNetCifar
from lit_fedad.models.encoders import FrozenEncoder

ENCODERS = {
    "convnet": lambda: ConvNet(28, channels=8),
    "resnet": lambda: ResNetCifar(18, channels=16),
    "torch": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
    "plain": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False, track_running_stats=False), nn.Flatten()
    ),
    "activation": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4), nn.Flatten()),
}


@pytest.fixture(params=ENCODERS)
def encoder(request) -> nn.Module:
    """An encoder whose affine parameters and running statistics are not the initial ones."""
    torch.manual_seed(0)
    encoder = ENCODERS[request.param]()
    for layer in encoder.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return encoder


def images(count=6, side=28, seed=0):
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def snapshot(encoder):
    return (
        {name: value.clone() for name, value in encoder.state_dict().items()},
        [layer.training for layer in encoder.modules()],
    )


def assert_unchanged(encoder, before):
    state, modes = before
    assert [layer.training for layer in encoder.modules()] == modes
    assert encoder.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in encoder.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in encoder.modules())


def test_the_recorded_batch_gets_its_own_features(encoder):
    features, statistics = record(encoder, images())
    assert torch.equal(apply(encoder, images(), statistics), features)


def test_other_images_get_other_features_than_by_running_or_own_statistics(encoder):
    features, statistics = record(encoder, images())
    others = images(4, seed=1) * 3
    judged = apply(encoder, others, statistics)
    assert not torch.allclose(judged, record(encoder, others)[0], atol=0.1)
    assert not torch.allclose(judged, encoder.eval()(others), atol=0.1)
    # Each image is judged alone, and a recorded one among others keeps its features.
    mixed = apply(encoder, torch.cat([others, images()[:2]]), statistics)
    torch.testing.assert_close(mixed, torch.cat([judged, features[:2]]), atol=1e-4, rtol=1e-4)


def test_recording_is_training_mode_without_its_traces(encoder):
    expected = deepcopy(encoder).train()(images())
    before = snapshot(encoder)
    features, _ = record(encoder, images())
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
    assert_unchanged(encoder, before)


def test_unconstrained_is_training_mode_gradients_included_without_its_traces(encoder):
    theirs, ours = images().requires_grad_(), images().requires_grad_()
    expected = deepcopy(encoder).train()(theirs)
    encoder.eval()
    before = snapshot(encoder)
    features = unconstrained(encoder, ours)
    assert_unchanged(encoder, before)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
    expected.square().sum().backward()
    features.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-3)


def test_statistics_of_every_layer_shortcuts_included():
    encoder = ResNetCifar(18, channels=16)
    _, statistics = record(encoder, images())
    names = [name for name, layer in encoder.named_modules() if isinstance(layer, BatchNorm)]
    assert sorted(statistics) == sorted(names)
    assert sum("downsample" in name for name in names) == 3
    assert all(not value.requires_grad for pair in statistics.values() for value in pair)


def test_arithmetic_of_one_layer_by_hand():
    """Eq. 4: (S - mu_B) / sigma_B, then the layer's own affine map; d/dS = weight / sigma_B."""
    norm = nn.BatchNorm2d(3)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
        norm.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    real, synthetic = images(5, 4).numpy().astype(float), images(2, 4, seed=1).requires_grad_()
    features, statistics = record(norm, torch.tensor(real, dtype=torch.float32))
    mean, var = real.mean((0, 2, 3)), real.var((0, 2, 3))
    for actual, expected in zip(statistics[""], (mean, var), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    slope = (norm.weight.detach().numpy() / np.sqrt(var + norm.eps))[:, None, None]

    def by_hand(maps):
        return (maps - mean[:, None, None]) * slope + norm.bias.detach().numpy()[:, None, None]

    np.testing.assert_allclose(features, by_hand(real), atol=1e-5)
    judged = apply(norm, synthetic, statistics)
    np.testing.assert_allclose(judged.detach(), by_hand(synthetic.detach().numpy()), atol=1e-5)
    (gradient,) = torch.autograd.grad(judged.sum(), synthetic)
    np.testing.assert_allclose(gradient, np.broadcast_to(slope, gradient.shape), rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_encoder_stays_as_it_was_and_its_mode_does_not_matter(encoder, training):
    encoder.train(training)
    encoder[0].train(not training) if isinstance(encoder, nn.Sequential) else None
    before = snapshot(encoder)
    features, statistics = record(encoder, images())
    assert_unchanged(encoder, before)
    judged = apply(encoder, images(seed=1), statistics)
    assert_unchanged(encoder, before)
    encoder.train(not training)
    again, statistics = record(encoder, images())
    assert torch.equal(again, features)
    assert torch.equal(apply(encoder, images(seed=1), statistics), judged)


def test_a_failing_pass_leaves_no_trace(encoder):
    before = snapshot(encoder)
    _, statistics = record(encoder, images())
    grey = torch.zeros(2, 1, 28, 28)
    with pytest.raises(RuntimeError):
        record(encoder, grey)
    with pytest.raises(RuntimeError):
        apply(encoder, grey, statistics)
    assert_unchanged(encoder, before)


def test_gradients_reach_the_images_alone_where_weights_are_frozen(encoder):
    encoder.requires_grad_(False)
    real, synthetic = images(), images(4, seed=1).requires_grad_()
    features, statistics = record(encoder, real)
    assert not features.requires_grad
    (apply(encoder, synthetic, statistics).mean(0) - features.mean(0)).square().sum().backward()
    assert synthetic.grad.abs().sum((1, 2, 3)).min() > 0
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in encoder.parameters())


def test_the_gradient_agrees_with_finite_differences():
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Conv2d(3, 2, 3), BatchNorm(2), nn.Sigmoid(), nn.Flatten()).double()
    _, statistics = record(encoder, images(3, 5).double())
    synthetic = images(2, 5, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply(encoder, x, statistics), synthetic)


def test_half_precision(encoder):
    with torch.autocast("cpu", torch.bfloat16):
        features, statistics = record(encoder, images())
        synthetic = images().requires_grad_()
        judged = apply(encoder, synthetic, statistics)
        judged.float().sum().backward()
    assert torch.equal(judged, features)
    assert all(value.dtype == torch.float32 for pair in statistics.values() for value in pair)
    assert torch.isfinite(synthetic.grad).all()
    full = record(encoder, images())[0]
    assert (features.float() - full).abs().mean() < 0.1 * full.abs().mean()


def test_encoders_with_batch_normalisation_pass():
    for make in ENCODERS.values():
        check_encoder(make())


@pytest.mark.parametrize("encoder", [ConvNet(32, norm="instance", channels=4), nn.Conv2d(3, 4, 3)])
def test_without_batch_normalisation_one_line_says_what_to_choose(encoder):
    refused("task=classifier_convnet with encoder.norm=batch", check_encoder, encoder)


def test_an_encoder_without_gradients_to_pixels_is_refused():
    with pytest.raises(UserError, match="trained on pixels: give features=train"):
        check_encoder(FrozenEncoder(TinyPyramid()))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_an_image_that_is_there_several_times_counts_so_often(encoder, precision):
    different, times = images(4), torch.tensor([1, 4, 2, 1])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        every, expected = record(encoder, different.repeat_interleave(times, 0))
        once, found = record(encoder, different, times)
    exact = {"rtol": 1e-4, "atol": 1e-4} if precision == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(once.repeat_interleave(times, 0), every, **exact)
    for name, statistics in expected.items():
        for own, wanted in zip(found[name], statistics, strict=True):
            assert own.dtype == torch.float32
            torch.testing.assert_close(own, wanted, **exact)
