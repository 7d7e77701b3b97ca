"""Trains a backbone on drawn scenes alone, as the library's own was: ``python scripts/pretrain_backbone.py --out DIR``.

The same command continues. The same settings give the same weights on the same kind of device.
"""

from __future__ import annotations

import lit_fedad  # isort: skip  # noqa: F401  (before timm imports torchvision)

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lit_fedad.contracts.randomness import generator
from lit_fedad.models.backbones import OWN_NAME, check_model
from lit_fedad.models.scenes import Scenes, Shift


class DenseContrast(LightningModule):
    """A timm backbone and its training by dense contrast: each place must match itself in another view of its scene.

    Detection by nearest neighbours needs features that are close for places that look the same, in any light and
    from any position of the camera, and far apart for places that look different. The loss is InfoNCE between the
    cells of two views' maps, summed over layers; the partner of a cell is the cell nearest to the place it moved to.

    Args:
        name: timm model.
        layers: Its layers that learn, as timm counts them; layers behind the last are not built.
        scenes: The training images.
        steps: Training steps, for the schedule.
        places: Places of each scene that are compared at a layer.
        width: Size of the embedding in which they are compared.
        temperature: Temperature of InfoNCE.
        learning_rate: Largest learning rate; it rises over the first steps and falls along a cosine.
        weight_decay: Weight decay of AdamW.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        name: str,
        layers: tuple[int, ...],
        scenes: Scenes,
        steps: int,
        places: int = 16,
        width: int = 64,
        temperature: float = 0.1,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.02,
    ) -> None:
        super().__init__()
        # The getter keeps timm's own names of weights, whatever the architecture.
        self.backbone: Any = timm.create_model(
            name, features_only=True, feature_cls="getter", out_indices=layers
        )
        self.backbone.to(memory_format=torch.channels_last)
        self.strides: list[int] = self.backbone.feature_info.reduction()
        self.projections = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 128, 1), nn.ReLU(), nn.Conv2d(128, width, 1))
            for channels in self.backbone.feature_info.channels()
        )
        self.scenes, self.steps, self.places = scenes, steps, places
        self.temperature, self.learning_rate, self.weight_decay = temperature, learning_rate, weight_decay
        config = timm.get_pretrained_cfg(name)
        for key, values in (("mean", config.mean), ("std", config.std)):
            self.register_buffer(key, torch.tensor(values).view(3, 1, 1), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Computes the loss of the step's own scenes; the loader's items are ignored."""
        first, second, shift = self.scenes.views(self.global_step, self.device)
        images = (torch.cat([first, second]) - self.mean) / self.std
        maps = self.backbone(images.contiguous(memory_format=torch.channels_last))
        losses, draws = [], generator(self.scenes.seed, "places", self.global_step)
        for project, layer, stride in zip(self.projections, maps, self.strides, strict=True):
            embedded, others = F.normalize(project(layer).float(), dim=1).chunk(2)
            cells, partners = paired_cells(layer.shape[-1], stride, shift, self.places, draws)
            losses.append(place_contrast(embedded, others, cells, partners, self.temperature))
        total = torch.stack(losses).sum()
        self.log("loss", total.detach(), prog_bar=True)
        return total

    def configure_optimizers(self) -> Any:
        """Builds AdamW, and its schedule: a rise over at most 50 steps, then half a cosine."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
        rise = min(50, max(1, self.steps // 10))
        schedule = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 1 / rise, total_iters=rise),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps - rise)),
            ],
            milestones=[rise],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def paired_cells(
    side: int, stride: int, shift: Shift, places: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws cells of the first view's map, and finds the cells of the second that show the same places.

    Args:
        side: Side of the maps, in cells.
        stride: Side of a cell, in pixels.
        shift: How far down and right a place of the first view lies in the second, in pixels.
        places: How many pairs at most; all there are if fewer.
        generator: Draws the cells.

    Returns:
        Numbers of cells, row by row [places] each.
    """
    down, right = (round(pixels / stride) for pixels in shift)
    rows = torch.arange(max(0, -down), min(side, side - down))
    columns = torch.arange(max(0, -right), min(side, side - right))
    cells = (rows[:, None] * side + columns).flatten()
    drawn = cells[torch.randperm(len(cells), generator=generator)[:places]]
    return drawn, drawn + down * side + right


def place_contrast(
    first: Tensor, second: Tensor, cells: Tensor, partners: Tensor, temperature: float
) -> Tensor:
    """Computes InfoNCE over places, in both directions.

    Args:
        first: Embeddings of unit length [B, D, H, W].
        second: Likewise, of the second views.
        cells: Compared cells of the first [n].
        partners: The same places in the second [n].
        temperature: Temperature of the softmax over all B n places of the other view.
    """
    rows = first.flatten(2)[:, :, cells].transpose(1, 2).flatten(0, 1)
    others = second.flatten(2)[:, :, partners].transpose(1, 2).flatten(0, 1)
    similarity = rows @ others.T / temperature
    same = torch.arange(len(similarity), device=similarity.device)
    return (F.cross_entropy(similarity, same) + F.cross_entropy(similarity.T, same)) / 2


class _EmptyItems(IterableDataset[int]):
    """One empty item a step, without end: scenes are drawn on the model's device."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)


def pretrain(options: argparse.Namespace) -> Path:
    """Trains a backbone, or continues; returns the file of its weights, in half precision under timm's names."""
    layers = tuple(options.layers)
    check_model(options.name, layers)
    seed_everything(options.seed, verbose=False)
    scenes = Scenes(options.size, options.batch, textures=options.batch, seed=options.seed)
    model = DenseContrast(options.name, layers, scenes, options.steps)
    folder = Path(options.out)
    checkpoints = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=options.save_every, save_last=True, save_top_k=0
    )
    trainer = Trainer(
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_steps=options.steps,
        gradient_clip_val=5.0,
        logger=False,
        callbacks=[checkpoints],
        enable_model_summary=False,
    )
    last = folder / "last.ckpt"
    batches = DataLoader(_EmptyItems(), batch_size=None)
    trainer.fit(model, batches, ckpt_path=last if last.exists() else None, weights_only=True)
    file = folder / "weights.safetensors"
    state = {
        key: value.half().cpu().contiguous()
        for key, value in model.backbone.model.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    safetensors.torch.save_file(state, file)
    return file


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the options of the command line; the defaults are those that the library's own backbone was made with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder of the checkpoint and of the finished weights")
    parser.add_argument("--name", default=OWN_NAME, help="timm model")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3], help="its layers that learn")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=96, help="side of the scenes in pixels, at least 32")
    parser.add_argument("--batch", type=int, default=48, help="scenes a step")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    return parser.parse_args(words)


if __name__ == "__main__":
    chosen = read_options()
    print(  # noqa: T201
        f"lit-fedad train backbone.name={chosen.name} backbone.weights={pretrain(chosen)}"
    )
