"""Trained detectors in mixed precision: networks compute in bfloat16, losses in single precision."""

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid

from lit_fedad.tasks.efficient_ad import EfficientAD
from lit_fedad.tasks.reverse_distillation import ReverseDistillation
from lit_fedad.tasks.simplenet import SimpleNet


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        (EfficientAD, {"grid": 4, "width": 6, "latent": 4}),
        (ReverseDistillation, {"blocks": 1}),
        (SimpleNet, {"grid": 4, "hidden": 6, "standardise": False}),
    ],
)
def test_the_loss_of_a_step_is_near_that_in_full_precision(task, settings):
    torch.manual_seed(0)
    made = task(TinyPyramid(), image_size=32, **settings)
    if task is EfficientAD:
        made.load_statistics(torch.zeros(8), torch.ones(8))
    losses = []
    for mixed in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            loss = made.training_step({"image": torch.rand(3, 3, 32, 32)})["loss"]
        loss.backward()
        assert loss.dtype == torch.float32
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]
