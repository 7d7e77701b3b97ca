"""The library's own backbone on real surfaces: at least half of the way from random to ImageNet weights."""

import os
import statistics
from pathlib import Path

import pytest

from lit_fedad.core.config import compose
from lit_fedad.experiment.train import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_data,
    pytest.mark.skipif("LIT_FEDAD_DATA" not in os.environ, reason="LIT_FEDAD_DATA names no folder of data"),
    pytest.mark.filterwarnings("ignore:.*RANDOM weights"),
]

PRODUCTS = ("mvtec/bottle", "other_ad/magnetic_tile")
IMAGENET = "weights/resnet18_imagenet1k_v1_bnfolded_stem_to_layer3.pth"


@pytest.mark.nightly
@pytest.mark.long
def test_own_weights_close_half_of_the_gap(tmp_path):
    data = Path(os.environ["LIT_FEDAD_DATA"])
    backbones = {
        "random": ["backbone=resnet18", "backbone.weights=random"],
        "own": ["backbone=own"],
        "imagenet": ["backbone=resnet18", f"backbone.weights={data.parent / IMAGENET}"],
    }

    def detect(name: str, product: str) -> tuple[float, float]:
        folder = tmp_path / f"{name}-{Path(product).name}"
        overrides = [
            "method=nearest_neighbour",
            "task.standardise=false",
            "data=mvtec_mixture",
            f"data.root={data}",
        ]
        overrides += [f"data.products=[{product}]", "data.train_per_product=40", "data.test_per_product=40"]
        overrides += [
            "tracking=off",
            "evaluation.pictures=0",
            "evaluation.alone=false",
            "calibration.share=0",
            f"cache.folder={tmp_path / 'cache'}",
            f"out={folder}",
        ]
        last = train(compose([*overrides, *backbones[name]]), quiet=True)["last"]
        return last["i_auroc"]["mean"], last["p_auroc"]["mean"]

    found = {name: [detect(name, product) for product in PRODUCTS] for name in backbones}
    for metric in (0, 1):
        low, own, high = (statistics.mean(values[metric] for values in found[name]) for name in backbones)
        assert own > low + 0.5 * (high - low), (found, metric)
