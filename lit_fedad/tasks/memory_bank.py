"""Anomaly detection by the distance of patch features to a bank of normal ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction, StandardisedTask
from lit_fedad.contracts.batches import map_batches
from lit_fedad.contracts.precision import full_precision
from lit_fedad.contracts.task import channel_scale
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import at_least
from lit_fedad.memory.knn import nearest, neighbour_distances
from lit_fedad.memory.reduce import MemoryReduce, Reduced
from lit_fedad.models.anomaly_map import AnomalyMap
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale, Score

QUANTILES = 257
"""Number of equally spaced quantiles that represent a client's distances to the nearest slots."""


class MemoryBank(StandardisedTask):
    """The task with a frozen backbone, a trainable head and a memory bank.

    Features of several backbone layers are resized to one grid and concatenated (FedDyMem Eq. 8), optionally
    standardised per channel, and mapped to memory features by the head (`MemoryGenerator`). Training attracts them to
    the bank (FedDyMem Eq. 12); the score of a patch is its distance to the bank, the score of an image the maximum of a
    smoothed map.

    A method may set the bank (`load_memory`); otherwise the task builds one from local data before training, and anew
    whenever weights have changed.

    Args:
        backbone: Frozen feature extractor.
        head: Builds the head, given the number of channels; None for no head.
        loss: Training loss.
        score: Patch score.
        image_score: Patch score whose smoothed maximum is the image's score; None for the maximum of the anomaly map.
        reduce: Compresses local patches to a bank, where the task builds its own.
        grid: Side of the patch grid, H0 = W0.
        image_size: Side of the images, in pixels.
        slots: Size of the bank; None for grid * grid.
        standardise: Whether channels are standardised to mean 0 and variance 1 over the training patches.
        average_pool: Whether each layer is averaged over 3x3 neighbouring positions, as in CFA and PatchCore.
        patches_per_image: Random patches of each image per training step; None for all.
        learning_rate: Learning rate of AdamW.
        weight_decay: Weight decay of AdamW.
        sigma: Standard deviation of the Gaussian smoothing of the map, in pixels.

    Raises:
        UserError: If a number is out of range, or there are fewer slots than neighbours.
    """

    prepares = True
    local_buffers = ("memory", "radii", "mean", "scale", "threshold")

    memory: Tensor
    radii: Tensor
    mean: Tensor
    scale: Tensor
    threshold: Tensor

    def __init__(
        self,
        backbone: FeaturePyramid,
        head: Callable[[int], nn.Module] | None,
        loss: HingeLoss,
        score: Score,
        reduce: MemoryReduce,
        image_score: LocalScale | None = None,
        grid: int = 56,
        image_size: int = 224,
        slots: int | None = None,
        standardise: bool = False,
        average_pool: bool = False,
        patches_per_image: int | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 5e-4,
        sigma: float = 4.0,
    ) -> None:
        super().__init__()
        at_least(
            "task", 1, grid=grid, image_size=image_size, slots=slots, patches_per_image=patches_per_image
        )
        at_least("task", 0, learning_rate=learning_rate, weight_decay=weight_decay, sigma=sigma)
        reach = max(loss.reach, score.neighbours)
        if (slots or grid * grid) < reach:
            raise UserError(
                f"task.{'slots' if slots else 'grid'}={slots or grid}: a bank of {slots or grid * grid} slots, but"
                f" loss and score look at {reach}; give more, or fewer task.loss.neighbours"
            )
        self.backbone = backbone
        self.num_features = sum(backbone.channels)
        self.head = head(self.num_features) if head else None
        self.loss, self.score, self.image_score, self.reduce = loss, score, image_score, reduce
        self.grid, self.slots = grid, slots or grid * grid
        self.vectors_per_image = grid * grid
        self.standardise, self.average_pool = standardise, average_pool
        self.patches_per_image = patches_per_image
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.draw_map = AnomalyMap(grid, image_size, sigma)
        self.register_buffer("memory", torch.full((self.slots, self.num_features), torch.nan))
        self.register_buffer("radii", torch.ones(self.slots))
        # As in the bank, values that are not yet set are NaN.
        self.register_buffer("mean", torch.full((self.num_features,), torch.nan if standardise else 0.0))
        self.register_buffer("scale", torch.ones(self.num_features))
        fixed = loss.threshold if not isinstance(loss.threshold, str) else torch.nan
        self.register_buffer("threshold", torch.tensor(float(fixed)))
        side = (torch.arange(grid) + 0.5) / grid * 2 - 1
        y, x = torch.meshgrid(side, side, indexing="ij")
        self.register_buffer("places", torch.stack([x.flatten(), y.flatten()], dim=1), persistent=False)

    # ---------------------------------------------------------------------------------------------- features

    def embed(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes frozen features on the grid (FedDyMem Eq. 8).

        Args:
            batch: With ``pyramid`` (cached features of each layer) or ``image`` [B, 3, S, S].

        Returns:
            Patch features [B, grid * grid, C], not standardised.
        """
        with full_precision(self.memory):  # as cached features are computed
            pyramid = batch["pyramid"] if "pyramid" in batch else self.backbone(batch["image"])
        layers = []
        for layer in pyramid:
            if self.average_pool:
                layer = F.avg_pool2d(layer, 3, stride=1, padding=1)
            if layer.shape[-1] != self.grid:
                layer = F.interpolate(
                    layer, size=(self.grid, self.grid), mode="bilinear", align_corners=False
                )
            layers.append(layer.flatten(2))
        return torch.cat(layers, dim=1).transpose(1, 2)

    def generate(self, patches: Tensor, places: Tensor) -> Tensor:
        """Computes memory features of single patches: standardised, then mapped by the head.

        Args:
            patches: Frozen patch features [n, C].
            places: Patch centres in [-1, 1] [n, 2].

        Returns:
            Memory features [n, C].
        """
        if self.standardise:
            patches = (patches - self.mean) / self.scale
        return patches if self.head is None else self.head(patches, places)

    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Draws frozen features of random patches: ``patches`` [B, n, C] and their ``places`` [B, n, 2]."""
        with torch.no_grad():
            patches = self.embed(batch)
        places = self.places.expand(len(patches), -1, -1)  # type: ignore[operator]
        if self.patches_per_image is not None and self.patches_per_image < patches.shape[1]:
            drawn = (
                torch.rand(patches.shape[:2])
                .argsort(dim=1)[:, : self.patches_per_image, None]
                .to(patches.device)
            )
            patches, places = patches.take_along_dim(drawn, dim=1), places.take_along_dim(drawn, dim=1)
        return {"patches": patches, "places": places}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes memory features M of a view's patches [B, n, C], or of whole images [B, grid * grid, C]."""
        if "patches" in batch:
            patches, places = batch["patches"], batch["places"]
        else:
            patches = self.embed(batch)
            places = self.places.expand(len(patches), -1, -1)  # type: ignore[operator]
        generated = self.generate(patches.flatten(0, 1), places.flatten(0, 1))
        return generated.unflatten(0, patches.shape[:2])

    # ---------------------------------------------------------------------------------------------- training

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the training loss (FedDyMem Eq. 12).

        Returns:
            ``loss``, and ``nn_distance``: the mean distance to the nearest slot.
        """
        generated = features.flatten(0, 1).float()
        _, neighbours = nearest(generated.detach(), self.memory, self.loss.reach)
        distances = neighbour_distances(generated, self.memory, neighbours)
        loss = self.loss(distances, self.threshold)
        return {"loss": loss, "nn_distance": distances[:, 0].detach().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds AdamW with AMSGrad (as in CFA; the likely meaning of the paper's "Adam, momentum 1")."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            parameters, lr=self.learning_rate, weight_decay=self.weight_decay, amsgrad=True
        )

    # ---------------------------------------------------------------------------------------------- the bank

    def load_memory(self, memory: Tensor, radii: Tensor | None = None) -> None:
        """Loads a memory [slots, C] and, where the image score uses them, the slots' radii [slots]."""
        self.memory = memory.to(self.memory)
        if radii is not None:
            self.radii = radii.to(self.radii)

    def load_statistics(self, mean: Tensor, scale: Tensor) -> None:
        """Loads the mean [C] and the scale [C] that channels are standardised by."""
        self.mean, self.scale = mean.to(self.mean), scale.to(self.scale)

    @torch.no_grad()
    def channel_moments(self, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """Computes number, mean [C] and variance [C] of all local frozen patch features, in one pass."""
        count = 0
        shift = total = square = torch.zeros(self.num_features, dtype=torch.float64)
        for features in map_batches(self, loader, self.embed):
            patches = features.flatten(0, 1).double().cpu()
            # Sums around the first batch's mean keep the variance exact for channels far from zero.
            shift = patches.mean(0) if count == 0 else shift
            count += len(patches)
            total, square = total + (patches - shift).sum(0), square + (patches - shift).square().sum(0)
        mean = total / count
        return count, (shift + mean).float(), (square / count - mean**2).clamp(min=0).float()

    @torch.no_grad()
    def reduce_memory(self, loader: DataLoader, context: Context, previous: Tensor | None) -> Reduced:
        """Compresses all local patches to one bank, batch by batch (`MemoryReduce`).

        Args:
            loader: Local batches.
            context: Round and randomness; the round is t in FedDyMem Eq. 16.
            previous: Previous memory M'^{t-1} [slots, C]; None for the first memory.
        """
        round = 0 if previous is None else max(context.round, 0)
        self.reduce.start(previous, round, self.slots, context.generator("memory-reduce"))
        for features in map_batches(self, loader, self):
            self.reduce.update(features.float())
        return Reduced(*(tensor.cpu() for tensor in self.reduce.finish()))

    @torch.no_grad()
    def neighbour_quantiles(self, loader: DataLoader) -> tuple[Tensor, int]:
        """Computes `QUANTILES` quantiles of the distances to the K nearest slots, and the number of distances."""
        distances = (
            nearest(features.flatten(0, 1).float(), self.memory, self.loss.neighbours)[0].flatten().cpu()
            for features in map_batches(self, loader, self)
        )
        ordered = torch.cat(list(distances)).sort().values
        at = torch.linspace(0, len(ordered) - 1, QUANTILES).round().long()
        return ordered[at], len(ordered)

    def prepare(self, loader: DataLoader, context: Context) -> None:
        """Builds bank and threshold from local data, and statistics unless some were loaded."""
        if self.mean.isnan().any():
            _, mean, variance = self.channel_moments(loader)
            self.load_statistics(mean, channel_scale(variance))
        self._build(loader, context)
        if isinstance(self.loss.threshold, str):
            quantiles, _ = self.neighbour_quantiles(loader)
            self.threshold = quantiles[len(quantiles) // 2].to(self.threshold)

    def refresh(self, loader: DataLoader, context: Context) -> None:
        """Builds the bank anew from local data: equal weights and images give an equal bank, whatever the round."""
        self._build(loader, context)

    def _build(self, loader: DataLoader, context: Context) -> None:
        # A slot of old weights lies among features that the head no longer makes: none may remain (no moving average).
        # Draws that changed by round would move the bank under weights that do not change.
        first = Context(context.seed, 0, context.client)
        reduced = self.reduce_memory(loader, first, previous=None)
        self.load_memory(reduced.memory, reduced.radii)

    # ------------------------------------------------------------------------------------------------ scoring

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by their distance to the bank."""
        distances, slots = nearest(features.flatten(0, 1).float(), self.memory, self.score.neighbours)
        maps = self._draw(self.score(distances))
        peaks = maps
        if self.image_score is not None:
            peaks = self._draw(self.image_score(distances[:, 0], self.radii, slots[:, 0]))
        return Prediction(image_score=peaks.flatten(1).amax(1), anomaly_map=maps)

    def _draw(self, scores: Tensor) -> Tensor:
        return self.draw_map(scores.reshape(-1, self.grid, self.grid))

    # ----------------------------------------------------------------------------- under a plain Trainer

    def on_fit_start(self) -> None:
        """Builds the bank, unless one was loaded."""
        if self.memory.isnan().any():
            self.prepare(self._trainer_loader(), Context(seed=0, round=0))

    def on_train_epoch_end(self) -> None:
        """Recomputes the bank; in a federation, the method calls `refresh`."""
        if self._trainer is not None:
            self.refresh(self._trainer_loader(), Context(seed=0, round=self.current_epoch + 1))

    def _trainer_loader(self) -> DataLoader:
        self.trainer.fit_loop.setup_data()
        return cast("DataLoader", self.trainer.train_dataloader)
