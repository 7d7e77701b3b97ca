"""Autoencoders of pixels and of frozen features: errors, scores, what is trained, and a plain Trainer."""

import functools

import numpy as np
import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from helpers.trainers import plain_trainer
from scipy.ndimage import gaussian_filter
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.models.convnets import ConvNet, Decoder
from lit_fedad.tasks.autoencoder import Autoencoder, FeatureAutoencoder

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


# ------------------------------------------------------------------------------------------ of frozen features


def of_features(grid=4, **settings):
    torch.manual_seed(0)
    given = {"hidden": 7, "bottleneck": 2, "size": 16, "sigma": 0.0, "rim": 0, "average_pool": False}
    task = FeatureAutoencoder(TinyPyramid(), grid=grid, image_size=32, **{**given, **settings})
    draw = torch.Generator().manual_seed(1)
    task.load_statistics(torch.rand(8, generator=draw), 0.5 + torch.rand(8, generator=draw))
    return task.eval()


def pictures(number=3):
    return {"image": torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(2))}


def by_hand(task, rows):
    """Squared errors of rows of features [n, C], layer by layer in double precision."""
    state = {name: entry.double() for name, entry in task.state_dict().items()}
    standard = (rows.double() - state["mean"]) / state["scale"]
    x = standard
    for name in ("compress", "decoder"):
        x = (x @ state[f"{name}.0.weight"].T + state[f"{name}.0.bias"]).clamp(min=0)
        x = x @ state[f"{name}.2.weight"].T + state[f"{name}.2.bias"]
    return (x - standard).square().mean(1)


def test_errors_of_patches_are_drawn_where_they_are():
    task, batch = of_features(), pictures()
    low, high = task.backbone(batch["image"])
    maps = torch.cat([F.interpolate(layer, (4, 4), mode="bilinear") for layer in (low, high)], 1)
    expected = by_hand(task, maps.flatten(2).transpose(1, 2).flatten(0, 1)).view(3, 4, 4)
    prediction = task.predict_step(batch)
    drawn = F.interpolate(expected[:, None], (32, 32), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(prediction.anomaly_map.double(), drawn, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prediction.image_score, prediction.anomaly_map.flatten(1).amax(1))


def test_one_patch_is_the_whole_image_and_localises_nothing():
    task, batch = of_features(grid=1, rim=1), pictures()
    features = task.encoder.features(batch["image"])
    prediction = task.predict_step(batch)
    assert prediction.anomaly_map is None
    torch.testing.assert_close(
        prediction.image_score.double(), by_hand(task, task.encoder.length * features), rtol=1e-4, atol=1e-5
    )
    # Kept features give what their images do.
    torch.testing.assert_close(task.predict_step({"image": features}).image_score, prediction.image_score)


def test_whole_images_are_not_cut_into_tiles():
    with pytest.raises(UserError, match=r"image.tile=16: on a grid of one patch"):
        of_features(grid=1, tile=16)
    assert of_features(grid=2, tile=16).vectors_per_image == 16


def test_cached_maps_take_the_place_of_images():
    task, batch = of_features(), pictures()
    cached = {"pyramid": tuple(task.backbone(batch["image"]))}
    torch.testing.assert_close(task.predict_step(cached).anomaly_map, task.predict_step(batch).anomaly_map)


@pytest.mark.parametrize("grid", [1, 4])
def test_a_step_looks_at_some_patches_and_trains_all_but_the_backbone(grid):
    task, batch = of_features(grid=grid, patches_per_image=5).train(), pictures()
    view = task.view(batch)
    assert view["patches"].shape == (3, min(5, grid * grid), 8)
    features = task(view)
    assert features.shape == (3, min(5, grid * grid), task.num_features)
    loss = task.objective(features, view)["loss"]
    torch.testing.assert_close(loss, (task.decoder(features) - view["patches"]).square().mean())
    loss.backward()
    trained = {name for name, weight in task.named_parameters() if weight.grad is not None}
    assert trained == {
        f"{part}.{layer}.{kind}"
        for part in ("compress", "decoder")
        for layer in (0, 2)
        for kind in ("weight", "bias")
    }
    held = {id(p) for group in task.configure_optimizers().param_groups for p in group["params"]}
    assert held == {id(dict(task.named_parameters())[name]) for name in trained}
