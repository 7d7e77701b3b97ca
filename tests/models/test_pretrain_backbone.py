"""The script of the own backbone: its loss by independent arithmetic, and that it learns, continues and fits."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from scipy.special import log_softmax
from torch.nn import functional as F

from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.scenes import Scenes

script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "pretrain_backbone.py"))
DenseContrast, paired_cells, place_contrast = (
    script[name] for name in ("DenseContrast", "paired_cells", "place_contrast")
)


def draws() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_loss_is_infonce_over_all_places_in_both_directions():
    first, second = F.normalize(torch.randn(2, 3, 5, 4, 4, generator=draws()), dim=2)
    cells, partners = torch.tensor([0, 7, 9]), torch.tensor([1, 8, 10])
    rows = np.array([first[b, :, c // 4, c % 4].numpy() for b in range(3) for c in cells])
    others = np.array([second[b, :, c // 4, c % 4].numpy() for b in range(3) for c in partners])
    similarity = rows @ others.T / 0.3
    expected = -(np.diag(log_softmax(similarity, 1)).mean() + np.diag(log_softmax(similarity, 0)).mean()) / 2
    found = place_contrast(first, second, cells, partners, 0.3)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shift", [(0, 0), (7, -5), (-8, 8), (3, 12)])
@pytest.mark.parametrize("stride", [4, 8, 16])
def test_a_partner_is_the_nearest_cell_to_where_a_place_moved(stride, shift):
    side = 96 // stride
    cells, partners = paired_cells(side, stride, shift, 10_000, draws())
    found = dict(zip(cells.tolist(), partners.tolist(), strict=True))
    assert len(found) == len(cells) == len(set(partners.tolist()))
    for cell, partner in found.items():
        for way, move in zip((divmod(cell, side), divmod(partner, side)), ((0, 0), shift), strict=True):
            assert all(0 <= k < side for k in way), (cell, partner, move)
        for before, after, move in zip(divmod(cell, side), divmod(partner, side), shift, strict=True):
            assert abs(stride * (after - before) - move) <= stride / 2
    # All cells whose partner is on the map take part.
    steps = [round(move / stride) for move in shift]
    assert len(found) == (side - abs(steps[0])) * (side - abs(steps[1]))


def test_few_places_are_a_random_part():
    cells, _ = paired_cells(12, 8, (0, 0), 10, draws())
    assert len(cells.unique()) == 10
    other, _ = paired_cells(12, 8, (0, 0), 10, torch.Generator().manual_seed(1))
    assert set(cells.tolist()) != set(other.tolist())


@pytest.mark.slow
def test_places_are_told_apart_better_after_some_steps():
    torch.manual_seed(0)
    scenes = Scenes(size=32, scenes=8, textures=8, shift=2, lighting=0.5)
    model = DenseContrast("resnet10t", (1, 2), scenes, steps=12, places=8)
    [optimizer], [schedule] = (lambda made: ([made["optimizer"]], [made["lr_scheduler"]["scheduler"]]))(
        model.configure_optimizers()
    )
    losses = []
    for step in range(12):
        views = scenes.views(step % 2)
        model.scenes = Fixed(*views)
        loss = model.training_step(0, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-2:]) < 0.8 * np.mean(losses[:2])


class Fixed:
    """Scenes that are always the same."""

    seed = 0

    def __init__(self, *views) -> None:
        self._views = views

    def views(self, batch, device):
        return self._views


def pretrained(out, steps):
    words = "--size 32 --batch 2 --layers 1 2 --precision 32-true --accelerator cpu --save-every 2"
    options = script["read_options"](["--out", str(out), "--steps", str(steps), *words.split()])
    return safetensors.torch.load_file(script["pretrain"](options))


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.slow
def test_a_backbone_takes_its_weights_however_often_it_was_stopped(tmp_path, monkeypatch):
    whole, step = pretrained(tmp_path / "whole", 4), DenseContrast.training_step

    def stop(self, batch, batch_idx):
        if self.global_step == 3:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(DenseContrast, "training_step", stop)
    with pytest.raises(RuntimeError, match="power cut"):
        pretrained(tmp_path / "cut", 4)
    monkeypatch.setattr(DenseContrast, "training_step", step)
    resumed = pretrained(tmp_path / "cut", 4)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    backbone = create_backbone("resnet10t", (1, 2), tmp_path / "cut" / "weights.safetensors")
    found = backbone.state_dict()["features.model.layer2.0.conv1.weight"]
    assert torch.equal(found, whole["layer2.0.conv1.weight"].float())
