"""Measures backbones by training-free nearest neighbours, on single product types.

    python scripts/measure_backbone.py root=DATA imagenet=FILE [own=FILE] [out=DIR] [seeds=0,1,2]

Every figure is an ordinary run of ``method=nearest_neighbour`` in ``out``; complete runs are not made again. Prints
the mean image (and pixel) AUROC over data seeds.
"""

import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from _script import script

from lit_fedad.core.config import compose
from lit_fedad.core.options import bind
from lit_fedad.experiment.train import train

PRODUCTS = (
    "mvtec/bottle",
    "mvtec/screw",
    "other_ad/magnetic_tile",
    "medical/brain_mri",
    "medical/chest_xray",
)
SURFACES = PRODUCTS[:3]  # those with masks
COMMON = (
    "method=nearest_neighbour", "task.standardise=false", "data=mvtec_mixture",
    "data.train_per_product=60", "data.test_per_product=60", "evaluation.pictures=0", "tracking=off",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of this script.

    Attributes:
        root: Folder of the data.
        imagenet: File of ResNet-18's weights.
        own: Weights of the library's own architecture; by default those that come with it.
        out: Folder of the runs.
        seeds: Data seeds.
    """

    root: str
    imagenet: str
    own: str = "own"
    out: str = "outputs/backbones"
    seeds: tuple[int, ...] = (0, 1, 2)


def measure(options: Options) -> list[dict[str, str]]:
    """Makes the runs that are missing, and computes their means.

    Args:
        options: What is measured, and where the runs lie.

    Returns:
        A row of the table for each backbone.

    Raises:
        UserError: As a run does.
    """
    backbones = {
        "random": ["backbone=resnet18", "backbone.weights=random"],
        "own": ["backbone=own", f"backbone.weights={options.own}"],
        "ImageNet": ["backbone=resnet18", f"backbone.weights={options.imagenet}"],
    }
    found: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
    for (name, choice), product, seed in itertools.product(backbones.items(), PRODUCTS, options.seeds):
        folder = Path(options.out) / f"{name}-{Path(product).name}-s{seed}"
        config = compose(
            [*COMMON, *choice, f"data.root={options.root}", f"data.products=[{product}]", f"data.seed={seed}",
             f"seed={seed}", f"backbone.seed={seed}", f"out={folder}"]
        )  # fmt: skip
        last = train(config, quiet=True)["last"]
        pixels = last["p_auroc"]["mean"] if product in SURFACES else None
        found.setdefault((name, product), []).append((last["i_auroc"]["mean"], pixels))
    rows = []
    for name in backbones:
        image = {p: statistics.mean(i for i, _ in found[name, p]) for p in PRODUCTS}
        pixel = {p: statistics.mean(x for _, x in found[name, p] if x is not None) for p in SURFACES}
        row = {"backbone": name}
        row |= {
            Path(p).name: f"{image[p]:.3f}" + (f" / {pixel[p]:.3f}" if p in pixel else "") for p in PRODUCTS
        }
        row["image, surfaces"] = f"{statistics.mean(image[p] for p in SURFACES):.3f}"
        row["pixel, surfaces"] = f"{statistics.mean(pixel.values()):.3f}"
        row["image, all"] = f"{statistics.mean(image.values()):.3f}"
        rows.append(row)
    return rows


if __name__ == "__main__":
    with script() as screen:
        screen.table(bind(measure, sys.argv[1:], "measure_backbone")())
