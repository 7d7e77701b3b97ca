"""A frozen backbone that costs nothing."""

from torch import nn
from torch.nn import functional as F


class TinyPyramid(nn.Module):
    """Two frozen layers: 3 channels at a quarter of the image's side, 5 at an eighth."""

    channels = (3, 5)
    fingerprint = "tiny"
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 5, 1).requires_grad_(False)

    def forward(self, images):
        return [F.avg_pool2d(images, 4), self.mix(F.avg_pool2d(images, 8))]
