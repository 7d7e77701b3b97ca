"""SimpleNet: loss, scores and a step against NumPy."""

import numpy as np
import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from helpers.trainers import plain_trainer
from torch.utils.data import DataLoader

from lit_fedad.tasks.simplenet import SimpleNet


def make(**settings):
    torch.manual_seed(0)
    given = {"hidden": 6, "sigma": 0.0, "noise": 0.3, "margin": 0.7}
    task = SimpleNet(TinyPyramid(), grid=4, image_size=32, **{**given, **settings})
    task.load_statistics(torch.rand(8), 0.5 + torch.rand(8))
    return task


def images(number=3):
    return {"image": torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(2))}


def adapted(task, batch):
    """Adapted standardised features [n, C] of all patches, float64."""
    parts = (task.adaptor.weight, task.adaptor.bias, task.mean, task.scale)
    weight, bias, mean, scale = (part.detach().double().numpy() for part in parts)
    return (task.embed(batch).flatten(0, 1).double().numpy() - mean) / scale @ weight.T + bias


def discriminated(task, rows, statistics=None):
    """D of rows [n, C], normalised by their own statistics or the given ones."""
    state = {name: entry.double().numpy() for name, entry in task.discriminator.state_dict().items()}
    x = rows @ state["0.weight"].T + state["0.bias"]
    mean, variance = statistics or (x.mean(0), x.var(0))
    x = (x - mean) / np.sqrt(variance + 1e-5) * state["1.weight"] + state["1.bias"]
    return (np.where(x > 0, x, 0.2 * x) @ state["3.weight"].T)[:, 0]


def test_the_loss_is_that_of_the_paper():
    task, batch = make().train(), images()
    torch.manual_seed(5)
    noise = 0.3 * torch.randn(3, 16, 8).flatten(0, 1).double().numpy()
    rows = adapted(task, batch)
    normal, anomalous = np.split(discriminated(task, np.concatenate([rows, rows + noise])), 2)
    expected = np.maximum(0, 0.7 - normal).mean() + np.maximum(0, 0.7 + anomalous).mean()
    torch.manual_seed(5)
    assert task.training_step(batch)["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_scores_are_low_where_the_discriminator_is_high():
    task, batch = make().eval(), images()
    expected = -discriminated(task, adapted(task, batch), (np.zeros(6), np.ones(6)))
    found = task.predict_step(batch)
    drawn = task.draw(torch.from_numpy(expected).float())
    torch.testing.assert_close(found.anomaly_map, drawn, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.image_score, drawn.flatten(1).amax(1), rtol=1e-4, atol=1e-5)


def test_a_first_step_has_a_rate_for_each_part():
    """Adam's first step is ``-lr g / (|g| + eps)``, with the decay in g."""
    task, batch = make(adaptor_rate=1e-3, learning_rate=2e-3, weight_decay=0.1).train(), images()
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    optimizer = task.configure_optimizers()
    task.training_step(batch)["loss"].backward()
    optimizer.step()
    for name, rate in (("adaptor.weight", 1e-3), ("discriminator.0.weight", 2e-3)):
        weight = task.get_parameter(name)
        gradient = weight.grad + 0.1 * before[name]
        expected = -rate * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(weight.detach() - before[name], expected, rtol=1e-2, atol=1e-6)
    assert not any(p.requires_grad for p in task.backbone.parameters())


def test_what_a_method_adds_is_trained_with_the_discriminator():
    """DBE's bias on the features, and MOON's projection."""
    task = make(adaptor_rate=1e-3, learning_rate=1e-2)
    task.offset, task.projection = torch.nn.Parameter(torch.zeros(8)), torch.nn.Linear(8, 2)
    adaptor, others = task.configure_optimizers().param_groups
    assert (adaptor["lr"], others["lr"]) == (1e-3, 1e-2)
    assert [len(group["params"]) for group in (adaptor, others)] == [2, 5 + 3]
    trained = {id(weight) for group in (adaptor, others) for weight in group["params"]}
    assert trained == {id(weight) for weight in task.trainable}


def test_a_plain_trainer_standardises():
    torch.manual_seed(0)
    task, batches = SimpleNet(TinyPyramid(), grid=4, image_size=32, hidden=6), DataLoader([images()], None)
    trainer = plain_trainer()
    trainer.fit(task, batches)
    assert trainer.predict(task, batches)[0].anomaly_map.isfinite().all()
