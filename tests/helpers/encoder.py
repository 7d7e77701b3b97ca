"""Encoders that train in milliseconds."""

from torch import Tensor, nn


class Encoder(nn.Module):
    """Images of any size to five features, through a normalisation layer."""

    num_features = 5

    def __init__(self) -> None:
        super().__init__()
        # A bias before a normalisation has no gradient but for rounding, which Adam makes as large as any other.
        self.mix, self.norm = (
            nn.Conv2d(3, self.num_features, 3, stride=2, bias=False),
            nn.BatchNorm2d(self.num_features),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.mix(images)).relu().mean((2, 3))


class ConvEncoder(nn.Module):
    """Images of any size to six features, through a normalisation layer only if asked."""

    num_features = 6

    def __init__(self, normalise: bool = False) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, self.num_features, 3)
        self.norm = nn.BatchNorm2d(self.num_features) if normalise else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.mix(images)).relu().mean((2, 3))


class FlatEncoder(nn.Module):
    """Images of four numbers to three features, through a normalisation layer."""

    num_features = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, self.num_features), nn.BatchNorm1d(self.num_features), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.flatten(1))
