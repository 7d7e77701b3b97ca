"""A representation that is learnt from random views of images, or of their frozen features."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import at_least
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive_losses import RepresentationLoss


class Representation(Task):
    """A task with features f(x) and a projection h(f(x)) of two layers, trained on views of images.

    Args:
        encoder: Maps images [B, 3, S, S] by f to features [B, C], with C as its attribute ``num_features``: a
            network that is trained on pixels, or a `FrozenEncoder`.
        views: Draws augmented images.
        projection: Dimensions D of h(f(x)).
        mean: Channel means by which images were normalised.
        std: Channel standard deviations by which images were normalised.

    Attributes:
        warmup: Number of rounds of a warm-up, in which another loss is trained.
        scores_turned: Whether scores use an image in its four rotations. Their frozen features are then computed beside
            the image's own, and are ``turned`` [B, 4, C] in a batch.

    Raises:
        UserError: If the projection has no dimension.
    """

    scores_turned: ClassVar[bool] = False
    output_modules: tuple[str, ...] = ("projection",)
    warmup: int = 0
    draw: ContrastiveViews
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        views: ContrastiveViews,
        projection: int = 128,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        at_least("task", 1, projection=projection)
        self.encoder, self.draw, self.projected = encoder, views, projection
        self.num_features: int = encoder.num_features  # type: ignore[assignment]
        self.projection = nn.Sequential(
            nn.Linear(self.num_features, self.num_features),
            nn.ReLU(),
            nn.Linear(self.num_features, projection),
        )
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    @property
    def warming_up(self) -> bool:
        """Whether this round belongs to the warm-up."""
        return 0 < self.round <= self.warmup

    @property
    def current_loss(self) -> RepresentationLoss:
        """The loss of this round, which decides what views are drawn."""
        raise NotImplementedError

    def view(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draws the views for this round's loss: as one batch of V B images ``image``, and as ``views`` [V, B, ...]."""
        if "views" in batch:
            views = self.current_loss.drawn_views(batch["views"])
            return {**batch, "image": views.flatten(0, 1), "views": views}
        views = self.draw_views(self.images_of(batch) * self.std + self.mean)
        return {**batch, "image": (views.flatten(0, 1) - self.mean) / self.std, "views": views}

    def draw_views(self, images: Tensor) -> Tensor:
        """Draws the views [V, B, 3, S, S] of images in [0, 1] for the loss of this round."""
        return self.current_loss.views(images, self.draw)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the features f(x) [B, C]."""
        return self.encoder(self.images_of(batch))

    def project(self, features: Tensor) -> Tensor:
        """Computes the normalised projection z = h(f(x)) [B, D]."""
        return F.normalize(self.projection(features).float(), dim=1)
