"""Trains a backbone on drawn scenes, with Lightning's trainer: ``lit-fedad pretrain``."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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

from lit_fedad.core.errors import UserError
from lit_fedad.core.options import read
from lit_fedad.models.backbones import OWN_NAME, check_model
from lit_fedad.pretraining.dense_contrast import DenseContrast
from lit_fedad.pretraining.scenes import Scenes
from lit_fedad.report.console import Display
from lit_fedad.tracking.tracker import Tracker

LAST, VIEWS, WEIGHTS = "last.ckpt", "views.png", "weights.safetensors"


@dataclass(frozen=True)
class PretrainOptions:
    """Options of ``lit-fedad pretrain``.

    Attributes:
        out: Folder of the checkpoint, a picture of some scenes and the finished weights.
        name: timm model.
        layers: Its layers that learn; layers behind them are not kept.
        steps: Training steps.
        seed: Seed of the first weights, the scenes and the compared places.
        size: Side of the scenes in pixels.
        batch: Scenes a step.
        shift: Largest shift between two views of a scene, in pixels.
        lighting: Strength of the differences in brightness and colour between two views.
        places: Places of each scene that are compared at a layer.
        temperature: Temperature of the loss.
        learning_rate: Largest learning rate of the schedule.
        precision: Precision of Lightning's trainer.
        accelerator: Accelerator of Lightning's trainer.
        save_every: Steps between checkpoints.
        tracking: Whether the training is sent to MLflow.
        tracking_uri: MLflow's address; None as in `Tracker`.
        quiet: Whether no progress is shown.

    Raises:
        UserError: If a number is too small.
    """

    out: str = "outputs/own_backbone"
    name: str = OWN_NAME
    layers: tuple[int, ...] = (1, 2, 3)
    steps: int = 3000
    seed: int = 0
    size: int = 96
    batch: int = 48
    shift: int = 8
    lighting: float = 2.0
    places: int = 16
    temperature: float = 0.1
    learning_rate: float = 2e-3
    precision: str = "bf16-mixed"
    accelerator: str = "auto"
    save_every: int = 200
    tracking: bool = True
    tracking_uri: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for key, least in _LEAST.items():
            if not getattr(self, key) >= least:
                raise UserError(f"{key}={getattr(self, key)} must be at least {least}")
        for key in ("temperature", "learning_rate"):
            if not getattr(self, key) > 0:
                raise UserError(f"{key}={getattr(self, key)} must be greater than 0")

    @property
    def settings(self) -> dict[str, Any]:
        """The options that decide the weights."""
        return {key: value for key, value in asdict(self).items() if key not in _CIRCUMSTANCES}


_LEAST = {"steps": 1, "batch": 1, "places": 1, "save_every": 1, "size": 32, "shift": 0, "lighting": 0}
_CIRCUMSTANCES = ("out", "tracking", "tracking_uri", "save_every", "accelerator", "quiet")


def pretrain(options: PretrainOptions) -> Path:
    """Trains a backbone, or continues; the same options give the same weights on the same kind of device.

    Args:
        options: What is trained, how long, and where its files go.

    Returns:
        The file of weights, in half precision; ``backbone.weights=FILE backbone.name=NAME`` uses it.

    Raises:
        UserError: If the model is unknown, Lightning refuses a value, the loss is not finite, or the folder cannot be
            written, or holds another training or a damaged checkpoint.
    """
    check_model(options.name, options.layers)
    folder, progress = Path(options.out).expanduser(), _Steps()
    trainer = _trainer(options, folder, progress)
    _claim(folder, options.settings)
    seed_everything(options.seed, verbose=False)
    scenes = Scenes(
        options.size,
        options.batch,
        textures=options.batch,
        shift=options.shift,
        lighting=options.lighting,
        seed=options.seed,
    )
    model = DenseContrast(
        options.name,
        options.layers,
        scenes,
        options.steps,
        options.places,
        temperature=options.temperature,
        learning_rate=options.learning_rate,
    )
    tracker = Tracker(
        folder,
        "pretraining",
        folder.name,
        {"method": "dense contrast"},
        options.tracking_uri,
        enabled=options.tracking,
    )
    tracker.params(options.settings)
    _draw_views(scenes, folder / VIEWS)
    tracker.artifact(folder / VIEWS)
    trainer.logger = _TrackerLogger(tracker)
    file, status = folder / WEIGHTS, "FAILED"
    try:
        with Display(options.quiet).progress("Steps") as progress.show:
            _fit(trainer, model, folder / LAST)
        _save_half(model.backbone.model, file)
        tracker.artifact(file)
        status = "FINISHED"
    finally:
        tracker.close(status)
    return file


def command(options: Sequence[str], display: Display) -> None:
    """Makes a backbone from drawn scenes alone; the same command continues.

    Args:
        options: Those of `PretrainOptions`.
        display: Shows where the weights are, and how they are used.

    Raises:
        UserError: As `PretrainOptions` and `pretrain`, and for unknown keys.
    """
    chosen, _ = read(PretrainOptions, options, "pretrain", overrides=False)
    file = pretrain(chosen)
    display.where_next(
        [
            ("weights", str(file)),
            ("use", f"lit-fedad train backbone.name={chosen.name} backbone.weights={file}"),
        ]
    )


def _trainer(options: PretrainOptions, folder: Path, progress: _Steps) -> Trainer:
    """Builds Lightning's trainer, whose refusals become a `UserError`."""
    checkpoints = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=options.save_every, save_last=True, save_top_k=0
    )
    try:
        return Trainer(
            accelerator=options.accelerator,
            devices=1,
            precision=options.precision,  # type: ignore[arg-type]
            max_steps=options.steps,
            gradient_clip_val=5.0,
            log_every_n_steps=min(20, options.save_every),
            logger=False,
            callbacks=[checkpoints, progress],
            enable_model_summary=False,
            enable_progress_bar=False,
        )
    except (ValueError, MisconfigurationException) as error:
        raise UserError(f"pretrain: {' '.join(str(error).split())}") from error


