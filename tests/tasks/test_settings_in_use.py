"""Settings of tasks reach maps and the later steps of optimisers; configurations give the defaults."""

import functools
import math

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch.nn import functional as F

from lit_fedad.core.building import build, parameters_of
from lit_fedad.core.config import compose
from lit_fedad.tasks.dinomaly import Dinomaly
from lit_fedad.tasks.efficient_ad import EfficientAD
from lit_fedad.tasks.padim import PaDiM
from lit_fedad.tasks.patches import AnomalyMap
from lit_fedad.tasks.reverse_distillation import ReverseDistillation
from lit_fedad.tasks.simplenet import SimpleNet


class Layers(TinyPyramid):
    """Two maps of one form, as of a transformer."""

    channels = (64, 64)

    def forward(self, images):
        maps = F.avg_pool2d(images, 8).mean(1, keepdim=True).expand(-1, 64, -1, -1)
        return [maps, 2 * maps]


PATCHES = {"backbone": TinyPyramid(), "grid": 4, "image_size": 32}
TASKS = {
    "dinomaly": functools.partial(Dinomaly, backbone=Layers(), image_size=32),
    "efficient_ad": functools.partial(EfficientAD, **PATCHES, width=6, latent=4),
    "simplenet": functools.partial(SimpleNet, **PATCHES, hidden=6),
    "reverse_distillation": functools.partial(ReverseDistillation, TinyPyramid(), image_size=32, blocks=1),
    "padim": functools.partial(PaDiM, **PATCHES, channels=5),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("sigma", [0.0, 3.0])
def test_maps_are_as_smooth_as_sigma_says(name, sigma):
    maps = [part for part in TASKS[name](sigma=sigma).modules() if isinstance(part, AnomalyMap)]
    assert maps
    for own in maps:
        assert torch.equal(own.rows, AnomalyMap((own.rows.shape[1], 1), 32, sigma).rows)


@pytest.mark.parametrize("name", TASKS)
def test_configurations_give_the_classes_defaults(name):
    section = compose(["method=fedavg", f"task={name}"])["task"]
    given = {key: section[key] for key in section if key not in ("_target_", "grid", "image_size")}
    assert given == {key: parameters_of(TASKS[name].func)[key].default for key in given}


@pytest.mark.parametrize(
    ("name", "momentum", "greatest"),
    [("dinomaly", 0.9, True), ("efficient_ad", 0.9, False), ("simplenet", 0.9, False),
     ("reverse_distillation", 0.5, False), ("memory_bank", 0.9, True)],
)  # fmt: skip
def test_a_second_step_without_gradient_is_that_of_the_authors_adam(name, momentum, greatest):
    """After gradients 1 and 0: m is beta1 / (1 + beta1), v is beta2 / (1 + beta2), or 1 / (1 + beta2) by AMSGrad."""
    if name == "memory_bank":
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = build(compose(["task=memory_bank"])["task"]["optimizer"])([weight], lr=0.1)
    else:
        optimizer = TASKS[name](learning_rate=0.1).configure_optimizers()
    weight = optimizer.param_groups[-1]["params"][-1]
    moved = []
    for slope in (1.0, 0.0):
        weight.data.zero_()
        weight.grad = torch.full_like(weight, slope)
        optimizer.step()
        moved.append(weight.flatten()[0].item())
    spread = (1 if greatest else 0.999) / 1.999
    expected = -0.1 * momentum / (1 + momentum) / math.sqrt(spread)
    assert moved == [pytest.approx(-0.1, rel=1e-5), pytest.approx(expected, rel=1e-5)]
