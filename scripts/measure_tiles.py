"""Measures what tiles find in large images that are mosaics of small photographs, one of which may have a defect.

    python scripts/measure_tiles.py root=PRODUCT weights=FILE [out=DIR] [defects=blowhole,break] [images=8]

``PRODUCT`` is a product folder in MVTec layout with masks, ``FILE`` the weights of ResNet-18. Strips of 1,200 x 400
pixels and squares of 2,048 are put together, in whose test images one photograph has a defect of 14 to 26 pixels. Each
form is scored as a whole at 256 pixels and in tiles of 256, by ordinary runs of ``method=federated_subspace``.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from lit_fedad.config import compose
from lit_fedad.errors import UserError
from lit_fedad.experiment.train import train
from lit_fedad.options import read
from lit_fedad.report.console import Display, plain_warnings

FORMS = {"strip": (400, 1200), "square": (2048, 2048)}  # height, width
DEFECT = (14, 26)  # pixels of the longer side of a defect
RIM = 16  # pixels between the photograph with the defect and the edge of its mosaic


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        root: Product folder of the photographs.
        weights: File of ResNet-18's weights.
        out: Folder of mosaics and runs.
        defects: Kinds of defects to take.
        images: Training images, normal test images and anomalous test images of a form, each.
        seed: Seed of the mosaics and of the runs.
    """

    root: str
    weights: str
    out: str = "outputs/tiles"
    defects: tuple[str, ...] = ("blowhole", "break")
    images: int = 8
    seed: int = 0


def small_defects(root: Path, kinds: tuple[str, ...]) -> list[tuple[Path, Path]]:
    """Lists images and masks of defects of the wanted size."""
    found = []
    for mask in sorted(path for kind in kinds for path in (root / "ground_truth" / kind).iterdir()):
        marked = np.nonzero(np.asarray(Image.open(mask).convert("L")))
        sides = [np.ptp(places) + 1 for places in marked if len(places)]
        (image,) = (root / "test" / mask.parent.name).glob(f"{mask.stem.removesuffix('_mask')}.*")
        if sides and DEFECT[0] <= max(sides) <= DEFECT[1]:
            found.append((image, mask))
    return found


def mosaic(
    photographs: list[Path], shape: tuple[int, int], draw: np.random.Generator, odd: tuple[Path, Path] | None
) -> tuple[Image.Image, Image.Image]:
    """Puts photographs together in random order, and one with a defect among them; returns image and mask."""
    side = Image.open(photographs[0]).height
    rows, columns = (-(-pixels // side) + 1 for pixels in shape)
    left, top = (int(draw.integers(0, side)) for _ in range(2))
    whole, mask = (Image.new("L", (columns * side, rows * side)) for _ in range(2))
    chosen = draw.choice(len(photographs), rows * columns)
    for cell, number in enumerate(chosen):
        whole.paste(
            Image.open(photographs[number]).convert("L"), (cell % columns * side, cell // columns * side)
        )
    if odd is not None:
        inner = [
            (x * side, y * side)
            for y in range(rows)
            for x in range(columns)
            if left + RIM <= x * side <= left + shape[1] - side - RIM
            and top + RIM <= y * side <= top + shape[0] - side - RIM
        ]
        if not inner:  # a strip is hardly higher than a photograph: its row is put inside
            top, inner = side - (shape[0] - side) // 2, [(side * (columns // 2), side)]
        place = inner[int(draw.integers(len(inner)))]
        whole.paste(Image.open(odd[0]).convert("L"), place)
        mask.paste(Image.open(odd[1]).convert("L").point(lambda value: 255 * (value > 0)), place)
    box = (left, top, left + shape[1], top + shape[0])
    return whole.crop(box), mask.crop(box)


def draw_set(options: Options, form: str, folder: Path) -> None:
    """Writes the mosaics of one form in MVTec layout, unless they are there."""
    if folder.exists():
        return
    root, draw = Path(options.root), np.random.default_rng(options.seed)
    odd = small_defects(root, options.defects)
    normal = {part: sorted((root / part / "good").iterdir()) for part in ("train", "test")}
    picked = [odd[number] for number in draw.choice(len(odd), options.images, replace=False)]
    parts = [("train", "good", None)] * options.images + [("test", "good", None)] * options.images
    for number, (part, kind, defect) in enumerate([*parts, *(("test", "small", pair) for pair in picked)]):
        image, mask = mosaic(normal[part], FORMS[form], draw, defect)
        path = folder / part / kind / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        if defect is not None:
            path = folder / "ground_truth" / kind / f"{number:03}_mask.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            mask.save(path)


def measure(options: Options) -> list[dict[str, str]]:
    """Makes mosaics and runs, and returns a row of the table for each run.

    Args:
        options: What is measured, and where mosaics and runs lie.

    Raises:
        UserError: As a run does.
    """
    rows = []
    for form, (height, width) in FORMS.items():
        out = Path(options.out)
        draw_set(options, form, out / "data" / form)
        geometries = {
            "whole": ["image.size=256"],
            "tiles": [f"image.size=[{height},{width}]", "image.tile=256"],
        }
        for name, geometry in geometries.items():
            began = time.monotonic()
            result = train(
                compose(
                    ["method=federated_subspace", "data=mvtec_mixture", f"data.root={out / 'data'}", "grid=32",
                     f"data.products=[{form}]", "backbone=resnet18", f"backbone.weights={options.weights}",
                     "partition=iid", "partition.clients=2", "batch_size=2", "evaluation.batch_size=2",
                     "tracking=off", f"seed={options.seed}", f"out={out / f'{form}-{name}'}", *geometry]
                ),
                quiet=True,
            )  # fmt: skip
            last = result["last"]
            figures = {key: f"{last[key]['mean']:.3f}" for key in ("i_auroc", "p_auroc", "pro", "p_ap")}
            peak = f"{result['peak_rss_bytes'] / 2**30:.1f} GB"
            seconds = f"{time.monotonic() - began:.0f}"
            rows.append({"image": form, "seen as": name, **figures, "seconds": seconds, "memory": peak})
    return rows


if __name__ == "__main__":
    screen = Display()
    with plain_warnings(screen):
        try:
            chosen, _ = read(Options, sys.argv[1:], "measure_tiles", overrides=False)
            screen.table(measure(chosen))
        except UserError as error:
            screen.error(str(error))
            sys.exit(2)