def _fit(trainer: Trainer, model: DenseContrast, last: Path) -> None:
    """Trains from the last checkpoint, if there is one that can be read."""
    if last.exists():
        try:
            torch.load(last, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file fails in zipfile, pickle or torch
            # torch's own message advises to read the file without protection.
            raise UserError(
                f"{last} cannot be read ({type(error).__name__}): delete it to begin anew"
            ) from error
    with warnings.catch_warnings():
        # The loader's items are empty: workers would have nothing to do.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        try:
            trainer.fit(
                model,
                DataLoader(_EmptyItems(), batch_size=None),
                ckpt_path=last if last.exists() else None,
                weights_only=True,
            )
        except SystemExit:  # Lightning's answer to Ctrl-C
            if not trainer.interrupted:
                raise
    if trainer.interrupted:
        raise KeyboardInterrupt


class _Steps(Callback):
    """A callback that shows how many steps are done, and ends a training whose loss is not finite."""

    show: Callable[[int, int], None]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        """Checks that the loss is finite, and shows the step."""
        if not outputs["loss"].isfinite():
            raise UserError(
                f"the loss is not finite at step {trainer.global_step}: lower learning_rate, in another out="
            )
        self.show(trainer.global_step, trainer.max_steps)


class _EmptyItems(IterableDataset[int]):
    """One empty item a step, without end: scenes are drawn on the model's device."""

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)


class _TrackerLogger(Logger):
    """A logger that hands Lightning's numbers to a tracker."""

    name, version = "pretraining", 0

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Logs nothing: `pretrain` logs the settings."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Hands metrics to the tracker."""
        self._tracker.metrics({key: value for key, value in metrics.items() if key != "epoch"}, step or 0)


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Writes down which training a folder holds, so that no other one continues its checkpoint."""
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
    """Draws the first batch's first scenes, one view above the other."""
    first, second, _ = scenes.views(0)
    rows = [torch.cat(list(view[:8]), dim=2) for view in (first, second)]
    pixels = (255 * torch.cat(rows, dim=1)).round().to(torch.uint8)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)


def _save_half(backbone: nn.Module, file: Path) -> None:
    """Saves weights alone, in half precision, under timm's names."""
    state = {
        key: value.half().cpu().contiguous()
        for key, value in backbone.state_dict().items()
        if not key.endswith("num_batches_tracked")
    }
    safetensors.torch.save_file(state, file)
