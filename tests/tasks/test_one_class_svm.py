"""AE-1SVM: its kernel, its loss and its scores by hand."""

import functools

import numpy as np
import pytest
import torch
from helpers.frozen import frozen_encoder
from torch import nn

from lit_fedad.models.convnets import ConvNet, Decoder
from lit_fedad.tasks.one_class_svm import OneClassSVM


def make(seed: int = 0, **overrides) -> OneClassSVM:
    torch.manual_seed(seed)
    parts = {
        "encoder": ConvNet(16, channels=4),
        "decoder": functools.partial(Decoder, channels=16),
        "image_size": 16,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "rounds": 1,
        "width": 2,
        "fourier": 3,
    }
    return OneClassSVM(**{**parts, **overrides}).eval()


def test_loss_and_scores_by_hand():
    task = make(alpha=2.0, nu=0.25, fourier=1, encoder=frozen_encoder())
    task.directions = torch.tensor([[torch.pi / 2, 0.0]])
    task.normal = nn.Parameter(torch.tensor([3.0, 4.0]))
    task.rho = nn.Parameter(torch.tensor(3.5))
    z = torch.tensor([[0.0, 7.0], [1.0, 7.0]])  # phi = (1, 0) and (0, 1)
    batch = {"image": torch.randn(2, 3, 16, 16)}
    assert task.predict(z, batch).image_score.tolist() == pytest.approx([0.5, -0.5], abs=1e-6)
    outputs = task.objective(z, batch)
    error = (task.decoder(z) - task.inputs(batch)).square().mean()
    assert outputs["reconstruction"].item() == pytest.approx(error.item(), rel=1e-6)
    # The authors' code: |w|^2 / 2 - rho + mean(m + |m|) / nu, with m = 0.5 and -0.5.
    margins = np.array([0.5, -0.5])
    expected = 2 * error.item() + 12.5 - 3.5 + np.mean(margins + np.abs(margins)) / 0.25
    assert outputs["loss"].item() == pytest.approx(expected, rel=1e-6)


def test_fourier_features_approximate_the_gaussian_kernel():
    """phi(x) . phi(y) -> exp(-|x - y|^2 / (2 sigma^2)), with an error of 1 / sqrt(R)."""
    task = make(fourier=40_000, sigma=1.5)
    z = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
    phi = task.fourier(z).detach().numpy()
    squared = ((z[:, None] - z) ** 2).sum(2).numpy()
    np.testing.assert_allclose(phi @ phi.T, np.exp(-squared / (2 * 1.5**2)), atol=0.03)


def test_directions_are_no_state_and_come_with_the_initial_weights():
    one, other = make(seed=4), make(seed=4)
    assert torch.equal(one.directions, other.directions)
    assert "directions" not in one.state_dict()


def test_the_last_rounds_train_the_svm_alone():
    task = make(rounds=22, svm_share=0.1, svm_learning_rate=0.1)
    images = {"image": torch.randn(8, 3, 16, 16)}
    for number, svm_alone in ((20, False), (21, True), (22, True)):
        task.round, before = number, {name: entry.clone() for name, entry in task.state_dict().items()}
        task.train()
        optimizer, outputs = task.configure_optimizers(), task.training_step(images)
        optimizer.zero_grad()
        outputs["loss"].backward()
        optimizer.step()
        moved = {name for name, entry in task.state_dict().items() if not torch.equal(entry, before[name])}
        parameters = {name for name, _ in task.named_parameters()}
        assert moved & parameters == ({"normal", "rho"} if svm_alone else parameters)
        assert moved <= parameters or not svm_alone
        # Adam's first step has the length of the learning rate.
        rate = 0.1 if svm_alone else task.learning_rate
        torch.testing.assert_close((task.rho.detach() - before["rho"]).abs(), torch.tensor(rate))
        assert ("reconstruction" in outputs) != svm_alone
        if svm_alone:  # the slope of |w|^2 / 2 - rho + mean(m + |m|) / nu
            phi = task.fourier(task(images))
            inside = before["rho"] - phi @ before["normal"] > 0
            slope = before["normal"] - 2 / task.nu * (phi * inside[:, None]).mean(0)
            torch.testing.assert_close(task.normal.grad, slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rounds", "share", "last"), [(6, 0.09, 1), (2, 0.09, 1), (110, 0.09, 10), (1, 0.09, 0), (6, 0.0, 0)]
)
def test_how_many_rounds_train_the_svm_alone(rounds, share, last):
    task = make(rounds=rounds, svm_share=share)
    assert task.common_rounds == rounds - last


def test_weights_begin_as_the_authors():
    """N(0, 1), cut at 2 standard deviations; of standard deviation .88 then."""
    weights = make(fourier=5000).normal.detach()
    assert float(weights.abs().max()) <= 2
    assert float(weights.std()) == pytest.approx(0.88, abs=0.02)
