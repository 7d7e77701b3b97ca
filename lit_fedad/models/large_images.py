"""Large images for a frozen backbone: seen tile by tile, or in several sizes.

A small image shows whole objects, a large one small defects.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.core.errors import UserError
from lit_fedad.models.backbones import FeaturePyramid

PIXELS_AT_ONCE = 2**20
"""Number of pixels of all tiles in one call of the backbone, or one tile if that has more; it bounds the memory."""

LARGE = 256
"""Short side in pixels from which on an image is seen in several sizes by default."""

USUAL_SCALES = 2
"""Number of sizes of such an image by default: whole and half."""

SMALLEST = 32
"""Fewest pixels along the short side of the smallest size."""


class _OtherView(nn.Module):
    """The base of frozen backbones that do not only see whole images; they can replace a `FeaturePyramid`.

    Args:
        backbone: The backbone.
        view: Description of how it sees images, for the fingerprint.

    Attributes:
        channels, strides, mean, std, provenance: Those of the backbone.
        fingerprint: SHA-256 over the backbone's fingerprint and the view.
    """

    def __init__(self, backbone: FeaturePyramid, view: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.channels, self.strides = backbone.channels, backbone.strides
        self.mean, self.std = backbone.mean, backbone.std
        self.provenance: dict[str, Any] = backbone.provenance
        self.fingerprint = hashlib.sha256(f"{backbone.fingerprint} {view} v1".encode()).hexdigest()


class TiledPyramid(_OtherView):
    """A frozen backbone that sees large images as overlapping tiles.

    Tiles lie evenly over the image and overlap by at least ``overlap`` pixels. If several tiles cover a position, its
    features are their mean, weighted by the distance to the edge of each tile. At the edge features depend on the
    padding of the backbone's input: there they count least, and no seam remains. The output is one map for each layer,
    as if the backbone saw the whole image.

    Args:
        backbone: The backbone.
        size: Height and width of the images in pixels.
        tile: Side of the tiles in pixels.
        overlap: Fewest pixels that neighbouring tiles share; None for a quarter of the tile, rounded down to a multiple
            of the backbone's largest stride.

    Attributes:
        count: Number of tiles of an image.

    Raises:
        UserError: If a tile is larger than the image, the overlap not smaller than the tile, or a length no multiple of
            the backbone's largest stride.
    """

    def __init__(
        self,
        backbone: FeaturePyramid,
        size: tuple[int, int],
        tile: int,
        overlap: int | None = None,
    ) -> None:
        unit = max(backbone.strides)
        overlap = tile // 4 // unit * unit if overlap is None else overlap
        _check(size, tile, overlap, unit)
        super().__init__(backbone, f"tile {tile} overlap {overlap}")
        self.tile, self.at_once = tile, max(1, PIXELS_AT_ONCE // tile**2)
        starts = [_starts(side, tile, overlap, unit) for side in size]
        self.count = len(starts[0]) * len(starts[1])
        sides = [*zip(size, starts, strict=True)]
        self.pixels = nn.ModuleList(_Pieces(side, tile, pixel_starts) for side, pixel_starts in sides)
        self.cells = nn.ModuleList(
            nn.ModuleList(
                _Pieces(side // stride, tile // stride, [start // stride for start in pixel_starts])
                for side, pixel_starts in sides
            )
            for stride in self.strides
        )

    @torch.no_grad()
    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps images ``[B, 3, H, W]`` to features ``[B, C_l, H_l, W_l]``, one tensor for each layer."""
        if torch.compiler.is_exporting():  # the graph must not depend on the number of images
            return self._join([self.backbone(self._cut(images))])
        by_image = [
            self._join([self.backbone(tiles) for tiles in self._cut(image).split(self.at_once)])
            for image in images.split(1)
        ]
        return [torch.cat(layers) for layers in zip(*by_image, strict=True)]

    def _cut(self, images: Tensor) -> Tensor:
        """Cuts images [B, 3, H, W] into tiles [B * count, 3, tile, tile]."""
        rows, columns = cast("_Sides", self.pixels)
        pieces = columns.cut(rows.cut(images, 2), 4)
        return pieces.movedim((2, 4), (1, 2)).flatten(0, 2)

    def _join(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Joins the features of all tiles of some images, given in batches of tiles, to maps [B, C_l, H_l, W_l]."""
        joined = []
        for layers, sides in zip(zip(*parts, strict=True), self.cells, strict=True):
            rows, columns = cast("_Sides", sides)
            tiles = torch.cat(layers)
            grid = tiles.unflatten(0, (-1, rows.number, columns.number))
            joined.append(rows.join(columns.join(grid.movedim((1, 2), (2, 4)), 4), 2))
        return joined


class _Pieces(nn.Module):
    """One side of an image, divided into overlapping pieces.

    Args:
        length: Length of the side.
        piece: Length of the pieces.
        starts: Start of each piece, ascending; together the pieces cover the side.
    """

    inside: Tensor
    places: Tensor
    share: Tensor

    def __init__(self, length: int, piece: int, starts: Sequence[int]) -> None:
        super().__init__()
        self.number = len(starts)
        within = torch.arange(length) - torch.tensor(starts)[:, None]  # [pieces, length]
        covers = (within >= 0) & (within < piece)
        edge = torch.minimum(within + 0.5, piece - 0.5 - within).where(covers, 0.0)
        # The pieces at every position, sorted by their share. All positions have as many entries as the one that most
        # pieces cover; further entries have a share of 0.
        share, order = (edge / edge.sum(0)).sort(dim=0, descending=True, stable=True)
        max_covers = int(covers.sum(0).max())
        places = order * piece + within.gather(0, order).clamp(0, piece - 1)
        self.register_buffer(
            "inside", torch.cat([start + torch.arange(piece) for start in starts]), persistent=False
        )
        self.register_buffer("places", places[:max_covers], persistent=False)
        self.register_buffer("share", share[:max_covers], persistent=False)

    def cut(self, values: Tensor, dim: int) -> Tensor:
        """Cuts a dimension of the side's length into two: pieces, and positions within them."""
        return values.index_select(dim, self.inside).unflatten(dim, (self.number, -1))

    def join(self, pieces: Tensor, dim: int) -> Tensor:
        """Joins two dimensions, pieces and positions within them, to one of the side's length."""
        flat = pieces.flatten(dim, dim + 1)
        shape = [-1 if axis == dim else 1 for axis in range(flat.ndim)]
        return reduce(
            torch.add,
            (
                flat.index_select(dim, places) * share.view(shape)
                for places, share in zip(self.places, self.share, strict=True)
            ),
        )


_Sides = tuple[_Pieces, _Pieces]


def _starts(side: int, tile: int, overlap: int, unit: int) -> list[int]:
    """Returns the starts of tiles: evenly over the side, at multiples of ``unit``; the last tile ends with the side."""
    steps = math.ceil((side - tile) / (tile - overlap))
    return [(side - tile) // unit * step // steps * unit for step in range(steps + 1)] if steps else [0]


def _check(size: tuple[int, int], tile: int, overlap: int, unit: int) -> None:
    if tile > min(size):
        raise UserError(
            f"image.tile={tile} is larger than the image, {size[0]} x {size[1]} pixels (height, width): give a smaller"
            " tile, or a larger image.size"
        )
    if overlap >= tile:
        raise UserError(f"image.overlap={overlap} must be smaller than image.tile={tile}")
    for key, value in (("tile", tile), ("overlap", overlap), ("size", size[0]), ("size", size[1])):
        if value % unit:
            near = dict.fromkeys((value // unit * unit or unit, -(-value // unit) * unit))
            raise UserError(
                f"image.{key}={value}: with image.tile the backbone's largest stride, {unit}, must divide image.size,"
                f" image.tile and image.overlap; give {' or '.join(map(str, near))}"
            )


class ScaledPyramid(_OtherView):
    """A frozen backbone that sees an image in its whole size, half of it, a quarter of it, and so on.

    Args:
        backbone: The backbone.
        scales: Number of sizes, including the whole; the provenance contains it.
    """

    def __init__(self, backbone: FeaturePyramid, scales: int) -> None:
        super().__init__(backbone, f"scales {scales}")
        self.scales = scales
        self.provenance = {**backbone.provenance, "scales": scales}

    def forward(self, images: Tensor) -> list[Tensor]:
        """Maps images ``[B, 3, H, W]`` to features ``[B, C_l, H_l, W_l]`` of all layers, size by size."""
        return self._of_each_size(self.backbone, images)

    def features(self, images: Tensor) -> list[Tensor]:
        """Computes the features of `forward`, with gradients for the images."""
        return self._of_each_size(self.backbone.features, images)

    def _of_each_size(self, encode: Callable[[Tensor], list[Tensor]], images: Tensor) -> list[Tensor]:
        maps = [*encode(images)]
        for _ in range(1, self.scales):
            images = F.avg_pool2d(images, 2)
            maps += encode(images)
        return maps


Backbone = FeaturePyramid | TiledPyramid | ScaledPyramid
"""A frozen backbone, whether it sees whole images, tiles, or several sizes."""


def at_scales(backbone: Backbone, scales: int | None, size: tuple[int, int]) -> Backbone:
    """Returns a backbone that sees images in a given number of sizes.

    Args:
        backbone: A backbone that sees images in any number of sizes.
        scales: Number of sizes. None for `USUAL_SCALES` from `LARGE` pixels on, but for one size in tiles, and with
            backbones of a single stride, such as transformers, whose layers all see the whole image.
        size: Height and width of the images in pixels.

    Raises:
        UserError: If images are too small for so many sizes, or are seen in tiles.
    """
    single = backbone.backbone if isinstance(backbone, ScaledPyramid) else backbone
    if scales is None:
        strides = set(getattr(single, "strides", ()))  # a user's own backbone may have no such attribute
        whole = not isinstance(single, TiledPyramid) and len(strides) > 1
        scales = USUAL_SCALES if whole and min(size) >= LARGE else 1
    if scales == 1:
        return single
    if scales < 1 or min(size) < SMALLEST * 2 ** (scales - 1):
        raise UserError(
            f"task.scales={scales}: give 1 or more, of which the smallest has {SMALLEST} pixels along its short side"
            f" (images of {size[0]} x {size[1]})"
        )
    if isinstance(single, TiledPyramid):
        raise UserError(f"task.scales={scales}: an image in tiles is seen in one size; give task.scales=1")
    return ScaledPyramid(single, scales)
