"""``lit-fedad pretrain``: makes a backbone out of drawn scenes, with Lightning's trainer."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import yaml
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lit_fedad.config import call
from lit_fedad.errors import UserError
from lit_fedad.models.backbones import OWN_NAME, check_model
from lit_fedad.options import key_and_value
from lit_fedad.pretraining.dense_contrast import DenseContrast
from lit_fedad.pretraining.scenes import Scenes
from lit_fedad.report.console import Display
from lit_fedad.tracking.tracker import Tracker

LAST, VIEWS, WEIGHTS = "last.ckpt", "views.png", "weights.safetensors"


def pretrain(
    out: str = "outputs/own_backbone",
    name: str = OWN_NAME,
    layers: tuple[int, ...] = (1, 2, 3),
    steps: int = 3000,
    seed: int = 0,
    size: int = 96,
    batch: int = 48,
    shift: int = 8,
    lighting: float = 2.0,
    places: int = 16,
    temperature: float = 0.1,
    learning_rate: float = 2e-3,
    precision: str = "bf16-mixed",
    accelerator: str = "auto",
    save_every: int = 200,
    tracking: bool = True,
    tracking_uri: str | None = None,
    quiet: bool = False,
) -> Path:
    """Trains a backbone, or continues; the same values give the same weights on the same kind of device.

    Args:
        out: Folder of the checkpoint, a picture of some scenes and the finished weights.
        name: timm model.
        layers: Its layers that learn; layers behind them are not kept.
        steps: Training steps.
        seed: Of the first weights, the scenes and the compared places.
        size: Side of the scenes in pixels.
        batch: Scenes a step.
        shift: As in `Scenes`.
        lighting: As in `Scenes`.
        places: As in `DenseContrast`.
        temperature: As in `DenseContrast`.
        learning_rate: As in `DenseContrast`.
        precision: Lightning's.
        accelerator: Lightning's.
        save_every: Steps between checkpoints.
        tracking: Whether MLflow is told.
        tracking_uri: As in `Tracker`.
        quiet: Shows no progress.

    Returns:
        The file of weights, in half precision; ``backbone.weights=FILE backbone.name=NAME`` uses it.

    Raises:
        UserError: A number is too small, the model is unknown, Lightning refuses a value,
            the loss is not finite, or the folder cannot be written, or holds another training or a damaged checkpoint.
    """
    settings = {key: value for key, value in locals().items() if key not in _CIRCUMSTANCES}
    if min(steps, batch, places, save_every) < 1 or size < 32 or shift < 0:
        raise UserError(
            f"pretrain steps={steps} batch={batch} places={places} save_every={save_every} size={size}"
            f" shift={shift}: give at least 1, 1, 1, 1, 32 and 0"
        )
    check_model(name, layers)
    folder, progress = Path(out).expanduser(), _Steps()
    checkpoints = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=save_every, save_last=True, save_top_k=0
    )
    try:
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            precision=precision,  # type: ignore[arg-type]
            max_steps=steps,
            gradient_clip_val=5.0,
            log_every_n_steps=min(20, save_every),
            logger=False,
            callbacks=[checkpoints, progress],
            enable_model_summary=False,
            enable_progress_bar=False,
        )
    except (ValueError, MisconfigurationException) as error:
        raise UserError(f"pretrain: {' '.join(str(error).split())}") from error
    _claim(folder, settings)
    seed_everything(seed, verbose=False)
    scenes = Scenes(size, batch, textures=batch, shift=shift, lighting=lighting, seed=seed)
    model = DenseContrast(
        name, layers, scenes, steps, places, temperature=temperature, learning_rate=learning_rate
    )
    tracker = Tracker(
        folder, "pretraining", folder.name, {"method": "dense contrast"}, tracking_uri, enabled=tracking
    )
    tracker.params(settings)
    _draw_views(scenes, folder / VIEWS)
    tracker.artifact(folder / VIEWS)
    trainer.logger = _TrackerLogger(tracker)
    file, status = folder / WEIGHTS, "FAILED"
    try:
        with Display(quiet).progress("Steps") as progress.show:
            _fit(trainer, model, folder / LAST)
        _save_half(model.backbone.model, file)
        tracker.artifact(file)
        status = "FINISHED"
    finally:
        tracker.close(status)
    return file


_CIRCUMSTANCES = ("out", "tracking", "tracking_uri", "save_every", "accelerator", "quiet")


def _fit(trainer: Trainer, model: DenseContrast, last: Path) -> None:
    """Trains from the last checkpoint, if there is one."""
    if last.exists():
        try:
            torch.load(last, map_location="cpu", weights_only=False)
        except Exception as error:  # a damaged file fails in zipfile, pickle or torch
            raise UserError(f"{last} cannot be read ({error}): delete it to begin anew") from error
    with warnings.catch_warnings():
        # The loader gives nothing but beats: workers would have nothing to do.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        try:
            trainer.fit(
                model, DataLoader(_Beats(), batch_size=None), ckpt_path=last if last.exists() else None
            )
        except SystemExit:  # Lightning's answer to Ctrl-C
            if not trainer.interrupted:
                raise
    if trainer.interrupted:
        raise KeyboardInterrupt


class _Steps(Callback):
    """Shows how many steps are done, and ends a training that has gone astray."""

    show: Callable[[int, int], None]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        """As the name says."""
        if not outputs["loss"].isfinite():
            raise UserError(
                f"the loss is not finite at step {trainer.global_step}: lower learning_rate, in another out="
            )
        self.show(trainer.global_step, trainer.max_steps)


class _Beats(IterableDataset[int]):
    """One item a step, for ever: scenes are drawn where the model is."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)


class _TrackerLogger(Logger):
    """Lightning's numbers into the run's journal."""

    name, version = "pretraining", 0

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: the settings are logged once, by name."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Sends them on."""
        self._tracker.metrics({key: value for key, value in metrics.items() if key != "epoch"}, step or 0)


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Remembers what a folder is for, so that no training goes on with another's checkpoint."""
    record = folder / "settings.yaml"
    text = yaml.safe_dump({**settings, "layers": list(settings["layers"])}, sort_keys=False)
    if record.exists() and (folder / LAST).exists() and record.read_text() != text:
        raise UserError(f"{folder} holds a training with other settings ({record}); choose another out=")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(text)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error}); choose another out=") from error


def _draw_views(scenes: Scenes, file: Path) -> None:
    """The first batch's first scenes: one view above the other."""
    first, second, _ = scenes.views(0)
    rows = [torch.cat(list(view[:8]), dim=2) for view in (first, second)]
    pixels = (255 * torch.cat(rows, dim=1)).round().to(torch.uint8)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)


def _save_half(backbone: nn.Module, file: Path) -> None:
    """Weights alone, in half precision, under timm's names."""
    state = {
        key: value.half().cpu().contiguous()
        for key, value in backbone.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    safetensors.torch.save_file(state, file)


def command(words: Sequence[str], display: Display) -> None:
    """Runs ``lit-fedad pretrain key=value ...``.

    Raises:
        UserError: As `pretrain`, and for unknown keys.
    """
    given = {key: yaml.safe_load(value) for key, value in map(key_and_value, words)}
    file = call(pretrain, given, "pretrain")
    name = given.get("name", OWN_NAME)
    display.where_next(
        [("weights", str(file)), ("use", f"lit-fedad train backbone.name={name} backbone.weights={file}")]
    )
