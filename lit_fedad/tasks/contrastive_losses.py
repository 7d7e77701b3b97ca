"""Losses of a contrastive representation: the views of a batch, and the loss of their projections."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts.compute import full_precision
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import not_there
from lit_fedad.models.contrastive_views import kept_turns, rotations

Draw = Callable[[Tensor], Tensor]
"""Draws one random view of each image."""


class RepresentationLoss(nn.Module):
    """Base of the losses of the task `Contrastive`.

    Attributes:
        turns: Rotation of each view, in quarter turns, in ascending order.
        needs_pixels: Whether views must be images, and cannot be frozen features.
    """

    turns: tuple[int, ...] = (0, 0)
    needs_pixels = False

    def views(self, images: Tensor, draw: Draw) -> Tensor:
        """Draws the views [V, B, 3, S, S] of images in [0, 1] [B, 3, S, S]."""
        rotated = dict(enumerate((images, *rotations(images)) if any(self.turns) else (images,)))
        return torch.stack([draw(rotated[turn]) for turn in self.turns])

    def drawn_views(self, features: Tensor) -> Tensor:
        """Draws the views [V, B, C] of a batch among its cached views [B, N, C], whose rotations are `kept_turns`.

        Draws come from torch's global CPU generator. A view is drawn twice only if a rotation has too few of them.
        """
        turns = torch.tensor(kept_turns(features.shape[1]))
        drawn: list[Tensor] = []
        for turn in sorted(set(self.turns)):
            candidates = (turns == turn).nonzero()[:, 0]
            order = candidates[torch.rand(len(features), len(candidates)).argsort(dim=1)]
            drawn += [order[:, k % len(candidates)] for k in range(self.turns.count(turn))]
        return features[torch.arange(len(features)), torch.stack(drawn)].float()

    def forward(self, projections: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the loss.

        Args:
            projections: Projections of the views [V, B, D], not normalised.
            batch: ``views`` as drawn, ``normal`` [B] (which images are predicted normal), and the loader's entries.

        Returns:
            ``loss``, and other scalars to track.
        """
        raise not_there(self, "forward")


def similarities(projections: Tensor, temperature: float, anchors: int | None = None) -> Tensor:
    """Computes cosine similarities [A, N] of views with all views, divided by the temperature; -inf with itself.

    Args:
        projections: Projections [V, B, D], taken as N = V B vectors in this order.
        temperature: Temperature tau.
        anchors: Number A of vectors, the first ones, whose similarities are computed; None for all.
    """
    z = F.normalize(projections.flatten(0, 1).float(), dim=1)
    with full_precision(z):
        return (z[:anchors] / temperature @ z.T).fill_diagonal_(-torch.inf)


