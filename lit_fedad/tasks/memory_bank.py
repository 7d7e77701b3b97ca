"""Anomaly detection by the distance of patch features to a bank of normal ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import check_optimizer, map_batches
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import UserError
from lit_fedad.memory.knn import nearest, neighbour_distances
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.reduce import MemoryReduce, PositionReduce, Reduced
from lit_fedad.memory.subspace import (
    Share,
    check_share,
    fit_subspaces,
    folds_of,
    least_residuals,
    typical_norm,
)
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.tasks.patches import CHANNEL_STATISTICS, SubspaceTask, sample_patches
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale, Score

Distance = Literal["euclidean", "cosine"]
Maps = Literal["bank", "subspace"]

QUANTILES = 257
"""Number of equally spaced quantiles that represent a client's distances to the nearest slots."""


class MemoryBank(SubspaceTask):
    """The task with a frozen backbone, a trainable head and a memory bank.

    Patch features are mapped to memory features by the head (`MemoryGenerator`). Training attracts them to the bank
    (FedDyMem Eq. 12); the score of a patch is its distance to the bank, the score of an image the maximum of a smoothed
    map.

    A method may set the bank (`load_memory`) and the subspace (`load_subspace`); otherwise the task builds them from
    local data before training, the bank anew whenever weights have changed.

    Args:
        backbone: Frozen feature extractor.
        head: Builds the head, given the number of channels; None for no head.
        loss: Training loss.
        score: Patch score.
        image_score: Patch score of image scores, scaled by the radius of the nearest slots (`LocalScale`); None for
            the same patch score as in maps.
        subspace: Share of the variance of frozen normal features that a linear subspace keeps, or ``"likelihood"``
            (`fit_basis`). Image scores are then distances from the subspace plus `bank_weight` times distances to the
            bank. None for distances to the bank only.
        reduce: Compresses local patches to a bank, if the task builds its own.
        distance: ``"euclidean"``, or ``"cosine"``: memory features have length 1, and their distance to a slot m is
            1 - cos(f, m), as in AnomalyDINO (Damm et al., WACV 2025), for features of vision transformers.
        bank_weight: Weight of distances to the bank beside distances from the subspace, in image scores.
        products: Names of the products that each have a subspace; all other images share one more. None for a single
            subspace. An image is scored by the subspace with the smallest residuals.
        maps: Values that anomaly maps show: distances to the ``"bank"``, or the values of image scores (distances from
            the ``"subspace"``, scaled locally).
        grid: See `PatchTask`.
        slots: Size of the bank; None for grid * grid.
        whiten: See `PatchTask.whiten`.
        patches_per_image: Random patches of each image per training step; None for all.
        learning_rate: Learning rate of the optimiser.
        weight_decay: Weight decay of the optimiser.
        optimizer: Builds the optimiser of the head, given its parameters, ``lr`` and ``weight_decay``.
        **patches: See `PatchTask`.

    Raises:
        UserError: If a number is out of range, there are fewer slots than neighbours, or the reduction does not suit
            slots or subspace.
    """

    prepares = True
    local_buffers = ("memory", "radii", "centre", "basis", *CHANNEL_STATISTICS, "threshold")

    threshold: Tensor

    def __init__(
        self,
        backbone: FeaturePyramid,
        head: Callable[[int], nn.Module] | None,
        loss: HingeLoss,
        score: Score,
        reduce: MemoryReduce,
        image_score: LocalScale | None = None,
        subspace: Share | None = None,
        grid: int = 56,
        slots: int | None = None,
        whiten: float | None = None,
        patches_per_image: int | None = None,
        learning_rate: float = 1e-3,
        weight_decay: float = 5e-4,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        distance: Distance = "euclidean",
        maps: Maps = "bank",
        bank_weight: float = 0.0,
        products: Sequence[str] | None = None,
        **patches: Any,
    ) -> None:
        super().__init__(backbone, grid, **patches)
        above("task", 0, whiten=whiten)
        if whiten is not None:
            self.whiten, self.whitening = whiten, torch.eye(self.channels)
            self.mean.fill_(torch.nan)
        at_least("task", 1, slots=slots, patches_per_image=patches_per_image)
        at_least("task", 0, learning_rate=learning_rate, weight_decay=weight_decay, bank_weight=bank_weight)
        check_optimizer("task.optimizer", partial(optimizer, lr=learning_rate, weight_decay=weight_decay))
        check_share(subspace=subspace)
        if distance not in get_args(Distance):
            raise UserError(f"task.distance={distance}: give {' or '.join(get_args(Distance))}")
        if maps not in get_args(Maps) or (maps == "subspace" and subspace is None):
            raise UserError(
                f"task.maps={maps}: give bank, or subspace where task.subspace is a share of variance"
            )
        self.slots = slots or grid * grid
        self.reach = max(score.neighbours, 1 if image_score is None else image_score.neighbours)
        reach = max(loss.reach, self.reach)
        if self.slots < reach:
            raise UserError(
                f"task.{'slots' if slots else 'grid'}={slots or grid}: a bank of {self.slots} slots, but"
                f" loss and score look at {reach}; give more, or fewer task.loss.neighbours"
            )
        if isinstance(reduce, PositionReduce):
            reduce.check(self.slots, self.vectors_per_image, subspace is not None)
        self.head = head(self.num_features) if head else None
        self.loss, self.score, self.image_score, self.reduce = loss, score, image_score, reduce
        self.subspace, self.cosine, self.maps = subspace, distance == "cosine", maps
        self.bank_weight, self.products = bank_weight, tuple(products or ())
        self.patches_per_image = patches_per_image
        self.learning_rate, self.weight_decay, self.optimizer = learning_rate, weight_decay, optimizer
        self.register_buffer("memory", torch.full((self.slots, self.num_features), torch.nan))
        self.register_buffer("radii", torch.ones(self.slots))
        self.register_buffer("centre", torch.zeros(1, self.num_features))
        self.register_buffer("basis", torch.empty(1, self.num_features, 0))
        fixed = loss.threshold if not isinstance(loss.threshold, str) else torch.nan
        self.register_buffer("threshold", torch.tensor(float(fixed)))

    # ---------------------------------------------------------------------------------------------- features

    def generate(self, patches: Tensor, places: Tensor) -> Tensor:
        """Computes memory features [n, C]: standardised, mapped by the head, and of length 1 for cosines.

        Args:
            patches: Frozen patch features [n, C].
            places: Patch centres in [-1, 1] [n, 2].
        """
        patches = self.standardised(patches)
        features = patches if self.head is None else self.head(patches, places)
        return F.normalize(features, dim=1) if self.cosine else features

    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Draws frozen features of random patches: ``patches`` [B, n, C] and their ``places`` [B, n, 2]."""
        with torch.no_grad():
            patches = self.embed(batch)
        places = self.places.expand(patches.shape[0], -1, -1)  # type: ignore[operator]
        patches, places = sample_patches(self.patches_per_image, patches, places)
        return {"patches": patches, "places": places}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes memory features M of a view's patches [B, n, C], or of whole images [B, H0 * W0, C]."""
        if "patches" in batch:
            patches, places = batch["patches"], batch["places"]
        else:
            patches = self.embed(batch)
            places = self.places.expand(patches.shape[0], -1, -1)  # type: ignore[operator]
        generated = self.generate(patches.flatten(0, 1), places.flatten(0, 1))
        return generated.unflatten(0, patches.shape[:2])

    # ---------------------------------------------------------------------------------------------- training

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes ``loss`` (FedDyMem Eq. 12), and ``nn_distance``: the mean distance to the nearest slot."""
        generated = features.flatten(0, 1).float()
        _, neighbours = nearest(generated.detach(), self.bank, self.loss.reach)
        distances = self.measured(neighbour_distances(generated, self.bank, neighbours))
        loss = self.loss(distances, self.threshold)
        return {"loss": loss, "nn_distance": distances[:, 0].detach().mean()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the optimiser of all that is trained."""
        return self.optimizer(self.trainable, lr=self.learning_rate, weight_decay=self.weight_decay)

    # ---------------------------------------------------------------------------------------------- the bank

    @property
    def bank(self) -> Tensor:
        """The slots with which patches are compared; for cosines scaled to length 1, which slots as means are not."""
        return F.normalize(self.memory, dim=1) if self.cosine else self.memory

    def measured(self, distances: Tensor) -> Tensor:
        """Computes the task's distances from Euclidean ones: ``|u - v|^2 / 2 = 1 - cos(u, v)`` of unit vectors."""
        return distances.square() / 2 if self.cosine else distances

    @property
    def measures(self) -> bool:
        """Whether second moments of features are needed, and not only those of single channels."""
        return self.subspace is not None or self.whiten is not None

    @property
    def _sets(self) -> tuple[int, int]:
        """Numbers of sets of moments: of the one to standardise by (0 or 1), and of the subspaces' folds."""
        scaling = int(self.standardise or self.whiten is not None)
        return scaling, 0 if self.subspace is None else self.kinds * folds_of(self.subspace)

    @property
    def moment_sets(self) -> int:
        """Number of sets of moments: one to standardise by, and the folds of each product's subspace."""
        return sum(self._sets)

    def moments(self, loader: DataLoader) -> list[Moments]:
        """Computes the moments of the bank's features, to standardise by, then the subspaces' by product and fold."""
        scaling, folds = self._sets[0], self._sets[1] // self.kinds
        by_product = self.second_moments(loader, folds, average_pool=True, kinds=self.kinds) if folds else []
        return [*self.second_moments(loader, scaling), *by_product]

    def subspace_moments(self, moments: Sequence[Moments]) -> list[Moments]:
        """Selects the sets of `moments` to which the subspaces are fitted; all sets if there is no subspace."""
        return list(moments[-self._sets[1] :])

    def fit_subspace(self, moments: Sequence[Moments], statistics: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Fits the subspaces; returns the arguments of `load_subspace`.

        Args:
            moments: The sets of moments that `moments` computes, over all clients.
            statistics: The statistics by which the bank's features are standardised (`statistics_of`), or empty.
        """
        assert self.subspace is not None
        by_product = self.subspace_moments(moments)
        bank = moments[0] if self._sets[0] else Moments.union(by_product)
        norm = torch.ones(()) if self.cosine else typical_norm(bank, statistics)
        shrinkage = self.shrinkage if self.standardise else None
        centre, basis = fit_subspaces(by_product, self.subspace, shrinkage, norm)
        return {"centre": centre, "basis": basis}

    @torch.no_grad()
    def reduce_memory(
        self,
        loader: Iterable[Any],
        context: Context,
        previous: Tensor | None,
        slots: int | None = None,
        past: Reduced | None = None,
    ) -> Reduced:
        """Compresses all local patches to one bank, batch by batch (`MemoryReduce`).

        Args:
            loader: Local batches.
            context: Round and randomness; the round is t in FedDyMem Eq. 16.
            previous: Previous memory M'^{t-1} [slots, C]; None for the first memory.
            slots: Size of the bank; None for the task's.
            past: The sums by slot of the patches of earlier stages, which are added.
        """
        round = 0 if previous is None else max(context.round, 0)
        self.reduce.start(previous, round, slots or self.slots, context.generator("memory-reduce"))
        uses_residuals = previous is not None and self.subspace is not None

        def add(batch: Mapping[str, Any]) -> None:
            judge = partial(self.unusual, batch) if uses_residuals else None
            self.reduce.update(self(batch).float(), judge)

        for _ in map_batches(self, loader, add):
            pass
        if past is not None:
            self.reduce.remember(past)
        return Reduced(*(tensor.cpu() for tensor in self.reduce.finish()))

    @torch.no_grad()
    def neighbour_quantiles(self, loader: DataLoader) -> tuple[Tensor, int]:
        """Computes `QUANTILES` quantiles of the distances to the K nearest slots, and the number of distances."""
        patches = (features.flatten(0, 1).float() for features in map_batches(self, loader, self))
        lengths = (nearest(vectors, self.bank, self.loss.neighbours)[0] for vectors in patches)
        ordered = torch.cat([self.measured(batch).flatten().cpu() for batch in lengths]).sort().values
        ranks = torch.linspace(0, len(ordered) - 1, QUANTILES).round().long()
        return ordered[ranks], len(ordered)

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Builds the bank from local data: equal weights and images give an equal bank, whatever the round.

        The first time it also computes subspace and threshold, and statistics unless some were loaded.
        """
        if first and self.measures:
            moments = self.moments(loader)
            if self.mean.isnan().any():
                self.load_statistics(**self.statistics_of(moments[0]))
            if self.subspace is not None:
                self.load_subspace(**self.fit_subspace(moments, self.loaded_statistics()))
        elif first:
            self.standardise_locally(loader)
        # There is no moving average with the last bank: its slots are features that the head no longer computes.
        # The context has round 0, so that random draws, and with them the bank, do not change while weights do not.
        reduced = self.reduce_memory(loader, Context(context.seed, 0, context.client), previous=None)
        self.load_memory(reduced.memory, reduced.radii)
        if first and isinstance(self.loss.threshold, str):
            quantiles, _ = self.neighbour_quantiles(loader)
            self.threshold = quantiles[len(quantiles) // 2].to(self.threshold)

    # ------------------------------------------------------------------------------------------------ scoring

    def outside(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the residuals of patches [B * H0 * W0] from the subspace with the smallest ones for their image.

        All layers are averaged over 3x3 positions, which blurs maps but improves image scores.
        """
        return least_residuals(self.embed(batch, average_pool=True), self.centre, self.basis)[0].flatten()

    def nearest_kind(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Computes the product whose subspace has the smallest residuals of each image [B]; None for fewer than two."""
        if self.kinds == 1 or self.subspace is None:
            return None
        return least_residuals(self.embed(batch, average_pool=True), self.centre, self.basis)[1]

    def unusual(self, batch: Mapping[str, Any], lengths: Tensor) -> Tensor:
        """Computes the patch values of image scores [B * H0 * W0]: residuals plus weighted distances to the bank.

        Args:
            batch: The images.
            lengths: Euclidean distances of their patches to the nearest slot [B * H0 * W0].
        """
        return self.outside(batch) + self.bank_weight * self.measured(lengths)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores a batch; the backbone's features are computed only once, for the bank and for the subspace."""
        return super().predict_step(batch if "embedding" in batch else self.with_pyramid(batch), batch_idx)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images by distances to the bank or, where there is a subspace, by what `unusual` computes."""
        lengths, slots = nearest(features.flatten(0, 1).float(), self.bank, self.reach)
        distances = self.measured(lengths)
        scores = self.score(distances[:, : self.score.neighbours])
        if self.subspace is None:
            image_values, values, radii = scores, distances, self.measured(self.radii)
        else:
            image_values = self.unusual(batch, lengths[:, 0])
            values, radii = image_values[:, None], self.radii
        if self.image_score is not None:
            reach = min(values.shape[1], self.image_score.neighbours)
            image_values = self.image_score(values[:, :reach], radii, slots[:, :reach])
        map_values = image_values if self.maps == "subspace" else scores
        return Prediction(image_score=self.judge(image_values), anomaly_map=self.draw(map_values))

    # ----------------------------------------------------------------------------- under a plain Trainer

    def on_fit_start(self) -> None:
        """Builds the bank, unless one was loaded."""
        if self.memory.isnan().any():
            super().on_fit_start()
