"""CSI: contrast in which rotations repel, and a classifier of rotations; both score (Tack et al., NeurIPS 2020)."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from timm.optim import Lars
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import full_precision, map_batches
from lit_fedad.contracts.randomness import seeded
from lit_fedad.contracts.task import cosine_decay
from lit_fedad.core.bounds import at_least, below_one, within
from lit_fedad.core.errors import UserError
from lit_fedad.models.contrastive_views import crop_resize, draw_boxes
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks import contrastive_losses
from lit_fedad.tasks.deep_svdd import off_zero
from lit_fedad.tasks.representation import Representation

_TURNS = 4  # rotations by 0, 90, 180 and 270 degrees
_CROP = (0.54, 0.54), (3 / 4, 4 / 3)
"""Range of the share of the area, and of the ratio of the sides, of the crops that the original's scores average."""
_MIN_MEAN = 1e-6
"""Smallest magnitude of the means by which scores are divided."""


class CSI(Representation):
    """Contrasting shifted instances (arXiv 2007.08176); shifts are rotations by 90, 180 and 270 degrees.

    The loss is NT-Xent over two views of every rotation of an image, where each rotation counts as a separate image,
    plus the cross-entropy of a linear classifier of the rotation on the features f(x).

    Let z_k be the projection, not normalised, of x turned by k quarters, and l_k the classifier's logit for k, both
    averaged over some crops. With x_m the images of the client, the score is ``-1/4 sum_k [max_m <z_k(x), z_k(x_m) /
    |z_k(x_m)|> / mean_m |z_k(x_m)| + l_k(x) / mean_m l_k(x_m)]``: the cosine to the nearest image times the norm, plus
    the classifier's certainty. Sums and weights are those of the released code, which averages over rotations where the
    paper adds.

    Images are mirrored before they are turned, as in the original. If they were mirrored afterwards, the classifier
    could not tell 90 from 270 degrees.

    The bank consists of the client's own images, and is personal. Before training the classifier knows nothing, and its
    mean logits may be negative: the second part of the score is then noise.

    Args:
        encoder: See `Representation`.
        rounds: Number of all rounds.
        image_size: Side S of the images in pixels.
        mirror: Probability of exchanging left and right before turning.
        samples: Number of crops, of 0.54 of the area, over which the score of an image averages; they are the same for
            every image, and keep its colours, which the original changes at random. 0 takes the whole image. None takes
            10 from pixels, as the original, and 0 on frozen features.
        temperature: Temperature of NT-Xent.
        learning_rate: Largest learning rate of LARS.
        warmup_rounds: Rounds over which the learning rate rises from a tenth of this; then it falls to 0 as a cosine.
        momentum: Momentum of LARS.
        weight_decay: Weight decay of LARS.
        **representation: See `Representation`; ``views`` must not mirror. With a `FrozenEncoder`, cached views are
            never mirrored, and scores use whole images.

    Raises:
        UserError: If views mirror, crops of frozen features are requested, or a number is out of range.
    """

    prepares = True
    trains_on_bank = False
    scores_turned = True
    local_buffers = ("bank", "norms", "certainty")
    scoring_buffers = local_buffers
    free_buffers = ("bank",)
    output_modules = ("projection", "shift")
    bank: Tensor
    norms: Tensor
    certainty: Tensor
    boxes: Tensor
    mirrored: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        rounds: int,
        image_size: int,
        mirror: float = 0.5,
        samples: int | None = None,
        temperature: float = 0.5,
        learning_rate: float = 1.0,
        warmup_rounds: int = 10,
        momentum: float = 0.9,
        weight_decay: float = 1e-6,
        **representation: Any,
    ) -> None:
        super().__init__(encoder, **representation)
        frozen = isinstance(encoder, FrozenEncoder)
        if self.draw.flip:
            raise UserError(
                f"task.views.flip={self.draw.flip}: mirrored after turning, 90 and 270 degrees are one; give"
                " task.views.flip=0, and task.mirror"
            )
        if frozen and samples:
            raise UserError(
                f"task.samples={samples}: frozen features are of whole images; give task.samples=0"
            )
        samples = (0 if frozen else 10) if samples is None else samples
        at_least(
            "task",
            0,
            rounds=rounds,
            samples=samples,
            warmup_rounds=warmup_rounds,
            learning_rate=learning_rate,
        )
        within("task", 0, 1, mirror=mirror)
        at_least("task", 0, weight_decay=weight_decay)
        below_one("task", momentum=momentum)
        self.shift = nn.Linear(self.num_features, _TURNS)
        self.contrast = contrastive_losses.CSI(temperature)
        self.rounds, self.mirror, self.warmup_rounds = rounds, mirror, warmup_rounds
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay
        with seeded(0, "crops that scores average over"):
            boxes = draw_boxes(samples, (image_size, image_size), *_CROP)
            mirrored = torch.rand(samples) < mirror
        self.register_buffer("boxes", boxes, persistent=False)
        self.register_buffer("mirrored", mirrored, persistent=False)
        self.register_buffer("bank", torch.empty(_TURNS, 0, self.projected))
        self.register_buffer("norms", torch.ones(_TURNS))
        self.register_buffer("certainty", torch.ones(_TURNS))

    @property
    def current_loss(self) -> contrastive_losses.RepresentationLoss:
        """NT-Xent over all rotations."""
        return self.contrast

    def draw_views(self, images: Tensor) -> Tensor:
        """Draws two views of every rotation [8, B, 3, S, S] of images in [0, 1], of which some are mirrored first."""
        pair = []
        for _ in range(2):
            mirrored = (torch.rand(len(images)) < self.mirror).to(images.device)
            pair.append(torch.where(mirrored[:, None, None, None], images.flip(3), images))
        turned = (torch.rot90(copy, turn, (2, 3)) for turn in range(_TURNS) for copy in pair)
        return torch.stack([self.draw(copy) for copy in turned])

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the loss; its parts are ``contrast`` and ``rotation``."""
        views = batch["views"]
        contrast = self.contrast(self.projection(features).view(*views.shape[:2], -1), batch)["loss"]
        turns = torch.tensor(self.contrast.turns, device=features.device).repeat_interleave(views.shape[1])
        rotation = F.cross_entropy(self.shift(features).float(), turns)
        return {"loss": contrast + rotation, "contrast": contrast.detach(), "rotation": rotation.detach()}

    def embedding(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes z_k and, in the last column, l_k of each rotation k [B, 4, D + 1]."""
        embeddings = []
        for copies in self._copies(batch):
            features = self({**batch, "image": copies.flatten(0, 1)})
            projections = self.projection(features).float().unflatten(0, (-1, _TURNS))
            logits = self.shift(features).float().unflatten(0, (-1, _TURNS)).diagonal(dim1=1, dim2=2)
            embeddings.append(torch.cat([projections, logits[:, :, None]], dim=2))
        return torch.stack(embeddings).mean(0)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images against the bank."""
        if not self.bank.shape[1]:
            raise UserError("there is no bank to score by: the client has no images")
        z, logits = features[:, :, :-1], features[:, :, -1]
        with full_precision(z):
            nearest = torch.stack([(z[:, k] @ self.bank[k].T).amax(1) for k in range(_TURNS)], dim=1)
        normality = nearest / self.norms + logits / self.certainty
        return Prediction(image_score=-normality.mean(1))

    @torch.no_grad()
    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Fills the bank with local images, and computes the means of their norms and logits."""
        rows = torch.cat([embedded.cpu() for embedded in map_batches(self, loader, self.embedding)])
        z, logits = rows[:, :, :-1], rows[:, :, -1]
        self.bank = F.normalize(z, dim=2).transpose(0, 1).contiguous().to(self.bank)
        self.norms = z.norm(dim=2).mean(0).clamp(min=_MIN_MEAN).to(self.norms)
        self.certainty = off_zero(logits.mean(0), _MIN_MEAN).to(self.certainty)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds LARS, at this round's learning rate; ``always_adapt`` means without weight decay too."""
        completed_rounds = max(self.round - 1, 0)
        if completed_rounds < self.warmup_rounds:
            rate = self.learning_rate * (0.1 + 0.9 * completed_rounds / self.warmup_rounds)
        else:
            rate = self.learning_rate * cosine_decay(
                self.round - self.warmup_rounds, self.rounds - self.warmup_rounds
            )
        return Lars(
            self.trainable,
            lr=rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            always_adapt=True,
        )

    def _copies(self, batch: Mapping[str, Any]) -> Iterator[Tensor]:
        """Yields, crop by crop, the four rotations of each image [B, 4, ...]."""
        if "turned" in batch:
            yield batch["turned"]
            return
        images = self.images_of(batch)
        crops = (
            crop_resize(images, box.expand(images.shape[0], 4), mirrored.expand(images.shape[0]))
            for box, mirrored in zip(self.boxes, self.mirrored, strict=True)
        )
        for crop in crops if len(self.boxes) else (images,):
            yield torch.stack([torch.rot90(crop, turn, (2, 3)) for turn in range(_TURNS)], dim=1)
