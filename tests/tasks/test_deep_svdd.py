"""Deep SVDD: both objectives by hand, a centre off zero, and no way to map everything to one point."""

import functools

import numpy as np
import pytest
import torch
from helpers.frozen import frozen_encoder
from helpers.trainers import plain_trainer
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import LeNet, LeNetDecoder, contrast_normalised
from lit_fedad.tasks.deep_svdd import DeepSVDD, off_zero

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def make(seed: int = 0, **overrides) -> DeepSVDD:
    torch.manual_seed(seed)
    parts = {
        "encoder": LeNet(16, channels=2),
        "decoder": functools.partial(LeNetDecoder, channels=2),
        "image_size": 16,
        "mean": MEAN,
        "std": STD,
        "rounds": 30,
        "width": 3,
    }
    return DeepSVDD(**{**parts, **overrides}).eval()


def batch(images: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    return {"image": torch.randn(images, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


@pytest.fixture
def points():
    """z of three images, around the centre (1, 0, -1): squared distances 0, 5 and 9."""
    return torch.tensor([[1.0, 0.0, -1.0], [1.0, 2.0, 0.0], [3.0, 1.0, 1.0]])


def test_both_objectives_by_hand(points):
    task, soft = make(), make(objective="soft-boundary", nu=0.5, radius_rounds=2)
    for each in (task, soft):
        each.centre = torch.tensor([1.0, 0.0, -1.0])
    assert task.objective(points, {})["loss"].item() == pytest.approx(14 / 3)
    assert task.predict(points, {}).image_score.tolist() == [0, 5, 9]
    soft.radius, soft.round = torch.tensor(2.0), 2
    # 2^2 + (0 + (5 - 4) + (9 - 4)) / 3 / 0.5
    assert soft.objective(points, {})["loss"].item() == pytest.approx(8)
    assert soft.radius.item() == 2  # not yet
    soft.round = 3
    soft.objective(points, {})
    assert soft.radius.item() == pytest.approx(5**0.5)  # the median distance
    assert soft.predict(points, {}).image_score.tolist() == pytest.approx([-5, 0, 4], abs=1e-6)


@pytest.mark.parametrize("count", [7, 1])
def test_the_centre_is_the_mean_of_local_features_and_stays(count):
    task = make()
    images = batch(count)["image"]
    loader = DataLoader([{"image": image} for image in images], batch_size=3)
    task.refresh(loader, Context(0, 0, 0), first=True)
    with torch.no_grad():
        mean = task({"image": images}).mean(0)
    torch.testing.assert_close(task.feature_mean(loader), mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.centre, off_zero(mean, 0.1), rtol=1e-5, atol=1e-6)
    before = task.centre.clone()
    nn.init.ones_(task.compress.weight)
    task.refresh(loader, Context(0, 1, 0))
    assert torch.equal(task.centre, before)


def test_coordinates_near_zero_are_moved_away_from_it():
    mean = torch.tensor([0.05, -0.05, 0.0, 0.2, -3.0])
    assert off_zero(mean, 0.1).tolist() == pytest.approx([0.1, -0.1, 0.1, 0.2, -3.0])
    assert torch.equal(off_zero(mean, 0.0), mean)


@pytest.mark.parametrize("encoder", ["lenet", "frozen"])
def test_nothing_on_the_way_to_the_bottleneck_adds_a_constant(encoder):
    """An input of zeros stays there: no weights but zeros collapse to a centre elsewhere."""
    task = make(**({} if encoder == "lenet" else {"encoder": frozen_encoder(hidden=4)}))
    way = [task.compress, task.encoder]
    assert not [
        name for part in way for name, w in part.named_parameters() if "bias" in name and w.requires_grad
    ]
    affine = [layer for part in way for layer in part.modules() if getattr(layer, "affine", False)]
    assert not affine


def test_pixels_are_contrast_normalised_image_by_image():
    task, images = make(pixels="contrast"), batch(3)["image"]
    pixels = (images * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)).numpy()
    expected = [(p - p.mean()) / np.abs(p - p.mean()).mean() for p in pixels]
    np.testing.assert_allclose(
        task.inputs({"image": images}), 0.5 + np.stack(expected) / 8, rtol=1e-4, atol=1e-6
    )
    flat = contrast_normalised(torch.full((1, 3, 4, 4), 0.7))  # one colour: nothing but rounding
    assert flat.abs().max() < 1e-3


def test_pre_training_reconstructs_what_the_encoder_sees():
    for task in (make(), make(encoder=frozen_encoder())):
        with task.reconstructing():
            loss = task.training_step(batch())["loss"]
        with torch.no_grad():
            rebuilt = task.decoder(task(batch()))
            assert loss.item() == pytest.approx(
                (rebuilt - task.inputs(batch())).square().mean().item(), rel=1e-5
            )
        assert not task.pretrains


def test_what_is_reconstructed_of_frozen_features_is_not_trained():
    task = make(learning_rate=0.1, encoder=frozen_encoder(hidden=4))
    before, optimizer = task.inputs(batch()), task.configure_optimizers()
    with task.reconstructing():
        for _ in range(3):
            optimizer.zero_grad()
            task.training_step(batch())["loss"].backward()
            optimizer.step()
    assert torch.equal(task.inputs(batch()), before)


def test_by_default_it_falls_after_a_third_of_the_rounds_to_the_round():
    """The original's 150 epochs have their only milestone at 50; here 30 and 10."""
    task = make(learning_rate=0.3, decay_after=compose(["method=deep_svdd"])["task"]["decay_after"])
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [10])
    ours, theirs = [], []
    for task.round in range(1, 31):
        ours.append(task.configure_optimizers().param_groups[0]["lr"])
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert ours == pytest.approx(theirs)


def test_lenet_refuses_sides_that_it_cannot_halve():
    with pytest.raises(UserError, match="a multiple of 8"):
        LeNet(28)


@pytest.mark.filterwarnings("ignore")
def test_a_plain_trainer_puts_the_centre_once(tmp_path):
    task, batches, trainer = make(learning_rate=0.1), DataLoader([batch()], None), plain_trainer()
    first = off_zero(task.feature_mean(batches), task.margin)
    trainer.fit(task, batches)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    torch.testing.assert_close(task.centre, first)
    later = make(seed=1, learning_rate=0.1)
    plain_trainer(2).fit(later, batches, ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    torch.testing.assert_close(later.centre, first)
