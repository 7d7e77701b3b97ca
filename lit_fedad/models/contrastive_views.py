"""Random views of whole batches for contrastive learning.

torchvision's v2 transforms draw one set of parameters for each call: on a batch, all images would get the same crop and
colours, and calls for single images are slow. Here each image has its own parameters, and a batch is one call.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2.functional import rgb_to_grayscale

from lit_fedad.core.bounds import at_least, within
from lit_fedad.core.errors import UserError

CROP_TRIES = 10
"""Number of boxes drawn for an image; the first that fits is taken, as in torchvision."""


def draw_boxes(
    count: int, size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Draws boxes as torchvision's ``RandomResizedCrop`` does, from torch's global CPU generator.

    Area and logarithm of the aspect ratio are uniform; a box that does not fit is drawn again. If no try fits, the
    sides of the first are cut to the image's.

    Args:
        count: Number of boxes B.
        size: Height and width of the images, in pixels.
        scale: Least and greatest area, as a share of the image's.
        ratio: Least and greatest ratio of width to height.

    Returns:
        Top, left, height and width of the boxes [B, 4], in whole pixels.
    """
    area = math.prod(size) * torch.empty(CROP_TRIES, count).uniform_(*scale)
    aspect = torch.empty(CROP_TRIES, count).uniform_(math.log(ratio[0]), math.log(ratio[1])).exp()
    limits = torch.tensor(size)
    sides = torch.stack([area / aspect, area * aspect], dim=2).sqrt().round().long()
    fits = ((sides >= 1) & (sides <= limits)).all(dim=2)
    first = fits.byte().argmax(dim=0)  # 0 where none fits
    sides = sides[first, torch.arange(count)].clamp(min=1).minimum(limits)
    corners = (torch.rand(count, 2) * (limits - sides + 1)).long()
    return torch.cat([corners, sides], dim=1)


def crop_resize(images: Tensor, boxes: Tensor, mirrored: Tensor) -> Tensor:
    """Cuts a box out of each image, resizes it to the image's size (bilinear) and mirrors some.

    As a box is never larger than its image, antialiasing would change nothing.

    Args:
        images: Images [B, C, H, W].
        boxes: Top, left, height and width [B, 4], in pixels.
        mirrored: Whether left and right of each image are exchanged, bool [B].

    Returns:
        Crops [B, C, H, W].
    """
    coordinates = []
    for length, start, side in zip(images.shape[2:], *boxes.T.float()[:, :, None].split(2), strict=True):
        centres = torch.arange(length, device=images.device) + 0.5
        # Positions stop at the centres of the box's outermost pixels: pixels outside the box must not contribute.
        inside = (centres * side / length).clamp(min=0.5).minimum(side - 0.5)
        coordinates.append((2 * (start + inside) - length) / length)
    rows, columns = coordinates
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), dim=3)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def adjust_brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Multiplies images [B, 3, H, W] in [0, 1], each by its own factor [B]."""
    return (images * factors[:, None, None, None]).clamp_(0, 1)


def adjust_contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Scales the difference of images [B, 3, H, W] in [0, 1] from their mean grey, each by its own factor [B]."""
    # The conversion is linear: this is the mean of the grey image.
    grey = rgb_to_grayscale(images.mean(dim=(2, 3), keepdim=True))
    return torch.lerp(grey, images, factors[:, None, None, None]).clamp_(0, 1)


def adjust_saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Scales the difference of images [B, 3, H, W] in [0, 1] from their grey version, each by its own factor [B]."""
    return torch.lerp(rgb_to_grayscale(images), images, factors[:, None, None, None]).clamp_(0, 1)


def adjust_hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Shifts the hue of images [B, 3, H, W] in [0, 1], each by its own amount [B]; 1 is the full circle.

    Value (the largest channel) and chroma (its difference from the smallest) stay as they are.
    """
    red, green, blue = images.unbind(dim=1)
    low, high = images.amin(dim=1), images.amax(dim=1)
    chroma = high - low
    # Hue in sixths of the circle. With channels scaled to a minimum of 0 and a maximum of 1 its distance from red is
    # 1 + g + b - r, towards green or towards blue. So no cases are needed, which would be slow. A grey pixel has no
    # hue, and needs none because its chroma is zero.
    distance = 1 + (green + blue - red - low) / chroma.clamp(min=torch.finfo(chroma.dtype).tiny)
    hue = (torch.copysign(distance, green - blue) + 6 * shifts[:, None, None]).remainder_(6)
    shares = torch.stack([(hue - 3).abs_() - 1, 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_()], dim=1)
    return shares.clamp_(0, 1).mul_(chroma[:, None]).add_(low[:, None])


