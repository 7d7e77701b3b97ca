"""Texture-AD: fifteen cloths, fourteen semiconductor wafers and ten metal plates, in numbered folders.

Source: Lei et al., "Texture-AD: An Anomaly Detection Dataset and Benchmark for Real Algorithm Development",
arXiv:2409.06367.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lit_fedad.data.mvtec import mvtec_mixture
from lit_fedad.data.products import choose_products
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.errors import UserError


def texture_ad(
    root: str | Path,
    material: Literal["wafer", "cloth", "metal"] = "wafer",
    products: Sequence[str | int] | None = None,
    name: str | None = None,
    train_per_product: int | None = None,
    test_per_product: int | None = None,
    seed: int = 0,
) -> ImageSet:
    """Reads one material of Texture-AD.

    Its products are ``<number>/train/good``, ``<number>/test/{good,0}`` and ``<number>/ground_truth/0``, where a mask
    is called like its image. They lie in ``root``, or below it in ``<material>_mvtec_format``, ``<Material>`` or both.
    This layout is taken from public code that reads the set; the publisher's page describes none.

    Args:
        root: The folder described above.
        material: What is read.
        products: Numbers such as 3; None takes all. A product is called ``<material>_<number>``.
        name: Name of the image set; by default the material.
        train_per_product: As in `subset`.
        test_per_product: As in `subset`.
        seed: As in `subset`.

    Returns:
        The image set, by number.

    Raises:
        UserError: The layout is another one, or as `mvtec_mixture`.
    """
    root = Path(root).expanduser()
    folder, numbers = _products(root, material)
    images = mvtec_mixture(
        folder,
        choose_products(products, numbers, folder),
        name or material,
        train_per_product,
        test_per_product,
        seed,
    )

    def named(samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        # A bare number would meet the numbers of the other materials in a mixture.
        return tuple(
            dataclasses.replace(sample, category=f"{material}_{sample.category}") for sample in samples
        )

    return ImageSet(images.name, named(images.train), named(images.test))


def _products(root: Path, material: str) -> tuple[Path, list[str]]:
    """The folder of a material, and the numbers in it."""
    formatted, titled = root / f"{material}_mvtec_format", root / material.title()
    for folder in (root, formatted, titled, titled / formatted.name):
        numbers = [path.parents[1].name for path in folder.glob("*/train/good")]
        if numbers and all(number.isdecimal() for number in numbers):
            return folder, sorted(numbers, key=int)
    raise UserError(
        f"{root}: no numbered folder with train/good inside, neither here nor in {formatted.name} or {titled.name};"
        " give the folder of Texture-AD, or use data=mvtec_mixture for another layout"
    )
