"""Figures of an experiment: data of the clients, curves over rounds; and how they are saved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.files import atomic
from lit_fedad.report.style import (
    COLOURS,
    DARK,
    FONT_SIZE,
    LEGEND,
    as_written,
    blank_figure,
    labelled_axes,
    line_style,
    lines_of,
    wrapped,
)

_HATCHES = ("//////", "......", "xxxxxx")
_MAX_LOOKS = len(COLOURS) * (1 + len(_HATCHES))
_COLUMN, _PAGE = 3.5, 7.16  # widths in inches of one column and of both columns of a paper
_MAX_PIES = 12
_MAX_NAMES = 20
_MAX_PANELS = 5  # of stages in a row
_MAX_NAME = 50  # letters in a line of the narrowest legend
_MAX_COLOURED_LINES = 8


def partition_figure(counts: np.ndarray, products: Sequence[str]) -> Figure:
    """Draws how many images of each product type each client holds (FedDyMem Fig. 5).

    Up to 12 clients are drawn as one pie each, whose area is proportional to the client's share of all images;
    more clients are drawn as stacked bars. More than 28 product types, of which two would look alike, are counted
    instead of named.

    Args:
        counts: Images of each product type on each client [clients, products].
        products: Names of the product types.
    """
    draw = _pies if len(counts) <= _MAX_PIES else _bars
    figure = draw(counts)
    if len(products) <= _MAX_LOOKS:
        _product_legend(figure, products)
    else:
        figure.supxlabel(f"{len(products)} products or classes", fontsize=FONT_SIZE)
    return figure


def stages_figure(counts: Sequence[np.ndarray], products: Sequence[str]) -> Figure:
    """Draws how many images of each class each client receives in each stage (GLDP's [N, S, M] splits).

    Each client is a row and each stage a panel titled "task", five panels side by side, all at one scale; a client with
    fewer stages than others has no bar in the last panels. More than 20 classes are counted instead of named; from the
    29th class on, colours and hatches repeat.

    Args:
        counts: For every client the images of each of its stages and each class [stages, classes].
        products: Names of the classes.
    """
    stages = max(map(len, counts))
    padded = np.stack(
        [np.pad(client_counts, ((0, stages - len(client_counts)), (0, 0))) for client_counts in counts],
        axis=1,
    )
    height = float(np.clip(0.17 * len(counts), 0.7, 6.0))
    rows = math.ceil(stages / _MAX_PANELS)
    figure = blank_figure(float(np.clip(0.6 + 1.35 * stages, _COLUMN, _PAGE)), rows * (height + 0.6))
    named = len(products) <= _MAX_NAMES
    _stage_panels(figure, padded, "images" if named else f"images of {len(products)} classes")
    if named:
        _product_legend(figure, products)
    return figure


def curves_figure(
    history: Mapping[int, Sequence[tuple[int, float]]], ylabel: str, names: ClientNames = NUMBERS
) -> Figure:
    """Draws one curve a client over the rounds, and the mean of several clients in bold.

    Up to 8 clients have a colour, line and marker each; more clients are thin and grey, with a band from the
    lowest to the highest value. Values that are not finite are gaps. The mean of a round is taken over the
    clients that have a finite value in it.
    """
    by_round: dict[int, list[float]] = {}
    for points in history.values():
        for number, value in points:
            if math.isfinite(value):
                by_round.setdefault(number, []).append(value)
    rounds = sorted(by_round)

    figure = blank_figure(_COLUMN, 2.3)
    axes = labelled_axes(figure, "round", ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if len(rounds) == 1:
        axes.set_xlim(rounds[0] - 1, rounds[0] + 1)
    few = len(history) <= _MAX_COLOURED_LINES
    for index, (client, points) in enumerate(sorted(history.items())):
        style = line_style(index, len(rounds)) if few else {"color": "0.5", "linewidth": 0.4, "alpha": 0.5}
        label = as_written(names.title(client)) if few else ("one client" if index == 0 else None)
        axes.plot([number for number, _ in points], [value for _, value in points], label=label, **style)
    if not few:
        lowest, highest = [min(by_round[r]) for r in rounds], [max(by_round[r]) for r in rounds]
        axes.fill_between(
            rounds, lowest, highest, color=COLOURS[4], alpha=0.3, lw=0, label="lowest to highest"
        )
    if len(history) > 1:
        means = [sum(by_round[r]) / len(by_round[r]) for r in rounds]
        marker = "o" if len(rounds) == 1 else None
        (line,) = axes.plot(rounds, means, color=DARK, linewidth=1.8, marker=marker, zorder=3, markersize=4)
        line.set_label("mean over clients")
    if few:
        figure.legend(loc="outside right upper", **LEGEND)
    else:
        figure.legend(loc="outside upper center", ncols=3, **LEGEND)
    return figure


def save_figure(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG atomically, with the same bytes for the same figure."""
    with atomic(path) as partial:
        # `savefig` would draw twice. At the usual level, photographs take thrice as long, for files a sixth smaller.
        FigureCanvasAgg(figure).print_png(
            partial, metadata={"Software": None}, pil_kwargs={"compress_level": 1}
        )
    return path


def _area_style(index: int) -> dict[str, Any]:
    """Returns the look of one product type's area: the plain colours in turn, then pale and hatched ones."""
    turn, colour = divmod(index, len(COLOURS))
    plain = to_rgb(COLOURS[colour])
    if turn == 0:
        return {"facecolor": plain, "edgecolor": "white", "linewidth": 0.5, "hatch": ""}
    pale = tuple(0.35 * channel + 0.65 for channel in plain)
    hatch = _HATCHES[(turn - 1) % len(_HATCHES)]
    return {"facecolor": pale, "edgecolor": plain, "linewidth": 0.5, "hatch": hatch}


def _product_legend(figure: Figure, products: Sequence[str]) -> None:
    """Adds a legend of the product types below a figure, which grows by the legend's height."""
    names = wrapped(products, _MAX_NAME)
    patches = [Patch(label=name, **_area_style(index)) for index, name in enumerate(names)]
    longest = min(max(map(len, products)), _MAX_NAME)
    entry_width = FONT_SIZE * (4.0 + 0.6 * longest)  # points, estimated: box, gaps and name
    columns = int(np.clip(figure.get_figwidth() * 72 / entry_width, 1, len(products)))
    rows = math.ceil(len(products) / columns)
    columns = math.ceil(len(products) / rows)
    # A legend divides its entries among the columns as `array_split` does.
    tallest = max(sum(map(lines_of, column)) for column in np.array_split(names, columns))
    figure.set_figheight(figure.get_figheight() + 0.15 * tallest + 0.1)
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, **LEGEND)


