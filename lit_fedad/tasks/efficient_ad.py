"""EfficientAD: a student and an autoencoder imitate a frozen teacher (Batzner, Heckler and König, WACV 2024)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Prediction
from lit_fedad.contracts.compute import map_batches
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.models.contrastive_views import adjust_brightness, adjust_contrast, adjust_saturation
from lit_fedad.tasks.patches import PatchTask

_JITTER = 0.2
"""Largest change of brightness, contrast or saturation of the images that the autoencoder sees."""


class EfficientAD(PatchTask):
    """A student that sees patches, and an autoencoder that sees whole images, learn a teacher's standardised features.

    Local structure is anomalous where the student fails to imitate the teacher. The global arrangement is anomalous
    where the second half of the student's outputs fails to imitate the autoencoder. Both error maps are scaled by their
    quantiles on the client's own training images; these quantiles are personal. This version differs from the paper's:
    the teacher is the configured backbone instead of a distilled network, the student is padded, the learning rate is
    constant, and there is no penalty on images of other things.

    Args:
        backbone: Frozen teacher.
        grid: See `PatchTask`, also for the other arguments that are not listed here.
        image_size: See `PatchTask`.
        width: Channels of the student's layers.
        latent: Length of the vector in the autoencoder's bottleneck.
        hard: Quantile of the errors below which the student does not learn from them. The authors' 0.999 is meant for
            70,000 steps: after some hundred steps the student's mean error is several times that of a constant.
        low: Quantile of the maps of normal images that is mapped to 0.
        high: Quantile of the maps of normal images that is mapped to 0.1.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of Adam.

    Raises:
        UserError: If a number is out of range.
    """

    prepares = True
    trains_on_bank = False
    local_buffers = (*PatchTask.local_buffers, "quantiles")
    scoring_buffers = ("quantiles",)
    output_modules = ("autoencoder",)

    quantiles: Tensor

    def __init__(
        self,
        backbone: FeaturePyramid,
        grid: int = 64,
        image_size: int | Sequence[int] = 256,
        width: int = 256,
        latent: int = 64,
        hard: float = 0.0,
        low: float = 0.9,
        high: float = 0.995,
        learning_rate: float = 1e-4,
        weight_decay: float = 1e-5,
        sigma: float = 0.0,
        rim: int = 0,
        top: float = 0.0,
    ) -> None:
        super().__init__(
            backbone, grid, image_size, shrinkage=0.0, average_pool=False, sigma=sigma, rim=rim, top=top
        )
        at_least("task", 2, width=width, latent=latent)
        within("task", 0, 1, hard=hard, low=low, high=high)
        above("task", 0, learning_rate=learning_rate)
        at_least("task", 0, weight_decay=weight_decay)
        if low >= high:
            raise UserError(f"task.low={low} must be below task.high={high}")
        self.hard, self.shares = hard, (low, high)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.num_features = 2 * self.channels
        self.student = student(width, self.num_features, self.size[0] // (4 * self.grid[0]))
        self.autoencoder = Autoencoder(self.size, self.grid, latent, self.channels)
        # Row 0 is of the local map, row 1 of the global one: the value that is mapped to 0, and the one mapped to 0.1.
        self.register_buffer("quantiles", torch.tensor([[0.0, 1.0], [0.0, 1.0]]))

    @property
    def images_behind(self) -> int | None:
        """One if the student learns only from the largest errors of a batch: all may be of one image."""
        return 1 if self.hard else None

    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the teacher's features of the images, and of the same images with changed colours."""
        changed = self._recoloured(self.images_of(batch))
        with torch.no_grad():
            teacher, target = (self.standardised(self.embed({"image": x})) for x in (batch["image"], changed))
        return {"image": batch["image"], "teacher": teacher, "changed": changed, "target": target}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the student's outputs [B, P, 2 C]: for the teacher, and for the autoencoder."""
        return self._student_outputs(self.images_of(batch))

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes ``loss``, the sum of ``student``, ``autoencoder`` and ``imitation`` (EfficientAD Alg. 1)."""
        errors = (batch["teacher"] - features[..., : self.channels]).square().flatten()
        rank = min(len(errors), int(self.hard * len(errors)) + 1)
        student_loss = errors[errors >= errors.detach().kthvalue(rank).values].mean()
        rebuilt = self.autoencoder(batch["changed"])
        autoencoder_loss = (batch["target"] - rebuilt).square().mean()
        imitated = self._student_outputs(batch["changed"])[..., self.channels :]
        imitation_loss = (rebuilt - imitated).square().mean()
        return {
            "loss": student_loss + autoencoder_loss + imitation_loss,
            "student": student_loss,
            "autoencoder": autoencoder_loss,
            "imitation": imitation_loss,
        }

    def embedding(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the local and the global error [B, P, 2]."""
        outputs = self(batch)
        teacher = self.standardised(self.embed(batch))
        local_error = (teacher - outputs[..., : self.channels]).square().mean(2)
        global_error = (self.autoencoder(batch["image"]) - outputs[..., self.channels :]).square().mean(2)
        return torch.stack([local_error, global_error], dim=2)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes the mean of both scaled maps as anomaly map, and its peak as image score."""
        low, high = self.quantiles[:, 0], self.quantiles[:, 1]
        scaled = 0.1 * (features - low) / (high - low).clamp(min=1e-12)
        scores = scaled.mean(2).flatten()
        return Prediction(image_score=self.judge(scores), anomaly_map=self.draw(scores))

    @torch.no_grad()
    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Computes local statistics, unless pooled ones were loaded, then quantiles of both maps on local images."""
        self.standardise_locally(loader)
        errors = torch.cat([maps.flatten(0, 1).cpu() for maps in map_batches(self, loader, self.embedding)])
        ordered = errors.float().sort(dim=0).values
        ranks = [min(len(ordered) - 1, int(share * len(ordered))) for share in self.shares]
        self.quantiles = ordered[ranks].T.to(self.quantiles)

    def _student_outputs(self, images: Tensor) -> Tensor:
        """Computes the student's outputs [B, P, 2 C] on the grid."""
        maps = F.interpolate(self.student(images).float(), self.grid, mode="bilinear", align_corners=False)
        return maps.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def _recoloured(self, images: Tensor) -> Tensor:
        """Changes brightness, contrast or saturation of each image, one of them at random."""
        mean, std = (
            torch.tensor(x).to(images)[:, None, None] for x in (self.backbone.mean, self.backbone.std)
        )
        pixels = images * std + mean
        factors = 1 + _JITTER * (2 * torch.rand(len(images)).to(images) - 1)
        changed = torch.stack(
            [change(pixels, factors) for change in (adjust_brightness, adjust_contrast, adjust_saturation)]
        )
        chosen = torch.randint(len(changed), (len(images),)).to(images.device)
        return (changed[chosen, torch.arange(len(images), device=images.device)] - mean) / std


