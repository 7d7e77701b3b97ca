"""Condensation of all classes at once, against a loop over classes, and what it looks at."""

from functools import partial

import pytest
import torch
from helpers.draws import generator, rows
from helpers.refusals import refusal
from helpers.scaled import scaled_fabric
from lightning.fabric import Fabric
from torch import nn

from lit_fedad.condensation.batch_statistics import apply, record
from lit_fedad.condensation.condense import Condensation, Descent
from lit_fedad.condensation.kernels import class_mmd, mmd
from lit_fedad.core.errors import UserError
from lit_fedad.models.diff_augment import Draw, diff_augment, draw

FABRIC = Fabric(accelerator="cpu", devices=1)
COUNTS, SIZES = [2, 1, 3], [4, 1, 6]


def same(images):
    return images


def alike(images, drawn):
    return diff_augment(images, drawn, torch.zeros(len(images), dtype=torch.int64))


def apart(drawn: Draw) -> list[Draw]:
    return [Draw(*parts) for parts in zip(drawn.operation.split(1), drawn.numbers.split(1), strict=True)]


class Encoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.double().requires_grad_(False)


def condense(settings, distance, start=None, counts=COUNTS, seed: int = 0, fabric=FABRIC):
    """Six images of 8 pixels that stand for eleven real ones of three classes, drawn unevenly."""
    start = rows(sum(counts), 3, 8, 8) if start is None else start
    real = rows(sum(SIZES), 3, 8, 8, seed=1)
    weights = [torch.linspace(1, 2, size) for size in SIZES]
    return Condensation(**settings)(start, counts, real, weights, distance, generator(seed), fabric)


@pytest.mark.parametrize("kernel", ["linear", "gaussian"])
@pytest.mark.parametrize("augment", [False, True])
def test_all_classes_at_once_are_each_class_on_its_own(kernel, augment):
    """The same draws, and statistics of the batch of all classes, but one class after another through the network.

    An image that is drawn twice goes through it twice.
    """
    encoder, steps, batch, rate, momentum = Encoder(), 4, 3, 0.5, 0.6

    def distance(real, synthetic):
        target, statistics = record(encoder, real.images, real.times)
        found = apply(encoder, synthetic, statistics)
        return class_mmd(target, found, real.times, real.sizes, COUNTS, kernel)

    settings = {"batch": batch, "learning_rate": rate, "momentum": momentum, "augment": augment}
    found, curve = condense({"steps": steps, **settings}, distance)

    draws = generator()
    piles = rows(sum(SIZES), 3, 8, 8, seed=1).split(SIZES)
    images, velocity = list(rows(sum(COUNTS), 3, 8, 8).split(COUNTS)), [0.0] * 3
    by_hand = []
    for _ in range(steps):
        batches = [
            pile[torch.multinomial(torch.linspace(1, 2, len(pile)), batch, True, generator=draws)]
            for pile in piles
        ]
        own = (
            [partial(alike, drawn=draws_of) for draws_of in apart(draw(3, draws))] if augment else [same] * 3
        )
        batches = [look(part) for look, part in zip(own, batches, strict=True)]
        target, statistics = record(encoder, torch.cat(batches))
        losses = []
        for c, of_real in enumerate(target.split(batch)):
            part = images[c].requires_grad_()
            loss = mmd(of_real, apply(encoder, own[c](part), statistics), kernel)
            (gradient,) = torch.autograd.grad(loss, part)
            velocity[c] = momentum * velocity[c] + gradient
            images[c] = (part - rate * velocity[c]).detach()
            losses.append(float(loss.detach()))
        by_hand.append(sum(losses))
    assert curve == pytest.approx(by_hand, rel=1e-6)
    torch.testing.assert_close(found, torch.cat(images), rtol=1e-6, atol=1e-8)
    assert (found - rows(6, 3, 8, 8)).abs().max() > 1e-3


def test_a_class_is_augmented_alike_on_both_sides_and_otherwise_than_the_next():
    """Real images that are the synthetic ones stay so in every step; nothing moves, as the loss is flat."""
    image = rows(3, 8, 8).float()
    seen = []

    def distance(batch, images):
        seen.append((batch, images.detach()))
        return 0 * images.sum()

    Condensation(steps=12, batch=2)(
        image.expand(3, 3, 8, 8),
        [1, 2],
        image.expand(2, 3, 8, 8),
        [torch.ones(1)] * 2,
        distance,
        generator(),
        FABRIC,
    )
    for batch, images in seen:
        assert batch.times.tolist() == [2, 2]
        torch.testing.assert_close(batch.images[[0, 1, 1]], images)
    assert len({batch.images[0].numpy().tobytes() for batch, _ in seen}) > 6
    assert sum(not torch.allclose(*batch.images, atol=0.01) for batch, _ in seen) > 6