class SimCLR(RepresentationLoss):
    """The loss NT-Xent (Chen et al., ICML 2020): two views of an image attract, all other views in the batch repel.

    Args:
        temperature: Temperature tau.
        base_temperature: Number by which tau is divided to get a factor of the loss (0.5 / 0.07 = 7.14), as in the
            released codes of FADngs and of supervised contrast, whose learning rates are meant for the scaled loss.
            None for a factor of 1.
    """

    def __init__(self, temperature: float = 0.5, base_temperature: float | None = None) -> None:
        super().__init__()
        above("contrastive_loss", 0, temperature=temperature, base_temperature=base_temperature)
        self.temperature = temperature
        self.scale = 1.0 if base_temperature is None else temperature / base_temperature

    def forward(self, projections: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the mean over all views as ``loss``."""
        logits = similarities(projections, self.temperature)
        return {"loss": self.scale * _instance_loss(logits, projections.shape[1])}


class CSI(SimCLR):
    """SimCLR in which every rotation of an image is a separate image (Tack et al., NeurIPS 2020).

    In FADngs Table IV it is the contrast with rotated copies, without a selection of images predicted normal. The
    rotation classifier of the original is left out, since only the original's score uses it.
    """

    turns = (0, 0, 1, 1, 2, 2, 3, 3)


class CRAD(SimCLR):
    """The contrastive loss of anomaly detection CRAD (FADngs Eq. 7, FADngs Eq. 8 and FADngs Eq. 9).

    Unrotated views of all images that are predicted normal attract each other; views of the other images, and rotated
    views of all images, repel them. Anchors are the unrotated views of images predicted normal. A view is not its own
    positive.

    Args:
        temperature: See `SimCLR`, also for ``base_temperature``.
        rotated_views: Number of views of every rotation among the negatives: 2, as many as unrotated ones, or 1 to
            reduce cost.
        scale_by_positives: Whether the factor ``1/|X+|`` of FADngs Eq. 7 is omitted. With it the loss, and thus the
            effective learning rate, are about 60 times smaller at a batch of 32.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        rotated_views: int = 2,
        scale_by_positives: bool = False,
        base_temperature: float | None = None,
    ) -> None:
        super().__init__(temperature, base_temperature)
        at_least("contrastive_loss", 1, rotated_views=rotated_views)
        self.scale_by_positives = scale_by_positives
        self.turns = (0, 0, *(turn for turn in (1, 2, 3) for _ in range(rotated_views)))

    def forward(self, projections: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the mean of FADngs Eq. 7 over the anchors as ``loss``; 0 where no image is predicted normal."""
        normal = batch["normal"].repeat(2)  # for the two unrotated views of each image, which come first
        anchors = int(normal.sum())
        if anchors < 2:
            return {"loss": 0 * projections.sum()}
        rows = similarities(projections, self.temperature, len(normal))
        positives = rows[:, : len(normal)].masked_fill(~normal, -torch.inf)
        ratio = rows.logsumexp(1) - positives.logsumexp(1)
        scale = 1.0 if self.scale_by_positives else 1 / (anchors - 1)
        return {"loss": self.scale * scale * ratio[normal].mean()}


class CRADCode(CSI):
    """The loss of the released code of FADngs instead of FADngs Eq. 7, FADngs Eq. 8 and FADngs Eq. 9.

    Every view of every rotation is an anchor, which only the other view of the same rotated image attracts. All other
    views repel it, except that images predicted normal do not repel each other under the same rotation.

    Args:
        temperature: Temperature tau.
        base_temperature: See `SimCLR`.
    """

    def __init__(self, temperature: float = 0.5, base_temperature: float | None = 0.07) -> None:
        super().__init__(temperature, base_temperature)

    def forward(self, projections: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the mean over all views of all rotations as ``loss``."""
        views, size = projections.shape[:2]
        logits = similarities(projections, self.temperature)
        rotation = torch.tensor(self.turns, device=logits.device).repeat_interleave(size)
        image = torch.arange(size, device=logits.device).repeat(views)
        normal = batch["normal"].repeat(views)
        ignored = (rotation[:, None] == rotation) & (image[:, None] != image) & normal[:, None] & normal
        loss = _instance_loss(logits.masked_fill(ignored, -torch.inf), size)
        return {"loss": self.scale * loss}


class CrossEntropy(RepresentationLoss):
    """Supervised cross-entropy, "Supervised CE" in FADngs Table IV.

    Args:
        classes: Number of normal classes; images of other classes (contaminants) are ignored.
        width: Dimensions D of the projections.

    Raises:
        UserError: If there are fewer than two classes, of which nothing could be learnt.
    """

    turns = (0,)

    def __init__(self, classes: int, width: int = 128) -> None:
        super().__init__()
        at_least("task.loss", 2, classes=classes)
        self.classes = classes
        self.linear = nn.Linear(width, classes)

    def forward(self, projections: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the cross-entropy as ``loss``, and ``accuracy``."""
        normal = batch["category"] < self.classes
        logits, labels = self.linear(projections[0][normal]), batch["category"][normal]
        if not len(labels):
            return {"loss": 0 * projections.sum()}
        accuracy = (logits.detach().argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


class Reconstruction(RepresentationLoss):
    """The reconstruction error of an autoencoder through the projection, "AE" in FADngs Table IV.

    Args:
        decoder: Builds the decoder from projections [B, D] to images in [0, 1], given D and S.
        image_size: Side S of the images in pixels.
        width: Dimensions D of the projections.
    """

    needs_pixels = True

    def __init__(self, decoder: Callable[[int, int], nn.Module], image_size: int, width: int = 128) -> None:
        super().__init__()
        self.decoder = decoder(width, image_size)

    def views(self, images: Tensor, draw: Draw) -> Tensor:
        """Returns the images themselves as one view [1, ...]."""
        return images[None]

    def forward(self, projections: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes the mean squared error as ``loss``."""
        return {"loss": F.mse_loss(self.decoder(projections[0]).float(), batch["views"][0])}


def _instance_loss(logits: Tensor, size: int) -> Tensor:
    """Computes the mean of -log softmax at the paired view, given similarities of all views [V B, V B].

    Row v B + i is view v of image i, with ``size`` B; views 2k and 2k + 1 are a pair.
    """
    rows = torch.arange(len(logits), device=logits.device)
    view, image = rows.div(size, rounding_mode="floor"), rows % size
    return F.cross_entropy(logits, (view ^ 1) * size + image)