def _pies(counts: np.ndarray) -> Figure:
    """Draws one pie a client in rows of at most six, all at one scale."""
    sizes = counts.sum(axis=1)
    rows = math.ceil(len(counts) / 6)
    columns = math.ceil(len(counts) / rows)
    figure = blank_figure(max(_COLUMN, _PAGE * columns / 6), 1.5 * rows)
    for client, (row, size) in enumerate(zip(counts, sizes, strict=True)):
        axes = figure.add_subplot(rows, columns, client + 1)
        present = np.flatnonzero(row)
        if present.size:
            radius = math.sqrt(size / sizes.max())  # the area, not the radius, tells the share
            wedges, *_ = axes.pie(row[present], radius=radius, startangle=90, counterclock=False)
            for product, wedge in zip(present, wedges, strict=True):
                wedge.set(**_area_style(int(product)))
        axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
        axes.axis("off")
        text = f"client {client}\n{size:,} image{'s' if size != 1 else ''}"
        axes.text(0, -1.12, text, ha="center", va="top", fontsize=FONT_SIZE, linespacing=1.25)
    return figure


def _bars(counts: np.ndarray) -> Figure:
    """Draws one bar a client, product types stacked."""
    figure = blank_figure(_PAGE, 2.3)
    axes = labelled_axes(figure, "client", "images")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=min(len(counts), 30)))
    axes.set_xlim(-0.6, len(counts) - 0.4)
    for owners, starts, lengths, style in _stacks(counts):
        axes.bar(owners, lengths, bottom=starts, width=0.85, **style)
    return figure


def _stage_panels(figure: Figure, counts: np.ndarray, xlabel: str) -> None:
    """Draws one panel a stage with one bar a client, classes stacked [stages, clients, classes]."""
    first: dict[str, Axes] = {}
    columns = min(len(counts), _MAX_PANELS)
    rows = math.ceil(len(counts) / columns)
    for stage, stage_counts in enumerate(counts):
        is_left, is_lowest = stage % columns == 0, stage + columns >= len(counts)
        below, beside = xlabel if is_lowest else "", "client" if is_left else ""
        axes = labelled_axes(figure, below, beside, (rows, columns, stage + 1), **first)
        axes.set_title(f"task {stage + 1}", fontsize=FONT_SIZE + 1)
        axes.grid(visible=False)
        axes.grid(axis="x", color="0.9", linewidth=0.5)
        axes.tick_params(labelleft=is_left)
        first = first or {"sharex": axes, "sharey": axes}
        for owners, starts, lengths, style in _stacks(stage_counts):
            left, right, top, bottom = starts, starts + lengths, owners - 0.425, owners + 0.425
            corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1)
            # One path a class: Agg draws a hatch anew for every path, a minute for 100 clients with 100 classes.
            path = Outline.make_compound_path_from_polys(corners.reshape(-1, 4, 2))
            axes.add_artist(PathPatch(path, **style))
    axes = first["sharex"]
    axes.set_xlim(0, 1.05 * counts.sum(axis=2).max())
    axes.set_ylim(counts.shape[1] - 0.4, -0.6)  # client 0 on top
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=max(2, 12 // columns)))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=22))


def _stacks(counts: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]]:
    """Yields clients, starts, lengths and look of the stacked bars of each product type."""
    starts = counts.cumsum(axis=1) - counts
    for product in range(counts.shape[1]):
        style = _area_style(product)
        if len(counts) > 100:  # bars too thin for edges and hatches
            style = {"facecolor": style["facecolor"], "linewidth": 0}
        owners = np.flatnonzero(counts[:, product])
        yield owners, starts[owners, product], counts[owners, product], style
