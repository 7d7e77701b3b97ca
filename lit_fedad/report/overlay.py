"""An anomaly map laid over its image, in Pillow alone: a site that only scores needs no matplotlib."""

import math
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lit_fedad.core.files import atomic

# Indigo, purple, pink, orange, yellow: lightness rises in even steps (CIELAB 18, 37, 55, 73, 93), so it is readable in
# grey and with any kind of colour vision; saturated up to its end, so that high scores stand out on white ground.
_COLOURS = np.array([[28, 12, 146], [140, 26, 181], [225, 74, 134], [251, 155, 82], [244, 243, 43]])
_STRONGEST = 0.8  # opacity of the highest score in an overlay: what lies beneath stays visible


def heat(strength: np.ndarray) -> np.ndarray:
    """Colours scores from 0 (indigo) to 1 (yellow).

    Args:
        strength: Scores in 0 .. 1 [...].

    Returns:
        Red, green and blue in 0 .. 255 [..., 3].

    Examples:
        >>> heat(np.array([0.0, 0.625, 1.0])).tolist()
        [[28.0, 12.0, 146.0], [238.0, 114.5, 108.0], [244.0, 243.0, 43.0]]
    """
    stops = np.linspace(0, 1, len(_COLOURS))
    return np.stack([np.interp(strength, stops, channel) for channel in _COLOURS.T], axis=-1)


def overlay(image: np.ndarray, anomaly_map: np.ndarray, vmin: float, vmax: float) -> np.ndarray:
    """Blends an anomaly map into its image: the higher the score, the less of the image is visible.

    The image is shown in grey, so that every colour is a score. Scores up to `vmin` (and NaN) leave the image
    unchanged; those from `vmax` on are equally strong.

    Args:
        image: uint8 [H, W, 3].
        anomaly_map: Anomaly scores [H, W].
        vmin: Score at the lower end of the colour scale.
        vmax: Score at its upper end.

    Returns:
        uint8 [H, W, 3].

    Examples:
        >>> import numpy as np
        >>> image = np.full((1, 2, 3), 100, dtype=np.uint8)
        >>> overlay(image, np.array([[0.0, 1.0]]), vmin=0.0, vmax=1.0).tolist()
        [[[100, 100, 100], [215, 214, 54]]]
    """
    span = vmax - vmin if vmax > vmin else np.inf
    strength = np.nan_to_num((np.clip(anomaly_map, vmin, vmax).astype(float) - vmin) / span)
    grey = image @ np.array([0.299, 0.587, 0.114])  # luma of ITU-R BT.601
    opacity = _STRONGEST * strength[..., None]
    return np.rint((1 - opacity) * grey[..., None] + opacity * heat(strength)).astype(np.uint8)


def colour_ends(anomaly_map: np.ndarray, score: float, threshold: float) -> tuple[float, float]:
    """Computes which scores of a map get the first and the last colour, given the score of the image.

    Image scores and maps may have scales of their own. The map's highest value gets the colour of the image's score,
    on a scale from half the threshold to twice the threshold, the same for all images. A higher score counts as twice
    the threshold. Around a threshold below 0 the scale is as wide: from half its size below it to its size above it.

    Args:
        anomaly_map: Anomaly scores [H, W].
        score: Score of the image.
        threshold: Score above which images are anomalous.

    Returns:
        Ends for `overlay`.

    Example:
        >>> colour_ends(np.array([[1.0, 3.0]]), score=30.0, threshold=20.0)
        (1.0, 4.0)
        >>> colour_ends(np.array([[-5.0, -1.0]]), score=-0.5, threshold=-2.0)
        (-3.5, -0.5)
    """
    low, high = threshold - abs(threshold) / 2, threshold + abs(threshold)
    highest, score = float(anomaly_map.max()), min(score, high)
    if score > 0 and highest > 0:
        return highest / score * low, highest / score * high
    shift = highest - score if math.isfinite(highest - score) else 0.0
    return low + shift, high + shift


def save_heatmap(
    path: Path, image: np.ndarray, anomaly_map: np.ndarray, vmin: float, vmax: float, caption: str
) -> Path:
    """Writes the `overlay` of one image as PNG, pixel for pixel, and a caption in a strip below it.

    Args:
        path: File to write; missing folders are created.
        image: uint8 [H, W, 3].
        anomaly_map: Anomaly scores [H, W].
        vmin: Score at the lower end of the colour scale.
        vmax: Score at its upper end.
        caption: Short text, set as large as the width of the image allows.
    """
    shown = Image.fromarray(overlay(image, anomaly_map, vmin, vmax))
    size = float(np.clip(shown.width / 16, 9, 24))
    strip = math.ceil(1.4 * size)
    room = (shown.width - 2) / ImageFont.load_default(size).getlength(caption)
    font = ImageFont.load_default(max(size * min(room, 1), 1))
    picture = Image.new("RGB", (shown.width, shown.height + strip), "white")
    picture.paste(shown)
    ImageDraw.Draw(picture).text((shown.width / 2, shown.height + strip / 2), caption, "black", font, "mm")
    with atomic(path) as partial:
        # Level 4 of zlib makes files 1 % larger than the default level, in less than half the time.
        picture.save(partial, format="png", compress_level=4)
    return path