class ContrastiveViews(nn.Module):
    """One random view of each image: crop, flip, colour jitter and greyscale, as in FADngs (T+) and SimCLR.

    Each image has its own parameters. They come from torch's global CPU generator whatever the device, so that all
    devices draw the same views. The four colour adjustments are applied in a random order, drawn once for a batch.

    Args:
        crop_scale: Least and greatest area of the crop, as a share of the image's.
        ratio: Least and greatest ratio of the crop's width to its height.
        flip: Probability of exchanging left and right.
        jitter: Strength s of brightness, contrast and saturation (factors from 1 - s to 1 + s, s at most 1) and hue
            (shifts from -s to s of the colour circle).
        jitter_probability: Probability of the colour jitter.
        greyscale: Probability of conversion to greyscale.
    """

    def __init__(
        self,
        crop_scale: tuple[float, float] = (0.2, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1),
        jitter_probability: float = 0.8,
        greyscale: float = 0.2,
    ) -> None:
        super().__init__()
        within("task.views", 0, 1, flip=flip, jitter_probability=jitter_probability, greyscale=greyscale)
        if len(crop_scale) != 2 or not 0 < crop_scale[0] <= crop_scale[1] <= 1:
            raise UserError(f"task.views.crop_scale={list(crop_scale)}: give two rising shares above 0")
        if len(ratio) != 2 or not 0 < ratio[0] <= ratio[1]:
            raise UserError(f"task.views.ratio={list(ratio)}: give two rising numbers above 0")
        if len(jitter) != 4 or not all(0 <= strength <= 1 for strength in jitter) or jitter[3] > 0.5:
            raise UserError(
                f"task.views.jitter={list(jitter)}: give four numbers in [0, 1], the last up to 0.5"
            )
        self.crop_scale, self.ratio, self.flip, self.greyscale = crop_scale, ratio, flip, greyscale
        self.jitter, self.jitter_probability = jitter, jitter_probability

    def forward(self, images: Tensor) -> Tensor:
        """Draws a random view of each image [B, 3, H, W] in [0, 1], in float32."""
        count, _, height, width = images.shape
        boxes = draw_boxes(count, (height, width), self.crop_scale, self.ratio)
        mirrored, jittered, grey = torch.rand(3, count) < torch.tensor(
            [[self.flip], [self.jitter_probability], [self.greyscale]]
        )
        strengths = torch.tensor(list(self.jitter))[:, None]
        changes = strengths * torch.empty(4, count).uniform_(-1, 1)
        adjustments = [
            (adjust_brightness, 1 + changes[0]),
            (adjust_contrast, 1 + changes[1]),
            (adjust_saturation, 1 + changes[2]),
            (adjust_hue, changes[3]),
        ]
        order = torch.randperm(4).tolist()

        # Clamped, because interpolation may leave [0, 1] by rounding.
        views = crop_resize(images.float(), boxes.to(images.device), mirrored.to(images.device)).clamp_(0, 1)
        # Indices instead of masks: the CPU knows their number, so that it need not wait for the device.
        chosen = jittered.nonzero()[:, 0]
        index = chosen.to(images.device)
        coloured = views[index]
        for adjust, amounts in (adjustments[number] for number in order):
            coloured = adjust(coloured, amounts[chosen].to(images.device))
        views[index] = coloured
        index = grey.nonzero()[:, 0].to(images.device)
        views[index] = rgb_to_grayscale(views[index], num_output_channels=3)
        return views


def kept_turns(views: int) -> tuple[int, ...]:
    """Returns the rotation of every cached view of an image, in quarter turns.

    A quarter of the views, rounded down, shows each of the three rotations; the others are not rotated.

    Raises:
        UserError: If there are fewer than five views.

    Example:
        >>> kept_turns(10)
        (0, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    """
    at_least("features", 5, views=views)
    rotated = views // 4
    return (0,) * (views - 3 * rotated) + tuple(turn for turn in (1, 2, 3) for _ in range(rotated))


def rotations(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates images [B, C, S, S] by 90, 180 and 270 degrees, anticlockwise: the shifted copies of FADngs (T-)."""
    quarter, half, three_quarters = (torch.rot90(images, turns, dims=(2, 3)) for turns in (1, 2, 3))
    return quarter, half, three_quarters
