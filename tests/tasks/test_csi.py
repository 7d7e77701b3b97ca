"""CSI: its loss, its views and its score by hand."""

import math

import numpy as np
import pytest
import torch
from helpers.frozen import frozen_encoder
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.core.errors import UserError
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.detector import Detector, trace
from lit_fedad.methods.local import LocalClient
from lit_fedad.metrics.conformal import DecisionRule, ScoreCounts
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks import contrastive_losses
from lit_fedad.tasks.csi import CSI

CONTEXT = Context(seed=0, round=0, client=0)


class Corners(nn.Module):
    """The mean of each quadrant of the first channel: turning an image permutes its features."""

    num_features = 4

    def forward(self, images):
        return F.adaptive_avg_pool2d(images[:, :1], 2).flatten(1)


def still() -> ContrastiveViews:
    return ContrastiveViews(crop_scale=(1, 1), ratio=(1, 1), flip=0, jitter_probability=0, greyscale=0)


def make(**overrides) -> CSI:
    torch.manual_seed(0)
    parts = {
        "encoder": Corners(),
        "views": still(),
        "rounds": 20,
        "image_size": 4,
        "projection": 4,
        "samples": 0,
    }
    task = CSI(**{**parts, **overrides})
    if isinstance(parts["encoder"], Corners) and "encoder" not in overrides:
        task.projection = nn.Identity()
        task.shift.weight.data, task.shift.bias.data = torch.eye(4), torch.zeros(4)
    return task.eval()


def image(*corners: float) -> torch.Tensor:
    """Four quadrants of 2 x 2 pixels: top left, top right, bottom left, bottom right."""
    return (
        torch.tensor([float(corner) for corner in corners])
        .view(1, 2, 2)
        .repeat_interleave(2, 1)
        .repeat_interleave(2, 2)
        .repeat(3, 1, 1)
    )


def loader(*images: torch.Tensor) -> DataLoader:
    return DataLoader([{"image": one, "index": n} for n, one in enumerate(images)], batch_size=2)


def quarters(a, b, c, d):
    """The corners after 0, 1, 2 and 3 quarter turns, anticlockwise."""
    return [(a, b, c, d), (b, d, a, c), (d, c, b, a), (c, a, d, b)]


def test_score_by_hand():
    bank = [(1.0, 2.0, 3.0, 4.0), (4.0, 1.0, 2.0, 2.0)]
    query = (0.5, 3.0, 1.0, 1.0)
    task = make()
    task.refresh(loader(*(image(*one) for one in bank)), CONTEXT, first=True)
    expected = 0.0
    for turn in range(4):
        known = np.array([quarters(*one)[turn] for one in bank])
        z = np.array(quarters(*query)[turn])
        norms = np.linalg.norm(known, axis=1)
        # The classifier is the identity: the logit of rotation k is number k of the features.
        expected += (known @ z / norms).max() / norms.mean() + z[turn] / known[:, turn].mean()
    found = task.predict_step({"image": image(*query)[None]}).image_score
    assert found.item() == pytest.approx(-expected / 4, rel=1e-5)


def test_loss_by_hand():
    task = make()
    batch = {"image": torch.rand(3, 3, 4, 4), "index": torch.arange(3)}
    view = task.view(batch)
    assert view["views"].shape == (8, 3, 3, 4, 4)
    features = task(view)
    outputs = task.objective(features, view)
    contrast = contrastive_losses.CSI(0.5)(features.view(8, 3, 4), {})["loss"]
    rows = features.double().numpy()
    turns = np.repeat([0, 0, 1, 1, 2, 2, 3, 3], 3)
    rotation = (np.log(np.exp(rows).sum(1)) - rows[np.arange(24), turns]).mean()
    assert outputs["rotation"].item() == pytest.approx(rotation, rel=1e-5)
    assert outputs["loss"].item() == pytest.approx(contrast.item() + rotation, rel=1e-5)