def test_without_augmentation_images_are_looked_at_as_they_are():
    real, seen = rows(sum(SIZES), 3, 8, 8, seed=1), []

    def distance(batch, images):
        seen.append((batch, images.detach()))
        return 0 * images.sum()

    condense({"steps": 2, "batch": 5, "augment": False}, distance)
    for batch, images in seen:
        assert torch.equal(images, rows(6, 3, 8, 8))
        assert [int(times.sum()) for times in batch.times.split(batch.sizes)] == [5] * 3
        for pile, part in zip(real.split(SIZES), batch.images.split(batch.sizes), strict=True):
            assert all(sum(torch.equal(image, own) for own in pile) == 1 for image in part)
            assert len(part.unique(dim=0)) == len(part)


@pytest.mark.parametrize(("clip", "length"), [(None, 12.0), (100.0, 12.0), (0.5, 0.5)])
def test_the_gradient_of_all_images_together_is_no_longer_than_the_clip(clip, length):
    """A loss whose gradient is 2 in each of 36 values: its norm is 12."""
    start = rows(3, 1, 3, 4).float()

    def distance(batch, images):
        return 2 * images.sum()

    settings = {"batch": 1, "learning_rate": 0.1, "clip": clip, "augment": False}
    found, _ = condense({"steps": 1, **settings}, distance, start, [1, 1, 1])
    moved = start - found
    assert float(moved.norm()) == pytest.approx(0.1 * length, rel=1e-4)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.1 * length / 6))


def test_the_clip_is_of_the_gradient_not_of_the_scaled_one():
    """Under 16-mixed, gradients are 65,536 times as long before a step; at length 12, nothing is clipped to 100."""
    start = rows(3, 1, 3, 4).float()
    settings = {"steps": 1, "batch": 1, "learning_rate": 0.1, "clip": 100.0, "augment": False}
    found, _ = condense(
        settings, lambda batch, images: 2 * images.sum(), start, [1, 1, 1], fabric=scaled_fabric()
    )
    torch.testing.assert_close(start - found, torch.full_like(start, 0.2))


def test_the_start_stays_and_comes_back_where_there_is_no_step():
    start = rows(6, 3, 8, 8)
    found, losses = condense({"steps": 0}, lambda batch, images: images.sum(), start)
    assert losses == []
    assert torch.equal(found, start)
    found, losses = condense({"steps": 2}, lambda batch, images: images.sum(), start)
    assert len(losses) == 2
    assert torch.equal(start, rows(6, 3, 8, 8))
    assert not torch.equal(found, start)
    assert not found.requires_grad


def test_images_stay_float32_in_mixed_precision():
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    encoder, seen = Encoder().float(), []

    def distance(batch, images):
        found = encoder(images)
        seen.append(found.dtype)
        return class_mmd(encoder(batch.images), found, batch.times, batch.sizes, [2])

    start, real = rows(2, 3, 8, 8).float(), rows(4, 3, 8, 8, seed=1).float()
    found, losses = Condensation(2, batch=2)(start, [2], real, [torch.ones(4)], distance, generator(), fabric)
    assert seen[0] == torch.bfloat16
    assert found.dtype == torch.float32
    assert all(loss > 0 for loss in losses)


def test_a_loss_that_is_not_finite_is_named_in_one_line():
    with refusal(r"lower method\.client\.condensation\.learning_rate"):
        condense({"steps": 2}, lambda batch, images: images.sum() * torch.inf)


def test_a_last_step_that_leaves_the_numbers_is_refused():
    descent = Descent(1, 1e38)
    with pytest.raises(
        UserError, match=r"condensation diverged; lower method\.server\.descent\.learning_rate"
    ):
        descent.descend(torch.ones(1, 1, 2, 2), lambda images: 1e3 * images.sum(), FABRIC)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"steps": 1, "batch": 0}, "batch=0"),
        ({"steps": 1, "learning_rate": 0.0}, r"learning_rate=0\.0"),
        ({"steps": 1, "momentum": -0.5}, r"momentum=-0\.5"),
        ({"steps": 1, "momentum": 1.0}, r"momentum=1\.0"),
        ({"steps": 1, "clip": -1.0}, r"clip=-1\.0"),
        ({"steps": 1, "clip": 0.0}, r"clip=0\.0"),
    ],
)
def test_settings_out_of_range_are_refused(setting, said):
    with refusal(said):
        Condensation(**setting)
