"""Small runs on real images with real weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lit_fedad.evaluation import AnomalyEvaluator

ROOT = os.environ.get("LIT_FEDAD_DATA")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_data,
    pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder"),
]
SMALL = ("data.train_per_product=12", "data.test_per_product=12", "rounds=1", "evaluation.pictures=1")


@pytest.fixture
def real(lab, tmp_path):
    """Trains one of the experiments on real images."""
    from lit_fedad.config import compose
    from lit_fedad.experiment import train

    def run(experiment: str, *overrides: str):
        (weights,) = (Path(ROOT).parent / "weights").glob("resnet18*.pth")
        words = (
            f"experiment={experiment}",
            f"data.root={ROOT}",
            f"backbone.weights={weights}",
            "tracking=off",
        )
        places = (f"out={tmp_path / 'run'}", f"cache.folder={lab.shared}", "fabric.accelerator=cpu")
        return train(compose([*words, *places, "partition=iid", "partition.clients=2", *overrides]))

    return run


def test_real_mixture_reaches_sane_values(real):
    result = real("real_mixture", *SMALL)
    assert result["last"]["i_auroc"]["mean"] > 0.6
    assert result["last"]["p_auroc"]["mean"] > 0.6
    assert result["backbone"]["weights"] != "random"


def test_images_without_masks_have_no_pixel_metrics(real):
    result = real("medical", *SMALL)
    for chosen in ("first", "last", "best"):
        for metric in AnomalyEvaluator.metrics:
            defined = metric in ("i_auroc", "aupr")
            assert (result[chosen][metric]["mean"] is not None) is defined
    assert result["last"]["i_auroc"]["mean"] > 0.6


def test_literal_feddymem_collapses_and_says_so(real, capsys):
    result = real(
        "real_mixture", "method=feddymem_literal", "rounds=2", "evaluation.pictures=0", "evaluation.every=2"
    )
    spread = [scalars["memory_spread"] for scalars in result["scalars"]]
    assert spread[-1] < spread[0] / 2
    shown = capsys.readouterr()
    assert "the memory is collapsing" in shown.out + shown.err