def student(width: int, outputs: int, coarser: int) -> nn.Sequential:
    """Builds the paper's small patch description network, padded; its maps are [B, outputs, ~H / 4, ~W / 4].

    Args:
        width: Channels of the inner layers.
        outputs: Channels of the output.
        coarser: Ratio of the positions along these maps to those along the grid; above 1 the last layer has a larger
            stride, so that it computes no more positions than the grid needs.
    """
    narrow, stride = width // 2, min(max(coarser, 1), 4)
    return nn.Sequential(
        nn.Conv2d(3, narrow, 4, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(narrow, width, 4, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, outputs, 4, stride=stride, padding=(5 - stride) // 2),
    )


class Autoencoder(nn.Module):
    """Maps whole images to a teacher's features, through one vector.

    Args:
        size: Height and width of the images.
        grid: Rows and columns of the features.
        latent: Length of the vector.
        channels: Channels of the features.
    """

    def __init__(self, size: tuple[int, int], grid: tuple[int, int], latent: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        height, width = size
        widths = [3, *(max(1, latent // 2),) * 2, *(latent,) * 3]
        for inputs, outputs in pairwise(widths):
            if min(height, width) < 8:  # small images are halved fewer than five times
                break
            layers += [nn.Conv2d(inputs, outputs, 4, stride=2, padding=1), nn.ReLU()]
            height, width, last = height // 2, width // 2, outputs
        if not layers:
            raise UserError(
                f"image.size={size} is too small for task efficient_ad; give at least 8 pixels a side"
            )
        self.encode = nn.Sequential(*layers, nn.Conv2d(last, latent, (height, width)))
        # The decoder enlarges the vector to the grid, doubling the sides in each step.
        steps = max(1, max(grid).bit_length() - 1)
        self.sizes = [tuple(-(-side // 2**step) for side in grid) for step in reversed(range(steps))]
        self.decode = nn.ModuleList(
            nn.Sequential(nn.Conv2d(latent, latent, 3, padding=1), nn.ReLU(), nn.Dropout(0.2))
            for _ in self.sizes
        )
        self.output = nn.Sequential(
            nn.Conv2d(latent, latent, 3, padding=1), nn.ReLU(), nn.Conv2d(latent, channels, 3, padding=1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Computes features [B, P, channels] of images [B, 3, H, W]."""
        maps = self.encode(images)
        for layer, size in zip(self.decode, self.sizes, strict=True):
            maps = layer(F.interpolate(maps, size, mode="bilinear", align_corners=False))
        return self.output(maps).float().flatten(2).transpose(1, 2)
