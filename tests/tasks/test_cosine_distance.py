"""Memory banks by the cosine: against similarities computed in numpy, which know nothing of lengths and chords."""

import numpy as np
import pytest
import torch

from lit_fedad.contracts import Context
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale

HERE = Context(seed=0, round=0, client=0)


def cosine_distances(features, slots):
    """1 - cos of every pair of rows, [n, slots], in double precision."""
    features, slots = (np.asarray(rows.detach(), dtype=np.float64) for rows in (features, slots))
    lengths = np.sqrt((features**2).sum(1))[:, None] * np.sqrt((slots**2).sum(1))[None]
    return 1 - features @ slots.T / lengths


def frozen(task, batch):
    """Patch features as no length was divided out of them [n, C]."""
    with torch.no_grad():
        return task.standardised(task.embed(batch)).flatten(0, 1)


@pytest.fixture
def task(make_task):
    task = make_task(head=None, distance="cosine").eval()
    task.load_memory(torch.randn(16, 8) * torch.arange(1, 17)[:, None])
    return task


def test_patch_scores_are_cosine_distances_to_the_nearest_slot(task, make_loader):
    batch = next(iter(make_loader()))
    nearest = cosine_distances(frozen(task, batch), task.memory).min(1)
    maps = task.draw(torch.from_numpy(nearest).float())
    with torch.no_grad():
        prediction = task.predict_step(batch)
    torch.testing.assert_close(prediction.anomaly_map, maps, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prediction.image_score, maps.flatten(1).amax(1), rtol=1e-4, atol=1e-6)


def test_the_loss_and_its_threshold_are_of_cosine_distances(make_task, make_loader):
    task = make_task(head=None, distance="cosine", loss=HingeLoss("median", neighbours=2))
    task.refresh(make_loader(), HERE, first=True)
    rows = torch.cat([frozen(task, batch) for batch in make_loader()])
    two = np.sort(cosine_distances(rows, task.memory), 1)[:, :2]
    assert float(task.threshold) == pytest.approx(float(np.median(two)), rel=0.1)
    batch = next(iter(make_loader()))
    two = np.sort(cosine_distances(frozen(task, batch), task.memory), 1)[:, :2]
    output = task.training_step(batch)
    assert float(output["loss"]) == pytest.approx(np.maximum(two - float(task.threshold), 0).mean(), rel=1e-3)
    assert float(output["nn_distance"]) == pytest.approx(two[:, 0].mean(), rel=1e-3)


def test_radii_are_in_the_unit_of_the_distances(task, make_loader):
    """The scale of a slot is the mean cosine distance of its patches: half the mean of their squared chords."""
    task.image_score, batch = LocalScale(exponent=1.0), next(iter(make_loader()))
    chords = torch.linspace(0.5, 1.0, 16)
    task.load_memory(task.memory, chords)
    found = cosine_distances(frozen(task, batch), task.memory)
    scale = (chords**2 / 2).numpy()
    scores = found.min(1) / (scale / scale.mean())[found.argmin(1)]
    with torch.no_grad():
        prediction = task.predict_step(batch)
    expected = task.draw(torch.from_numpy(scores).float()).flatten(1).amax(1)
    torch.testing.assert_close(prediction.image_score, expected, rtol=1e-3, atol=1e-6)


def test_a_head_is_trained_on_features_of_length_1(make_task, make_loader):
    task = make_task(distance="cosine", residual=False)
    task.refresh(make_loader(), HERE, first=True)
    batch = next(iter(make_loader()))
    lengths = torch.linalg.vector_norm(task(batch), dim=2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    task.training_step(batch)["loss"].backward()
    gradients = [parameter.grad for parameter in task.head.parameters() if parameter.grad is not None]
    assert any(gradient.abs().sum() > 0 for gradient in gradients)
