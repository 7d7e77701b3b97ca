"""Dinomaly: attention, bottleneck, loose loss and scores against NumPy; a small transformer with random weights."""

import numpy as np
import pytest
import torch
from conftest import TinyPyramid

from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import create_backbone
from lit_fedad.tasks.dinomaly import Block, Dinomaly, loose_cosine


@pytest.fixture(scope="module")
def backbone():
    with pytest.warns(UserWarning, match="RANDOM weights"):
        return create_backbone("vit_tiny_patch16_224", layers=(0, 1, 2, 3), weights="random")


def make(backbone, **settings):
    torch.manual_seed(0)
    return Dinomaly(backbone, image_size=64, **settings).eval()


def images(number=3):
    return {"image": torch.rand(number, 3, 64, 64, generator=torch.Generator().manual_seed(2))}


def cosine(a, b, axis):
    return (a * b).sum(axis) / np.linalg.norm(a, axis=axis) / np.linalg.norm(b, axis=axis)


def test_attention_is_linear():
    torch.manual_seed(0)
    block, rows = Block(128).double(), torch.randn(2, 5, 128, dtype=torch.float64)
    q, k, v = np.split(block.qkv(rows).detach().numpy(), 3, axis=2)
    q, k = (np.where(x > 0, x, np.expm1(x)) + 1 for x in (q, k))
    expected = np.empty((2, 5, 128))
    for image in range(2):
        for head in (slice(0, 64), slice(64, 128)):
            weights = q[image][:, head] @ k[image][:, head].T
            expected[image][:, head] = weights @ v[image][:, head] / weights.sum(1, keepdims=True)
    found = block._attended(rows)
    torch.testing.assert_close(found, block.project(torch.from_numpy(expected)))


def test_the_loss_is_loose():
    """The value is that of whole maps; the gradient of all positions but the worst fifth is a tenth."""
    draw = torch.Generator().manual_seed(0)
    features, rebuilt = torch.randn(2, 2, 10, 4, generator=draw, dtype=torch.float32)
    f, g = features.double().numpy(), rebuilt.double().numpy()
    rebuilt.requires_grad_(True)
    loss = loose_cosine(features, rebuilt, loose=0.8, factor=0.1)
    loss.backward()
    flat_f, flat_g = f.reshape(2, -1), g.reshape(2, -1)
    similar = cosine(flat_f, flat_g, 1)
    assert loss.item() == pytest.approx((1 - similar).mean(), rel=1e-5)
    lengths_f, lengths_g = (np.linalg.norm(x, axis=1)[:, None] for x in (flat_f, flat_g))
    whole = -(flat_f / lengths_f - similar[:, None] * flat_g / lengths_g) / lengths_g / 2
    distances = 1 - cosine(f, g, 2)
    well = distances < np.sort(distances.ravel())[-4]
    expected = whole.reshape(2, 10, 4) * np.where(well, 0.1, 1.0)[..., None]
    np.testing.assert_allclose(rebuilt.grad, expected, rtol=1e-4, atol=1e-6)


def test_scores_are_means_of_the_highest_pixels(backbone):
    task, batch = make(backbone, groups=2, top=0.05), images()
    layers = np.stack([layer.flatten(2).mT.numpy() for layer in backbone(batch["image"])])
    with torch.no_grad():
        features = task.bottleneck(torch.from_numpy(layers.mean(0)))
        built = []
        for block in task.decoder:
            features = block(features)
            built.append(features.numpy())
        found = task.predict_step(batch)
    first, second, third, last = built
    groups = [(layers[:2].mean(0), (last + third) / 2), (layers[2:].mean(0), (second + first) / 2)]
    maps = sum(1 - cosine(f.astype(float), g.astype(float), 2) for f, g in groups) / 2
    drawn = task.draw_map(torch.from_numpy(maps).float().unflatten(1, (4, 4)))
    torch.testing.assert_close(found.anomaly_map, drawn, rtol=1e-4, atol=1e-5)
    highest = np.sort(drawn.numpy().reshape(3, -1), axis=1)[:, -int(0.05 * 64**2) :]
    np.testing.assert_allclose(found.image_score, highest.mean(1), rtol=1e-4)


def test_a_step_trains_bottleneck_and_decoder(backbone):
    task = make(backbone, loose=0.0).train()
    optimizer, losses = task.configure_optimizers(), []
    torch.manual_seed(3)
    for _ in range(8):
        loss = task.training_step(images())["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(p.requires_grad for p in backbone.parameters())


def test_backbones_of_several_resolutions_are_refused():
    with pytest.raises(UserError, match="give a transformer, as backbone=dinov2_small"):
        Dinomaly(TinyPyramid(), image_size=32)