def test_mirroring_comes_before_turning():
    """A picture that is its own mirror image has four kinds of views; after turning, mirroring would make 90 of 270."""
    task = make(mirror=1.0)
    picture = image(1, 1, 5, 5)[None] / 10
    views = task.draw_views(picture)
    for place, turn in enumerate(contrastive_losses.CSI.turns):
        torch.testing.assert_close(views[place], torch.rot90(picture, turn, (2, 3)))


def test_views_that_are_mirrored_after_turning_are_refused():
    with pytest.raises(UserError, match="task.views.flip=0.5"):
        make(views=ContrastiveViews())


def test_crops_are_the_same_for_an_image_in_any_batch():
    task = make(samples=3, image_size=16, encoder=Corners())
    images = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    task.refresh(loader(*images), CONTEXT, first=True)
    together = task.predict_step({"image": images}).image_score
    alone = torch.cat([task.predict_step({"image": one[None]}).image_score for one in images])
    torch.testing.assert_close(together, alone)
    plain = make(samples=0, image_size=16, encoder=Corners())
    plain.refresh(loader(*images), CONTEXT, first=True)
    assert not torch.allclose(together, plain.predict_step({"image": images}).image_score)


@pytest.mark.slow
def test_the_graph_takes_any_number_of_images():
    task = make(samples=2)
    task.refresh(loader(image(1, 2, 3, 4)), CONTEXT, first=True)
    rule = DecisionRule("drawn", ScoreCounts.of(torch.tensor([0.0])), 0.5)
    detector = Detector(LocalClient(task), ImageTransform(4), rule)
    pixels = torch.rand(3, 3, 4, 4)
    found = trace(detector, ImageTransform(4)).module()(pixels)
    torch.testing.assert_close(found["image_score"], detector(pixels)["image_score"])


def test_frozen_features_of_turned_images_score_as_their_pixels():
    task = make(encoder=frozen_encoder(), image_size=16)
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    task.refresh(loader(*images), CONTEXT, first=True)
    turned = torch.stack(
        [task.encoder.features(torch.rot90(images, turn, (2, 3))) for turn in range(4)], dim=1
    )
    from_features = task.predict_step({"image": turned[:, 0], "turned": turned}).image_score
    torch.testing.assert_close(task.predict_step({"image": images}).image_score, from_features)


def test_crops_of_frozen_features_are_refused():
    with pytest.raises(UserError, match="task.samples=10: frozen features"):
        make(encoder=frozen_encoder(), samples=10)


def test_a_bank_of_another_size_is_loaded():
    one, other = make(), make()
    one.refresh(loader(image(1, 2, 3, 4), image(2, 2, 2, 1), image(0, 1, 0, 1)), CONTEXT, first=True)
    other.load_state_dict(one.state_dict())
    batch = {"image": torch.rand(2, 3, 4, 4)}
    assert torch.equal(one.predict_step(batch).image_score, other.predict_step(batch).image_score)


def test_without_a_bank_nothing_is_scored():
    with pytest.raises(UserError, match="no bank"):
        make().predict_step({"image": torch.rand(2, 3, 4, 4)})


def test_learning_rate_rises_and_falls():
    task = make(warmup_rounds=4, rounds=12, learning_rate=2.0)
    rates = []
    for task.round in (1, 3, 5, 9, 13):
        rates.append(task.configure_optimizers().param_groups[0]["lr"])
    assert rates == pytest.approx([0.2, 2 * 0.55, 2.0, 1 + math.cos(math.pi / 2), 0.0])


def test_steps_are_as_long_relative_to_the_weights_without_weight_decay():
    """LARS: |step| = rate * 0.001 * |w|, whatever the length of the gradient."""
    task = make(weight_decay=0.0, momentum=0.0)
    optimizer = task.configure_optimizers()
    before = task.shift.weight.detach().clone()
    task.shift.weight.grad = torch.full_like(before, 30.0)
    optimizer.step()
    moved = np.linalg.norm((task.shift.weight.detach() - before).numpy())
    rate = 0.1  # a tenth of the largest, at first
    assert moved == pytest.approx(rate * 0.001 * np.linalg.norm(before.numpy()), rel=1e-2)
