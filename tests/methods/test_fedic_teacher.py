"""FEDIC: the calibrated teacher and its divergence from the student."""

import numpy as np
import pytest
import torch
from helpers.draws import rows
from helpers.encoder import Encoder
from scipy.special import expit, rel_entr, softmax

from lit_fedad.methods.fedic import Calibration, divergence

K, WIDTH = 3, Encoder.num_features
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def calibration_of(seed: int = 0) -> Calibration:
    calibration = Calibration(K, WIDTH).double()
    for number, parameter in enumerate(calibration.parameters()):
        parameter.data = rows(*parameter.shape, seed=seed + number)
    return calibration


@pytest.mark.parametrize("clients", [1, 2, 9])
def test_the_teacher_is_that_of_numpy(clients):
    calibration = calibration_of(10)
    logits, features, tuned = rows(clients, 6, K, seed=1), rows(6, WIDTH, seed=2), rows(6, K, seed=3)
    found = calibration(logits, features, tuned).detach().numpy()
    u, b, scale, shift, v = (
        getattr(calibration, name).detach().numpy() for name in ("u", "b", "scale", "shift", "v")
    )
    for i in range(6):
        weights = np.array([expit(u @ logits[j, i].numpy() + b) for j in range(clients)])
        weights /= np.abs(weights).sum()
        ensemble = sum(weights[j] * logits[j, i].numpy() for j in range(clients))
        gate = expit(v @ features[i].numpy())
        expected = gate * (scale * ensemble + shift) + (1 - gate) * tuned[i].numpy()
        np.testing.assert_allclose(found[i], expected, rtol=1e-10)


def test_the_teacher_does_not_depend_on_the_order_of_clients():
    calibration, logits = calibration_of(10), rows(4, 6, K, seed=1)
    rest = rows(6, WIDTH, seed=2), rows(6, K, seed=3)
    torch.testing.assert_close(calibration(logits, *rest), calibration(logits[[2, 0, 3, 1]], *rest))


def test_at_first_the_teacher_is_half_the_fine_tuned_model_and_half_the_ensemble():
    logits, tuned = rows(4, 6, K, seed=1).float(), rows(6, K, seed=3).float()
    logits -= logits.mean(2, keepdim=True)  # so that all clients' logits sum to the same
    found = Calibration(K, WIDTH)(logits, torch.ones(6, WIDTH), tuned)
    torch.testing.assert_close(found, (logits.mean(0) + tuned) / 2)


def test_weights_of_clients_do_not_vanish_together():
    logits = torch.full((2, 1, K), -1e3)
    logits[1] -= 1
    found = Calibration(K, WIDTH)(logits, torch.zeros(1, WIDTH), torch.zeros(1, K))
    first, second = softmax([-3000.0, -3003.0])
    np.testing.assert_allclose(
        found.detach().numpy(), np.full((1, K), (first * -1000 + second * -1001) / 2), rtol=1e-6
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_divergence_is_that_of_scipy_without_a_factor(temperature):
    student, teacher = rows(6, K), rows(6, K, seed=1)
    p, q = (softmax(logits.numpy() / temperature, axis=1) for logits in (teacher, student))
    assert float(divergence(student, teacher, temperature)) == pytest.approx(rel_entr(p, q).sum(1).mean())


def test_a_student_that_is_the_teacher_has_nothing_to_learn():
    teacher = rows(6, K)
    student = teacher.clone().requires_grad_()
    loss = divergence(student, teacher, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-15)
    assert student.grad.abs().max() < 1e-15
