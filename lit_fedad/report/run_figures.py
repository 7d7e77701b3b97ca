"""Figures over several runs, and pictures in the formats that a page embeds."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import check_stored
from lit_fedad.report.style import LEGEND, blank_figure, labelled_axes, line_style, lines_of, wrapped

_LOG_RATIO = 20  # of the largest to the smallest x, from which on its axis is logarithmic
_SHORT_NAME = 30  # letters: of names up to this length two stand side by side in a legend
_SHEET_WIDTH = 1000  # pixels
_QUALITY = 82

Curve = Sequence[tuple[float, float]]


def lines_figure(groups: Mapping[str, Sequence[Curve]], xlabel: str, ylabel: str, whole: bool) -> Figure:
    """Draws curves of several runs in one chart; runs of a group look alike.

    Args:
        groups: Points (x, y) of each run, by the group's name in the legend.
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
        whole: Whether x is a whole number. Otherwise its axis becomes logarithmic if the largest x is at least 20
            times the smallest above 0, and points with x <= 0 are left out.
    """
    curves = [curve for group in groups.values() for curve in group]
    positive = [x for curve in curves for x, _ in curve if x > 0]
    logarithmic = not whole and bool(positive) and max(positive) >= _LOG_RATIO * min(positive)
    columns = 2 if max(map(len, groups)) <= _SHORT_NAME else 1
    names = wrapped(groups, 64)
    figure = blank_figure(4.6, 2.5 + 0.14 * math.ceil(sum(map(lines_of, names)) / columns))
    axes = labelled_axes(figure, xlabel, ylabel)
    if whole:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if logarithmic:
        axes.set_xscale("log")
    for index, (label, group) in enumerate(zip(names, groups.values(), strict=True)):
        for number, curve in enumerate(group):
            points = [(x, y) for x, y in curve if x > 0 or not logarithmic]
            style = line_style(index, len(points)) | {"alpha": 0.85}
            axes.plot(*zip(*points, strict=True), label=label if number == 0 else None, **style)
    axes.margins(x=0.04, y=0.08)
    figure.legend(loc="outside lower center", ncols=columns, **LEGEND)
    return figure


def svg(figure: Figure) -> bytes:
    """Renders a figure as SVG, with the same bytes for the same figure."""
    file = io.BytesIO()
    with rc_context({"svg.hashsalt": "lit_fedad"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def stored_picture(path: Path) -> Image.Image:
    """Reads a picture that a run has drawn, in RGB.

    Raises:
        UserError: If the file is no picture any more.
    """
    check_stored(path)
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises many kinds
        raise UserError(
            f"{path}: cannot be read as a picture ({type(error).__name__}); remove it, and it is left out"
        ) from error


def sheet(path: Path) -> bytes:
    """Converts a picture file to WebP of at most 1,000 pixels in width.

    Raises:
        UserError: As `stored_picture`.
    """
    picture = stored_picture(path)
    height = round(picture.height * _SHEET_WIDTH / picture.width)
    if picture.width > _SHEET_WIDTH:
        picture = picture.resize((_SHEET_WIDTH, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=_QUALITY, method=4)
    return file.getvalue()
