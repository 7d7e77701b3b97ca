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

    Where the student fails, local structure is anomalous; where it, with a second half of its outputs, fails to imitate
    the autoencoder, the global arrangement is. Both maps are scaled by their quantiles on the client's own training
    images, which stay with it. The teacher is the configured backbone, in place of the paper's distilled network, the
    student is padded, the rate stays constant, and there is no penalty on images of other things.

    Args:
        backbone: Frozen teacher.
        grid: See `PatchTask`, also for the other arguments that are not listed here.
        image_size: See `PatchTask`.
        width: Channels of the student's layers.
        latent: Numbers of the autoencoder's bottleneck.
        hard: Share of the errors that the student does not learn from: those below this quantile. The authors' 0.999 is
            for 70,000 steps: after hundreds the student's mean error is several times that of a constant.
        low: Quantile of the normal maps that is drawn as 0.
        high: Quantile that is drawn as 0.1.
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
        # Of the local and the global map: the value that is drawn as 0, and the one that is drawn as 0.1.
        self.register_buffer("quantiles", torch.tensor([[0.0, 1.0], [0.0, 1.0]]))

    @property
    def images_behind(self) -> int | None:
        """One where the student learns from the hardest errors of a batch alone: all may be of one image."""
        return 1 if self.hard else None

    def view(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the teacher's features of the images, and of the same with other colours."""
        changed = self._recoloured(self.images_of(batch))
        with torch.no_grad():
            teacher, target = (self.standardised(self.embed({"image": x})) for x in (batch["image"], changed))
        return {"image": batch["image"], "teacher": teacher, "changed": changed, "target": target}

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the student's outputs [B, P, 2 C]: for the teacher, and for the autoencoder."""
        return self._imitated(self.images_of(batch))

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes ``loss``, the sum of ``student``, ``autoencoder`` and ``imitation`` (EfficientAD Alg. 1)."""
        errors = (batch["teacher"] - features[..., : self.channels]).square().flatten()
        at = min(len(errors), int(self.hard * len(errors)) + 1)
        hard = errors[errors >= errors.detach().kthvalue(at).values].mean()
        rebuilt = self.autoencoder(batch["changed"])
        ae = (batch["target"] - rebuilt).square().mean()
        imitation = (rebuilt - self._imitated(batch["changed"])[..., self.channels :]).square().mean()
        return {
            "loss": hard + ae + imitation,
            "student": hard,
            "autoencoder": ae,
            "imitation": imitation,
        }

    def embedding(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the local and the global error [B, P, 2]."""
        outputs = self(batch)
        teacher = self.standardised(self.embed(batch))
        local = (teacher - outputs[..., : self.channels]).square().mean(2)
        arranged = (self.autoencoder(batch["image"]) - outputs[..., self.channels :]).square().mean(2)
        return torch.stack([local, arranged], dim=2)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Computes the mean of both maps, scaled, and its peak."""
        low, high = self.quantiles[:, 0], self.quantiles[:, 1]
        scaled = 0.1 * (features - low) / (high - low).clamp(min=1e-12)
        scores = scaled.mean(2).flatten()
        return Prediction(image_score=self.judge(scores), anomaly_map=self.draw(scores))

    @torch.no_grad()
    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Measures the quantiles of both maps on local images, after statistics, unless pooled ones were loaded."""
        self.standardise_locally(loader)
        errors = torch.cat([maps.flatten(0, 1).cpu() for maps in map_batches(self, loader, self.embedding)])
        ordered = errors.float().sort(dim=0).values
        at = [min(len(ordered) - 1, int(share * len(ordered))) for share in self.shares]
        self.quantiles = ordered[at].T.to(self.quantiles)

    def _imitated(self, images: Tensor) -> Tensor:
        maps = F.interpolate(self.student(images).float(), self.grid, mode="bilinear", align_corners=False)
        return maps.flatten(2).transpose(1, 2)

    @torch.no_grad()
    def _recoloured(self, images: Tensor) -> Tensor:
        """Changes brightness, contrast or saturation of each image, whichever is drawn."""
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
    """Builds the paper's small patch description network, padded: maps [B, outputs, ~H / 4, ~W / 4].

    On a grid that is ``coarser`` than these maps, the last layer takes larger steps and computes no more than the grid
    shows.
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
        latent: Numbers of the vector.
        channels: Channels of the features.
    """

    def __init__(self, size: tuple[int, int], grid: tuple[int, int], latent: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        height, width = size
        widths = [3, *(max(1, latent // 2),) * 2, *(latent,) * 3]
        for inputs, outputs in pairwise(widths):
            if min(height, width) < 8:  # a smaller image is not halved five times
                break
            layers += [nn.Conv2d(inputs, outputs, 4, stride=2, padding=1), nn.ReLU()]
            height, width, last = height // 2, width // 2, outputs
        if not layers:
            raise UserError(
                f"image.size={size} is too small for task efficient_ad; give at least 8 pixels a side"
            )
        self.encode = nn.Sequential(*layers, nn.Conv2d(last, latent, (height, width)))
        # The vector grows to the grid in steps of two.
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
