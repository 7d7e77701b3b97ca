"""Reverse distillation: the network, its loss, score and step against plain convolutions and NumPy."""

import numpy as np
import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch import nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.tasks.reverse_distillation import Decoder, Embedder, Residual, ReverseDistillation


def make(**settings):
    torch.manual_seed(0)
    task = ReverseDistillation(TinyPyramid(), image_size=40, blocks=2, **settings).double()
    for entry in task.parameters():
        if entry.dim() == 1:  # scales and shifts of the normalisation, which begin at 1 and 0
            entry.data += 0.1 * torch.randn_like(entry)
    return task


@pytest.fixture
def batch():
    """Three images, whose maps have 10 and 5 positions a side."""
    return {
        "image": torch.rand(3, 3, 40, 40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    }


def by_hand(task, maps):
    """The code and the rebuilt maps of Deng and Li, Fig. 3 and 4, in training mode: weights in the order of use."""
    state = task.state_dict()

    def normed(x, name):
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
        scale, shift = (state[f"{name}.1.{part}"][:, None, None] for part in ("weight", "bias"))
        return (x - mean) / (variance + 1e-5).sqrt() * scale + shift

    def convolved(x, name, stride=1):
        weight = state[f"{name}.0.weight"]
        return normed(F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2), name)

    def raised(x, name):
        return normed(F.conv_transpose2d(x, state[f"{name}.0.weight"], stride=2), name)

    def stage(x, name, first):
        change = raised if first == "up" else lambda x, name: convolved(x, name, stride=2)
        x = (
            convolved(change(x, f"{name}.0.body.0").relu(), f"{name}.0.body.1") + change(x, f"{name}.0.skip")
        ).relu()
        return (convolved(convolved(x, f"{name}.1.body.0").relu(), f"{name}.1.body.1") + x).relu()

    fine, deep = maps
    fused = torch.cat([convolved(fine, "embedder.reduce.0.0", stride=2).relu(), deep], dim=1)
    code = stage(fused, "embedder.embed", "down")
    second = stage(code, "decoder.stages.0", "up")[:, :, : deep.shape[2], : deep.shape[3]]
    first = stage(second, "decoder.stages.1", "up")[:, :, : fine.shape[2], : fine.shape[3]]
    return code, [first, second]


def test_the_loss_compares_whole_maps(batch):
    task = make().train()
    maps = task.backbone(batch["image"])
    code, rebuilt = by_hand(task, maps)
    features = task(batch)
    torch.testing.assert_close(features, code.flatten(2).transpose(1, 2))
    expected = 0.0
    for f, g in zip(maps, rebuilt, strict=True):
        a, b = (part.numpy().reshape(3, -1) for part in (f, g))
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        expected += (1 - cosine).mean()
    assert task.objective(features, batch)["loss"].item() == pytest.approx(expected, rel=1e-5)


def test_the_score_is_the_maximum_of_the_sum_over_layers(batch):
    task = make(sigma=0.0).eval()
    task.draw_maps.float()  # maps are drawn in single precision
    maps = task.backbone(batch["image"])
    rebuilt = task.rebuilt(task(batch), maps)
    total = 0.0
    for f, g in zip(maps, rebuilt, strict=True):
        a, b = f.numpy(), g.detach().numpy()
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        total += F.interpolate(torch.from_numpy(1 - cosine)[:, None], (40, 40), mode="bilinear")[:, 0].numpy()
    found = task.predict_step(batch)
    np.testing.assert_allclose(found.anomaly_map.detach().numpy(), total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.image_score.detach().numpy(), total.max((1, 2)), rtol=1e-4)


def test_a_first_step_goes_against_the_sign_of_the_gradient(batch):
    """Adam's first step is ``-lr g / (|g| + eps)``; g by a difference of two losses."""
    task = make(learning_rate=1e-3).train()
    weight = task.decoder.stages[1][0].body[0][0].weight
    before, losses = weight.detach().clone(), []
    for change in (1e-3, -1e-3):
        weight.data = before.clone()
        weight.data[0, 0, 0, 0] += change
        losses.append(task.training_step(batch)["loss"].item())
    weight.data = before.clone()
    optimizer = task.configure_optimizers()
    task.training_step(batch)["loss"].backward()
    optimizer.step()
    moved = (weight - before)[0, 0, 0, 0].item()
    assert moved == pytest.approx(-1e-3 * np.sign(losses[0] - losses[1]), rel=1e-3)
    assert not any(p.requires_grad for p in task.backbone.parameters())


def test_embedding_and_stages_of_the_decoder_have_as_many_residual_blocks():
    task = ReverseDistillation(TinyPyramid(), image_size=40, blocks=3)
    assert [len(stage) for stage in (task.embedder.embed, *task.decoder.stages)] == [3, 3, 3]


def test_images_that_leave_a_code_of_one_position_are_refused():
    with pytest.raises(UserError, match=r"image.size=16: the backbone's deepest map has \(2, 2\) positions"):
        ReverseDistillation(TinyPyramid(), image_size=16)


@pytest.mark.parametrize(
    ("narrow", "kernels"),
    [(False, [(8, 6, 3), (8, 8, 3)]), (True, [(4, 6, 1), (4, 4, 3), (8, 4, 1)])],
)
def test_narrow_blocks_have_half_of_the_channels_in_the_middle(narrow, kernels):
    body = Residual(6, 8, "down", narrow).body
    assert [tuple(w.shape[:3]) for w in body.parameters() if w.dim() == 4] == kernels
    # A ReLU stands behind each convolution but the last, which is added to the skip first.
    assert sum(isinstance(layer, nn.ReLU) for layer in body.modules()) == len(kernels) - 1


@pytest.mark.parametrize(("channels", "narrow"), [((128, 256, 512), False), ((256, 512, 1024), True)])
def test_blocks_are_narrow_where_the_finest_map_is_wide(channels, narrow):
    with torch.device("meta"):
        decoder, embedder = Decoder(channels, 1), Embedder(channels, 1)
    # Of one block, that halves: narrow ones have 3x3 kernels in the middle only, and none where they double.
    assert any(weight.shape[-1] == 3 for weight in decoder.parameters() if weight.dim() == 4) != narrow
    assert sum(weight.shape[-1] == 3 for weight in embedder.embed.parameters() if weight.dim() == 4) == (
        1 if narrow else 2
    )
