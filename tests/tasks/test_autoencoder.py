"""The autoencoder: its errors, its scores, its configuration, and its life under a plain Trainer."""

import functools

import numpy as np
import pytest
import torch
from helpers.trainers import plain_trainer
from scipy.ndimage import gaussian_filter
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import ConvNet, Decoder
from lit_fedad.tasks.autoencoder import Autoencoder

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make(seed: int = 0, **overrides) -> Autoencoder:
    torch.manual_seed(seed)
    parts = {
        "encoder": ConvNet(image_size=16, channels=16),
        "decoder": functools.partial(Decoder, channels=32),
        "image_size": 16,
        "mean": MEAN,
        "std": STD,
    }
    return Autoencoder(**{**parts, **overrides})


def normalised(images: torch.Tensor) -> torch.Tensor:
    return (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def smooth_images(count: int, seed: int) -> torch.Tensor:
    """Images in [0, 1] that are mixtures of three waves."""
    side = torch.linspace(0, torch.pi, 16)
    waves = torch.stack(
        [side.cos()[:, None] * torch.ones(16), side.cos() * torch.ones(16, 1), side.sin().outer(side.sin())]
    )
    weights = torch.rand(count, 3, 3, generator=torch.Generator().manual_seed(seed)) - 0.5
    return torch.einsum("ncw,wij->ncij", weights, waves).div(3).add(0.5)


def loader(images: torch.Tensor) -> DataLoader:
    return DataLoader([{"image": image} for image in normalised(images)], batch_size=8)


def test_scores_are_errors_of_pixels_in_0_to_1():
    task = make(sigma=1.5).eval()
    images = torch.rand(4, 3, 16, 16)
    batch = {"image": normalised(images)}
    with torch.no_grad():
        prediction = task.predict_step(batch)
        reconstructed = task.decoder(task.encoder(batch["image"])).numpy()
        loss = task.training_step(batch)["loss"]
    errors = ((reconstructed - images.numpy()) ** 2).mean(axis=1)
    np.testing.assert_allclose(prediction.image_score, errors.mean(axis=(1, 2)), rtol=1e-4)
    assert float(loss) == pytest.approx(float(errors.mean()), rel=1e-4)
    expected = np.stack([gaussian_filter(error.astype(np.float64), 1.5) for error in errors])
    np.testing.assert_allclose(prediction.anomaly_map, expected, rtol=1e-4)


def test_a_perfect_reconstruction_scores_0():
    images = torch.rand(2, 3, 16, 16)

    class Memory(nn.Module):
        def forward(self, latent):
            return images

    task = make(decoder=lambda latent, size: Memory())
    prediction = task.predict_step({"image": normalised(images)})
    torch.testing.assert_close(prediction.image_score, torch.zeros(2), rtol=0, atol=1e-10)


def test_cached_features_are_refused():
    with pytest.raises(UserError, match="needs images.*cache.enabled=false"):
        make().training_step({"pyramid": (torch.zeros(2, 3, 4, 4),)})


@pytest.mark.slow
def test_learns_normal_images_and_ranks_corrupted_ones_above_them():
    task, train = make(sigma=1.0), loader(smooth_images(33, seed=0))  # the last batch holds one image
    normal = smooth_images(12, seed=1)
    corrupted = normal.clone()
    corrupted[:, :, 4:8, 9:13] = 1 - corrupted[:, :, 4:8, 9:13].round()
    before = torch.cat([p.image_score for p in plain_trainer(1).predict(task, train)]).mean()
    plain_trainer(12).fit(task, train)
    predictions = plain_trainer(1).predict(task, train)
    assert [len(p.image_score) for p in predictions] == [8, 8, 8, 8, 1]
    assert torch.cat([p.image_score for p in predictions]).mean() < before / 2
    task.eval()
    with torch.no_grad():
        good, bad = (task.predict_step({"image": normalised(images)}) for images in (normal, corrupted))
    assert (bad.image_score > good.image_score).all()  # each above what it was before
    assert (bad.image_score[:, None] > good.image_score).float().mean() > 0.95  # AUROC
    inside = torch.zeros(16, 16, dtype=torch.bool)
    inside[4:8, 9:13] = True
    assert bad.anomaly_map[:, inside].mean() > 2 * bad.anomaly_map[:, ~inside].mean()


def test_encoder_and_decoder_make_up_the_state():
    task, other = make(), make(seed=1)
    batch = {"image": torch.randn(4, 3, 16, 16)}
    task.training_step(batch)  # moves running statistics
    other.load_state_dict(task.state_dict())
    expected, actual = task.eval().predict_step(batch), other.eval().predict_step(batch)
    assert torch.equal(expected.image_score, actual.image_score)
    assert {name.partition(".")[0] for name in learned_state(task)} == {"encoder", "decoder"}
    assert task.output_modules == ("decoder",)
    assert task(batch).shape == (4, task.num_features)


@pytest.mark.parametrize("size", [32, 64, 224])
def test_configuration(size):
    config = compose(
        [
            "method=fedavg",
            "task=autoencoder",
            "~backbone",
            f"image.size={size}",
            "image.resize=null",
            "encoder.depth=18",
        ]
    )
    task = build(config["task"])
    prediction = task.eval().predict_step({"image": torch.zeros(1, 3, size, size)})
    assert prediction.anomaly_map.shape == (1, size, size)
    assert task.configure_optimizers().defaults["lr"] == 1e-3
    torch.testing.assert_close(task.mean.flatten(), torch.tensor(MEAN))


def test_images_normalised_otherwise_are_scored_likewise():
    half = "[0.5,0.5,0.5]"
    config = compose(
        ["method=fedavg", "task=autoencoder", "~backbone", f"+image.mean={half}", f"+image.std={half}"]
    )
    assert config["task"]["mean"] == config["task"]["std"] == [0.5, 0.5, 0.5]
