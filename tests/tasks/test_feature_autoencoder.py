"""Autoencoders of frozen features: errors by hand, maps of patches, scores of whole images, and what is trained."""

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.tasks.autoencoder import FeatureAutoencoder


def make(grid=4, **settings):
    torch.manual_seed(0)
    given = {"hidden": 7, "bottleneck": 2, "size": 16, "sigma": 0.0, "rim": 0, "average_pool": False}
    task = FeatureAutoencoder(TinyPyramid(), grid=grid, image_size=32, **{**given, **settings})
    draw = torch.Generator().manual_seed(1)
    task.load_statistics(torch.rand(8, generator=draw), 0.5 + torch.rand(8, generator=draw))
    return task.eval()


def images(number=3):
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
    task, batch = make(), images()
    low, high = task.backbone(batch["image"])
    maps = torch.cat([F.interpolate(layer, (4, 4), mode="bilinear") for layer in (low, high)], 1)
    expected = by_hand(task, maps.flatten(2).transpose(1, 2).flatten(0, 1)).view(3, 4, 4)
    prediction = task.predict_step(batch)
    drawn = F.interpolate(expected[:, None], (32, 32), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(prediction.anomaly_map.double(), drawn, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prediction.image_score, prediction.anomaly_map.flatten(1).amax(1))


def test_one_patch_is_the_whole_image_and_localises_nothing():
    task, batch = make(grid=1, rim=1), images()
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
        make(grid=1, tile=16)
    assert make(grid=2, tile=16).vectors_per_image == 16


def test_cached_maps_take_the_place_of_images():
    task, batch = make(), images()
    cached = {"pyramid": tuple(task.backbone(batch["image"]))}
    torch.testing.assert_close(task.predict_step(cached).anomaly_map, task.predict_step(batch).anomaly_map)


@pytest.mark.parametrize("grid", [1, 4])
def test_a_step_looks_at_some_patches_and_trains_all_but_the_backbone(grid):
    task, batch = make(grid=grid, patches_per_image=5).train(), images()
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


@pytest.mark.parametrize("setting", ["hidden", "bottleneck", "patches_per_image"])
def test_numbers_below_one_are_refused(setting):
    with pytest.raises(UserError, match=f"task.{setting}=0"):
        make(**{setting: 0})
