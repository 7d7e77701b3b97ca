"""FedDM's client: condensation by hand, the noise on weights, and how images start."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from helpers.feddm import FABRIC, client_of, make, mean, nearly, pieces, std
from torch.nn import functional as F

from lit_fedad.condensation.condense import Condensation
from lit_fedad.contracts import Context
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES


def moments(weights, images):
    """Features and logits, each batch by its own statistics."""
    maps = F.conv2d(images, weights["encoder.mix.weight"], stride=2)
    centred = maps - maps.mean((0, 2, 3), keepdim=True)
    scaled = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    gain, shift = (weights[f"encoder.norm.{name}"].view(-1, 1, 1) for name in ("weight", "bias"))
    features = (gain * scaled + shift).relu().mean((2, 3))
    logits = features @ weights["classifier.weight"].T + weights["classifier.bias"]
    return torch.cat([features, logits], 1)


def test_the_preset_compares_images_as_they_are():
    """As the public code, which augments nothing."""
    preset = yaml.safe_load((Path(__file__).parents[3] / "conf/method/feddm.yaml").read_text())
    options = {k: v for k, v in preset["method"]["client"]["condensation"].items() if k != "_target_"}
    condensation = Condensation(**{**options, "steps": 3, "batch": 2, "learning_rate": 1e-30})
    real, start, seen = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8), []

    def distance(batch, synthetic):
        seen.append((batch.images, synthetic.detach()))
        return synthetic.square().sum()

    draws = torch.Generator().manual_seed(0)
    condensation(start, [1, 1], real, [torch.ones(1)] * 2, distance, draws, FABRIC)
    assert all(torch.equal(images, real) and torch.equal(synthetic, start) for images, synthetic in seen)


def test_a_client_by_hand(feddm, data, tap):
    """Three steps in double precision, each under weights that are rho away, on batches of four of each class."""
    steps, rate, momentum, radius = 3, 0.7, 0.5, 2.0
    settings = {"radius": radius, "init": "noise", "quantize": False}
    condensation = Condensation(steps, rate, momentum, batch=4, augment=False)
    federation = feddm(client={**settings, "condensation": condensation}, rounds=1, channel=tap)

    context = Context(seed=0, round=1, client=0)
    weights = {name: p.detach().double() for name, p in make().named_parameters()}
    rows = list(data[0].dataset)
    piles = [torch.stack([row["image"] for row in rows if row["label"] == c]).double() for c in (0, 1)]
    with context.seeded("disturbance"):
        noise = [{n: torch.randn(w.shape).double() for n, w in weights.items()} for _ in range(steps)]
    generator = context.generator("condensation")
    images, velocity, losses = torch.randn(6, 3, 8, 8, generator=generator).double(), 0.0, []
    for direction in noise:
        batch = torch.cat(
            [p[torch.multinomial(torch.ones(len(p)), 4, True, generator=generator)] for p in piles]
        )
        norm = math.sqrt(sum(float(part.square().sum()) for part in direction.values()))
        moved = {name: weight + radius * direction[name] / norm for name, weight in weights.items()}
        images.requires_grad_()
        real, synthetic = moments(moved, batch), moments(moved, images)
        loss = sum(
            ((real[4 * c : 4 * c + 4].mean(0) - synthetic[3 * c : 3 * c + 3].mean(0)) ** 2).sum()
            for c in (0, 1)
        )
        (gradient,) = torch.autograd.grad(loss, images)
        velocity = momentum * velocity + gradient
        images = (images - rate * velocity).detach()
        losses.append(float(loss.detach()))

    nearly(tap.uploads(1)[0][IMAGES], (images * std + mean).float())
    told = federation.history[0].per_client[0]
    assert told == pytest.approx({"loss": sum(losses) / steps, "last_loss": losses[-1]}, rel=1e-4)


def test_the_disturbance_has_norm_rho_and_is_anew_each_step(data, exactly):
    task, radius, seen = make(), 3.0, []
    received = {name: p.detach().clone() for name, p in task.named_parameters()}
    layers = {
        "encoder.mix": task.encoder.mix,
        "encoder.norm": task.encoder.norm,
        "classifier": task.classifier,
    }

    def look(layer, inputs):
        seen.append(
            {
                f"{name}.{n}": p.detach().clone()
                for name, own in layers.items()
                for n, p in own.named_parameters()
            }
        )

    task.classifier.register_forward_pre_hook(look)
    client = client_of(task, radius=radius, condensation=Condensation(2, batch=4))
    client.context = Context(0, 1, 0)
    client.condense(data[0], FABRIC)
    first, first_again, second, _ = seen  # real and synthetic images of two steps
    for under in (first, second):
        assert under.keys() == received.keys()
        moved = torch.cat([(under[name] - received[name]).flatten() for name in received])
        assert float(moved.norm()) == pytest.approx(radius, rel=1e-5)
    exactly(first, first_again)
    assert (first["encoder.mix.weight"] - second["encoder.mix.weight"]).norm() > 0.1
    exactly({name: p.detach() for name, p in task.named_parameters()}, received)
    assert all(p.requires_grad for p in task.parameters())


def test_without_steps_the_start_is_sent(data):
    client = client_of(init="noise", min_synthetic=3)
    client.context = Context(0, 1, 0)
    assert client.condense(data[0], FABRIC) == {}
    noise = torch.randn(6, 3, 8, 8, generator=Context(0, 1, 0).generator("condensation"))
    sent = client.send(data[0])[IMAGES]
    assert torch.equal(sent, (255 * (noise * std + mean).clamp(0, 1)).round().to(torch.uint8))


@pytest.mark.parametrize(("minimum", "distinct"), [(2, 4), (7, 3 + 5)])
def test_real_images_are_a_start_each_once_while_there_are_enough(data, minimum, distinct):
    client = client_of(init="real", min_synthetic=minimum)
    client.context = Context(0, 1, 0)
    client.condense(data[0], FABRIC)
    message = client.send(data[0])
    own = [((255 * (row["image"] * std + mean)).round().byte(), row["label"]) for row in data[0].dataset]
    labels = message[CLASSES].repeat_interleave(message[COUNTS])
    assert pieces(message[IMAGES], labels) <= pieces(*zip(*own, strict=True))
    assert len(pieces(message[IMAGES], labels)) == distinct
