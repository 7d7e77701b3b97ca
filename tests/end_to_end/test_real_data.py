"""Small runs on real images with real weights, and with the library's own."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

from lit_fedad.core.config import compose
from lit_fedad.data.partition import Partition
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.experiment.train import train

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

    def run(experiment: str, *overrides: str):
        (weights,) = (Path(ROOT).parent / "weights").glob("resnet18*.pth")
        common = (
            f"experiment={experiment}",
            f"data.root={ROOT}",
            f"backbone.weights={weights}",
            "tracking=off",
        )
        places = (f"out={tmp_path / 'run'}", f"cache.folder={lab.shared}", "fabric.accelerator=cpu")
        return train(compose([*common, *places, "partition=iid", "partition.clients=2", *overrides]))

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
            defined = metric in ("i_auroc", "aupr", "f1_max")
            assert (result[chosen][metric]["mean"] is not None) is defined
    assert result["last"]["i_auroc"]["mean"] > 0.6


@pytest.mark.nightly
def test_literal_feddymem_collapses_and_says_so(real, capsys):
    few = ("data.train_per_product=30", "data.test_per_product=4", "evaluation.pictures=0")
    result = real("real_mixture", "method=feddymem_literal", "rounds=4", "evaluation.every=4", *few)
    spread = [scalars["memory_spread"] for scalars in result["scalars"]]
    assert spread[-1] < spread[0] / 2
    shown = capsys.readouterr()
    assert "the memory is collapsing" in shown.out + shown.err


def _false_alarms(figures, anomalies, number):
    """Return a client's false alarms by its ME and FE, where it finds one of the `number` anomalies."""
    missed, wrong = (figures[f"{rate}_calibrated_{anomalies}"]["per_client"] for rate in ("me", "fe"))
    found = {client: round(number * (1 - rate)) for client, rate in missed.items()}
    return {client: round(n * wrong[client] / (1 - wrong[client])) for client, n in found.items() if n}


@pytest.mark.nightly
@pytest.mark.long
def test_fadngs_on_cifar(tmp_path):
    """A tenth of the paper's images a client: every part of FADngs, against two sets of anomalies."""
    overrides = (
        "method=fadngs",
        "experiment=semantic_cifar10",
        f"data.root={ROOT}/cifar",
        "partition=dominant_small",
    )
    scale = (
        "rounds=2",
        "task.warmup=1",
        "evaluation.every=2",
        "public.count=200",
        "distillation.queue=256",
        "encoder.channels=8",
    )
    few = ("data.normal.test_per_class=50", "data.test_per_set=500", "fabric.accelerator=cpu", "tracking=off")
    result = train(compose([*overrides, *scale, *few, f"out={tmp_path / 'run'}"]))
    partition = Partition.load(tmp_path / "run" / "partition.json")
    kept = [len(own) for own in partition.calibration]
    assert all(18 <= number <= 20 for number in kept)  # a fifth, as evenly over classes as images allow
    assert [sum(row) + n for row, n in zip(result["partition"]["counts"], kept, strict=True)] == [100] * 10
    assert all(row[k] > 60 for k, row in enumerate(result["partition"]["counts"]))  # of 89
    for metric in ("auroc", "auroc_cifar100", "auroc_imagenet", "fe_imagenet"):
        assert 0.2 < result["last"][metric]["mean"] < 0.95
    assert result["last"]["me_calibrated_cifar100"]["mean"] > 0.2
    # One threshold a client, beside the same normal images, judges both sets of 500 anomalies.
    cifar100, imagenet = (
        _false_alarms(result["last"], anomalies, 500) for anomalies in ("cifar100", "imagenet")
    )
    both = cifar100.keys() & imagenet.keys()
    assert both
    assert {client: cifar100[client] for client in both} == {client: imagenet[client] for client in both}
    # What images share with drawn noise is no more than what they share with the densities.
    assert abs(result["privacy"]["noise_raw_corrected"]) < 0.02
    assert {path.name for path in (tmp_path / "run/figures").iterdir()} >= {
        "representations.png",
        "capacities.png",
        "distance_correlation.png",
    }


@pytest.mark.nightly
def test_fedvck_on_medical_images_of_six_kinds(tmp_path):
    """From noise: 25 small grey images a client and round, of which none began as a patient's."""
    overrides = (
        "method=fedvck",
        "data=packed",
        f"data.root={ROOT}/medical",
        "data.train=mednist_32.npz",
        "data.mean=[0.5]",
        "data.std=[0.5]",
        "image.channels=1",
        "data.train_per_class=100",
        "data.test_per_class=50",
        "partition.clients=3",
        "partition.alpha=0.5",
    )
    few = (
        "rounds=3",
        "encoder.channels=16",
        "method.client.condensation.steps=40",
        "method.client.condensation.batch=32",
        "method.client.condensation.learning_rate=5",
        "method.server.training.epochs=40",
        "method.server.training.learning_rate=0.01",
        "method.server.training.batch_size=64",
    )
    circumstances = (
        "evaluation.pictures=0",
        "fabric.accelerator=cpu",
        "tracking=off",
        f"out={tmp_path / 'run'}",
    )
    result = train(compose([*overrides, *few, *circumstances]), quiet=True)
    assert result["last"]["accuracy"]["pooled"] > 0.45  # chance: 0.17
    assert result["last"]["accuracy"]["pooled"] > result["first"]["accuracy"]["pooled"] - 0.1
    assert [scalars["images"] for scalars in result["scalars"]] == [result["scalars"][0]["images"]] * 3


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_own_weights_close_half_of_the_gap_from_random_to_imagenets(tmp_path):
    imagenet = Path(ROOT).parent / "weights/resnet18_imagenet1k_v1_bnfolded_stem_to_layer3.pth"
    backbones = {
        "random": ["backbone=resnet18", "backbone.weights=random"],
        "own": ["backbone=own"],
        "imagenet": ["backbone=resnet18", f"backbone.weights={imagenet}"],
    }
    common = (
        "method=nearest_neighbour", "task.standardise=false", "data=mvtec_mixture", f"data.root={ROOT}",
        "data.train_per_product=40", "data.test_per_product=40", "tracking=off", "evaluation.pictures=0",
        "evaluation.alone=false", "calibration.share=0", f"cache.folder={tmp_path / 'cache'}",
    )  # fmt: skip

    def detect(name: str, product: str) -> tuple[float, float]:
        own = [f"data.products=[{product}]", f"out={tmp_path / name / Path(product).name}"]
        last = train(compose([*common, *own, *backbones[name]]), quiet=True)["last"]
        return last["i_auroc"]["mean"], last["p_auroc"]["mean"]

    products = ("mvtec/bottle", "other_ad/magnetic_tile")
    found = {name: [detect(name, product) for product in products] for name in backbones}
    for metric in (0, 1):
        low, own, high = (statistics.mean(values[metric] for values in found[name]) for name in backbones)
        assert own > low + 0.5 * (high - low), (found, metric)
