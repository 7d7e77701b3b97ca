"""Classification of grey images, and clients that hold no image at all."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from lit_fedad.data.partition import Partition
from lit_fedad.deployment.predict import evaluate, predict

SMALL = ("task=classifier_convnet", "encoder.channels=8", "image.resize=null", "batch_size=32")
MOTIFS = (
    *("data=motif_classes", "image.size=32", "data.train_per_class=12", "data.test_per_class=4"),
    *("~data.train_per_product", "~data.test_per_product"),
)


@pytest.fixture
def skewed(lab):
    # Seed 0 leaves client 7 without images.
    overrides = ("partition=label_skew", "partition.clients=10", "partition.min_size=0")
    return lab.finished("method=fedavg", *SMALL, *MOTIFS, *overrides)


@pytest.mark.slow
def test_a_client_without_images_takes_no_part(skewed):
    out, result = skewed
    sizes = result["partition"]["sizes"]
    holders = {str(client) for client, size in enumerate(sizes) if size}
    assert 0 in sizes
    assert sum(sizes) == 120
    assert result["last"]["accuracy"]["per_client"].keys() == holders
    assert json.loads((out / "result.json").read_text())["partition"]["sizes"] == sizes
    assert Partition.load(out / "partition.json").sizes == tuple(sizes)


@pytest.mark.slow
def test_its_partition_is_played_again_by_another_method(lab, skewed, tmp_path):
    out, first = skewed
    overrides = ("partition=file", "partition.clients=10", f"partition.path={out / 'partition.json'}")
    result = lab.train(tmp_path / "run", "method=scaffold", *SMALL, *MOTIFS, *overrides)
    assert result["partition"]["counts"] == first["partition"]["counts"]
    assert evaluate(str(tmp_path / "run"))["accuracy"]["mean"] == result["last"]["accuracy"]["mean"]


def test_grey_images_train_and_predict(lab, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for part, each in (("train", 20), ("test", 5)):
        labels = np.repeat([0, 1], each)
        noise = rng.integers(0, 60, (2 * each, 28, 28))
        arrays[f"{part}_images"] = (noise + 150 * labels[:, None, None]).astype(np.uint8)
        arrays[f"{part}_labels"] = labels[:, None]
    np.savez(tmp_path / "pneumoniamnist.npz", **arrays)
    overrides = ("data=pneumoniamnist", f"data.root={tmp_path}", "image.size=28", "partition=iid")
    gone = ("~data.train_per_product", "~data.test_per_product", "partition.clients=2", "rounds=3")
    result = lab.train(tmp_path / "run", "method=fedavg", *SMALL, *overrides, *gone, "task.learning_rate=0.1")
    assert result["partition"]["products"] == ["normal", "pneumonia"]
    assert result["last"]["accuracy"]["mean"] == 1
    for label, grey in enumerate((30, 180)):
        Image.fromarray(np.full((28, 28), grey, np.uint8)).save(tmp_path / f"{label}.png")
    scores = predict(str(tmp_path / "run"), str(tmp_path), out=str(tmp_path / "scores"))
    rows = list(csv.DictReader(scores.open()))
    assert [row["class"] for row in rows[:2]] == ["normal", "pneumonia"]
