"""Dinomaly: blocks, loose loss, scores and a step against NumPy; a small transformer with random weights."""

import numpy as np
import pytest
import scipy.stats
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch.nn import functional as F

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


def test_a_block_has_linear_attention_and_a_perceptron_behind_normalisations():
    torch.manual_seed(0)
    block, rows = Block(128).double(), torch.randn(2, 5, 128, dtype=torch.float64)
    for norm in (block.norm1, block.norm2):
        norm.weight.data, norm.bias.data = 1 + 0.1 * torch.randn(2, 128, dtype=torch.float64)

    def normed(x, layer):
        x = (x - x.mean(2, keepdims=True)) / np.sqrt(x.var(2, keepdims=True) + 1e-8)
        return x * layer.weight.detach().numpy() + layer.bias.detach().numpy()

    def mapped(x, layer):
        return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()

    x = rows.numpy()
    q, k, v = np.split(mapped(normed(x, block.norm1), block.qkv), 3, axis=2)
    q, k = (np.where(part > 0, part, np.expm1(part)) + 1 for part in (q, k))
    attended = np.empty((2, 5, 128))
    for image in range(2):
        for head in (slice(0, 64), slice(64, 128)):
            weights = q[image][:, head] @ k[image][:, head].T
            attended[image][:, head] = weights @ v[image][:, head] / weights.sum(1, keepdims=True)
    x = x + mapped(attended, block.project)
    hidden = mapped(normed(x, block.norm2), block.mlp[0])
    x = x + mapped(hidden * scipy.stats.norm.cdf(hidden), block.mlp[2])
    torch.testing.assert_close(block(rows).detach(), torch.from_numpy(x))


def test_the_loss_is_loose():
    """The value is that of whole maps; the gradient of all positions but the worst fifth is a tenth."""
    draw = torch.Generator().manual_seed(0)
    features, rebuilt = torch.randn(2, 2, 10, 4, generator=draw, dtype=torch.float32)
    f, g = features.double().numpy(), rebuilt.double().numpy()
    rebuilt.requires_grad_(True)
    loss = loose_cosine(features, rebuilt, easy_share=0.8, easy_gradient=0.1)
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


def test_a_first_step_is_adamw_of_the_mean_over_groups_behind_dropout(backbone):
    """AdamW's first step is ``-lr (decay w + g / (|g| + eps))``, and dropout stands before, between and behind."""
    task = make(backbone, dropout=0.3, easy_share=0.0, learning_rate=1e-3, weight_decay=0.1).train()
    batch = images()
    layers = torch.stack([layer.flatten(2).mT for layer in backbone(batch["image"])])
    torch.manual_seed(5)
    inner, outer = task.bottleneck[1], task.bottleneck[4]
    hidden = F.gelu(inner(F.dropout(layers.mean(0), 0.3)))
    built = [F.dropout(outer(F.dropout(hidden, 0.3)), 0.3)]
    for block in task.decoder:
        built.append(block(built[-1]))
    groups = ((layers[:2], built[3:]), (layers[2:], built[1:3]))
    pairs = [(fine.mean(0).flatten(1), torch.stack(own).mean(0).flatten(1)) for fine, own in groups]
    expected = sum(1 - F.cosine_similarity(f, g).mean() for f, g in pairs) / 2
    torch.manual_seed(5)
    loss, optimizer = task.training_step(batch)["loss"], task.configure_optimizers()
    torch.testing.assert_close(loss, expected)
    before = {name: p.detach().clone() for name, p in task.named_parameters() if p.requires_grad}
    loss.backward()
    optimizer.step()
    assert {name.split(".")[0] for name in before} == {"bottleneck", "decoder"}
    for name in ("bottleneck.1.weight", "decoder.3.mlp.0.weight"):
        weight = task.get_parameter(name)
        sign = weight.grad / (weight.grad.abs() + 1e-10)
        torch.testing.assert_close(weight.detach(), before[name] - 1e-3 * (0.1 * before[name] + sign))


def test_the_objective_has_the_task_s_share_and_gradient_of_well_rebuilt_positions(backbone):
    task = make(backbone, easy_share=0.6, easy_gradient=0.3)
    batch, weight = task.view(images()), task.decoder[0].project.weight
    pairs = task.pairs(task(batch), batch)
    expected = sum(loose_cosine(f, g, easy_share=0.6, easy_gradient=0.3) for f, g in pairs) / len(pairs)
    (gradient,) = torch.autograd.grad(expected, weight)
    (found,) = torch.autograd.grad(task.objective(task(batch), batch)["loss"], weight)
    torch.testing.assert_close(found, gradient)


def test_backbones_of_several_resolutions_are_refused():
    with pytest.raises(UserError, match="give a transformer, as backbone=dinov2_small"):
        Dinomaly(TinyPyramid(), image_size=32)
