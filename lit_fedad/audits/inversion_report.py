"""Compares reconstructions with a client's private images, and draws them side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure
from torch import Tensor

from lit_fedad.privacy.inversion import Matches, closest
from lit_fedad.report.inversion_sheet import Shown, inversion_sheet


class Judged(NamedTuple):
    """Reconstructions and the private images that they come nearest to.

    Attributes:
        images: Reconstructions in [0, 1] [n, ch, H, W].
        matches: The nearest private image of each.
    """

    images: Tensor
    matches: Matches

    def best(self, shown: int) -> list[int]:
        """Lists the reconstructions of highest PSNR, the best first."""
        return self.matches.psnr.argsort(descending=True)[:shown].tolist()

    def summary(self, mean: Tensor) -> dict[str, float]:
        """Computes means over the reconstructions, the best values, and how near they are to the mean image.

        Args:
            mean: The mean of the private images [1, ch, H, W].

        Returns:
            PSNR in dB, and SSIM.
        """
        return {
            "psnr": float(self.matches.psnr.mean()),
            "ssim": float(self.matches.ssim.mean()),
            "best_psnr": float(self.matches.psnr.max()),
            "best_ssim": float(self.matches.ssim.max()),
            "psnr_to_mean_image": float(closest(self.images, mean).psnr.mean()),
        }


def judge(images: Tensor, private: Tensor) -> Judged:
    """Compares reconstructions with all private images.

    Args:
        images: Reconstructions in [0, 1] [n, ch, H, W].
        private: The client's images in [0, 1] [m, ch, H, W].
    """
    return Judged(images, closest(images, private))


def cells(summary: Mapping[str, float]) -> dict[str, str]:
    """Writes a summary as a line of a table, with units."""
    units = {"psnr": "{:.2f} dB", "ssim": "{:.3f}"}
    return {
        name.replace("_", " ").replace("psnr", "PSNR").replace("ssim", "SSIM"): (
            units["ssim" if "ssim" in name else "psnr"].format(value)
        )
        for name, value in summary.items()
    }


def draw_inversion(
    own: Judged, control: Judged, private: Tensor, shown: int, names: Sequence[str], title: str
) -> Figure:
    """Draws the best reconstructions, the private images they are nearest to, and the best of the control.

    Args:
        own: Reconstructions from the attacked client.
        control: Reconstructions from the other client.
        private: The attacked client's images in [0, 1] [m, ch, H, W].
        shown: Number of rows; fewer if there are fewer reconstructions.
        names: Of the attacked client and of the control.
        title: Heading of the figure.
    """
    rows = []
    for best, other in zip(own.best(shown), control.best(shown), strict=False):
        index = int(own.matches.nearest[best])
        rows.append(
            [
                _panel(own.images[best], _quality(own, best)),
                _panel(private[index], f"image {index} of {names[0]}"),
                _panel(control.images[other], _quality(control, other)),
            ]
        )
    return inversion_sheet(rows, ["reconstruction", "closest private image", names[1]], title)


def _quality(judged: Judged, index: int) -> str:
    return f"{judged.matches.psnr[index]:.1f} dB, SSIM {judged.matches.ssim[index]:.2f}"


def _panel(image: Tensor, caption: str) -> Shown:
    pixels = image.cpu().permute(1, 2, 0).numpy()
    return Shown(pixels[..., 0] if pixels.shape[2] == 1 else pixels, caption)
