"""ELSA: its energy, its loss and its score by hand."""

import numpy as np
import pytest
import torch
from helpers.frozen import frozen_encoder
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.core.errors import UserError
from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive_losses import SimCLR
from lit_fedad.tasks.elsa import Elsa

CONTEXT = Context(seed=0, round=0, client=0)


def make(**overrides) -> Elsa:
    torch.manual_seed(0)
    parts = {
        "encoder": frozen_encoder(hidden=6),
        "warmup_loss": SimCLR(),
        "warmup": 1,
        "views": ContrastiveViews(),
        "finetuning_views": ContrastiveViews((0.54, 0.54)),
        "projection": 3,
        "prototypes": 8,
    }
    return Elsa(**{**parts, **overrides}).eval()


def images(count: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def unit(count: int, width: int = 3, seed: int = 7) -> torch.Tensor:
    return nn.functional.normalize(
        torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=1
    )


def test_loss_and_score_by_hand():
    task = make(temperature=0.5)
    task.prototypes, task.projection = unit(8), nn.Identity()
    z, task.round = 5 * unit(4, seed=1), 2
    cosines = (unit(4, seed=1).double() @ unit(8).double().T).numpy()
    batch = {"views": z.view(2, 2, 3)}
    loss = (1 / np.log(np.exp(cosines / 0.5).sum(1))).mean()
    assert task.objective(z, batch)["loss"].item() == pytest.approx(loss, rel=1e-5)
    score = np.log(8) + 1 - np.log(np.exp(cosines).sum(1))
    np.testing.assert_allclose(task.predict(z, batch).image_score.numpy(), score, rtol=1e-5)


def test_counts_of_scores_tell_nearly_equal_images_apart():
    """After training all images lie near all prototypes; decisions know scores only by bin."""
    task = make(temperature=0.5)
    near = nn.functional.normalize(unit(1) + 0.03 * unit(40, seed=1), dim=1)
    task.prototypes, task.projection = near[:8], nn.Identity()
    counts = ScoreCounts.of(task.predict(near[8:], {}).image_score)
    assert len(counts.bins) > 20


def test_the_warm_up_is_simclr_by_sgd_and_then_adam():
    rates = {"learning_rate": 0.3, "momentum": 0.6, "weight_decay": 0.2, "finetuning_rate": 0.04}
    task = make(**rates)
    features = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    batch = {"views": features.view(2, 4, 8)}
    task.round = 1
    expected = SimCLR()(task.projection(features).view(2, 4, 3), batch)["loss"]
    assert torch.equal(task.objective(features, batch)["loss"], expected)
    (settings,) = task.configure_optimizers().param_groups
    assert [settings[key] for key in ("lr", "momentum", "weight_decay")] == [0.3, 0.6, 0.2]
    task.round = 2
    (settings,) = task.configure_optimizers().param_groups
    assert [settings[key] for key in ("lr", "betas", "weight_decay")] == [0.04, (0.9, 0.999), 0]
    assert not torch.equal(task.objective(features, batch)["loss"], expected)


def test_crops_after_the_warm_up_have_one_area(monkeypatch):
    """As the authors' fine-tuning: 54 % of the image, whatever the warm-up draws."""
    areas = {1: [], 2: []}
    task = make(views=ContrastiveViews((0.08, 1.0)))
    for number, found in areas.items():
        task.round = number
        monkeypatch.setattr(
            "lit_fedad.models.contrastive_views.crop_resize",
            lambda images, boxes, mirrored, found=found: (
                found.extend(boxes[:, 2:].prod(1).tolist()),
                images,
            )[1],
        )
        task.draw_views(torch.rand(50, 3, 32, 32))
    assert min(areas[1]) < 0.3 * 32**2
    np.testing.assert_allclose(np.array(areas[2]) / 32**2, 0.54, atol=0.04)


def test_prototypes_are_renewed_under_the_current_weights():
    task = make()
    data = DataLoader([{"image": one} for one in images(8)], batch_size=3)
    task.refresh(data, CONTEXT, first=True)
    with torch.no_grad():
        z = task.project(task({"image": images(8)}))
    found = sorted(task.prototypes.tolist())
    # As many as images: the images.
    np.testing.assert_allclose(found, sorted(z.tolist()), atol=1e-5)
    with torch.no_grad():
        task.projection[2].bias += 1.0
    task.refresh(data, CONTEXT)
    assert not np.allclose(sorted(task.prototypes.tolist()), found)


def test_prototypes_are_the_directions_of_their_images():
    """Spherical k-means at its end: a centre is the mean of the z of largest cosine, scaled to length 1."""
    task = make()
    task.refresh(DataLoader([{"image": one} for one in images(24)], batch_size=9), CONTEXT, first=True)
    with torch.no_grad():
        z = task.project(task({"image": images(24)})).double().numpy()
    prototypes = task.prototypes.double().numpy()
    nearest = (z @ prototypes.T).argmax(1)
    means = np.stack([z[nearest == number].mean(0) for number in range(8)])
    np.testing.assert_allclose(prototypes, means / np.linalg.norm(means, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"prototypes": 7}, "task.prototypes=8 or more"),
        ({"temperature": 0.001}, "give a higher temperature"),  # exp(1000) is more than a float holds
    ],
)
def test_too_few_prototypes_for_the_temperature_are_refused(settings, line):
    with pytest.raises(UserError, match=line):
        make(**settings)
