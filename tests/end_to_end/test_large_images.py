"""Small defects in large and oblong images: found tile by tile, missed in the whole image scaled down."""

import csv
import json

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.config import compose
from lit_fedad.core.identity import identity
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.export import export
from lit_fedad.deployment.predict import predict
from lit_fedad.experiment.train import train
from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.large_images import TiledPyramid
from lit_fedad.tasks.subspace import Subspace

COMMON = (
    "method=federated_subspace", "debug=seconds", "backbone=own", "backbone.weights=own", "tracking=off", "rounds=0",
    "data=mvtec_mixture", "data.products=[cloth]", "data.train_per_product=null", "data.test_per_product=null",
    "batch_size=2", "evaluation.batch_size=2", "evaluation.pictures=0", "task.sigma=2",
)  # fmt: skip


def cloth(shape, side, seed, odd):
    """Stripes of 6 pixels in noise, which run the other way in a square of so many pixels; image and mask, uint8."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[: shape[0], : shape[1]] + draw.integers(0, 6, (2, 1, 1))
    values = 128 + 60 * np.sin(2 * np.pi * y / 6)
    mask = np.zeros(shape, np.uint8)
    if odd:
        top, left = (int(draw.integers(2 * side, length - 3 * side)) for length in shape)
        place = slice(top, top + side), slice(left, left + side)
        values[place] = 128 + 60 * np.sin(2 * np.pi * x[place] / 6)
        mask[place] = 255
    return (values + draw.normal(0, 8, shape)).clip(0, 255).astype(np.uint8), mask


def draw_cloths(root, shape, side):
    """Writes 4 training images, 4 normal and 4 anomalous test images in MVTec layout."""
    parts = [("train/good", 4), ("test/good", 4), ("test/weave", 4)]
    names = [(part, number) for part, count in parts for number in range(count)]
    for seed, (part, number) in enumerate(names):
        image, mask = cloth(shape, side, seed, part == "test/weave")
        files = {f"cloth/{part}/{number}.png": image}
        if part == "test/weave":
            files[f"cloth/ground_truth/weave/{number}_mask.png"] = mask
        for name, pixels in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(root / name)
    return root


def scored(home, root, *overrides):
    """The last metrics of a run, by mean over its clients."""
    config = compose([*COMMON, f"data.root={root}", f"out={home}", f"cache.folder={root}", *overrides])
    return {key: value["mean"] for key, value in train(config, quiet=True)["last"].items() if key != "round"}


@pytest.mark.slow
def test_a_small_defect_is_found_by_tiles_and_missed_without(tmp_path):
    root = draw_cloths(tmp_path / "data", (128, 384), side=10)
    tiles = scored(tmp_path / "tiles", root, "image.size=[128,384]", "image.tile=64", "grid=8")
    whole = scored(tmp_path / "whole", root, "image.size=48", "grid=6")
    assert tiles["i_auroc"] == 1
    assert tiles["p_auroc"] > 0.99
    assert tiles["pro"] > 0.9
    assert whole["p_auroc"] < 0.9
    assert whole["p_ap"] < 0.1 * tiles["p_ap"]


# Of the larger there are more tiles than are seen at once.
@pytest.mark.parametrize("shape", [(96, 288), pytest.param((512, 512), marks=pytest.mark.slow)])
def test_maps_do_not_depend_on_the_batch_of_tiles(shape):
    pixels = torch.from_numpy(cloth(shape, 10, 0, True)[0]).float().div(255).sub(0.5).expand(1, 3, -1, -1)
    backbone = create_backbone("resnet10t", weights="own")
    task = Subspace(backbone, grid=8, image_size=shape, tile=64)
    rows = torch.nn.functional.normalize(torch.randn(task.num_features, 20), dim=0)
    task.load_subspace(torch.zeros(1, task.num_features), rows[None])
    predictions = []
    for at_once in (1, 7, 64):
        task.backbone = TiledPyramid(backbone, shape, 64)
        task.backbone.at_once = at_once
        with torch.inference_mode():
            predictions.append(task.predict_step({"image": pixels}))
    first = predictions[0]
    assert first.anomaly_map.shape == (1, *shape)
    for other in predictions[1:]:
        torch.testing.assert_close(other.anomaly_map, first.anomaly_map, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.image_score, first.image_score, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def strip_run(tmp_path_factory):
    """Folder of a complete run on strips of 64 x 96 pixels, seen as tiles of 32; its images lie in ``data``."""
    home = tmp_path_factory.mktemp("strip")
    root = draw_cloths(home / "data", (64, 96), 8)
    scored(home / "run", root, "image.size=[64,96]", "image.tile=32")
    return home / "run"


def test_predict_scores_tiles_and_draws_heatmaps_of_the_images_shape(strip_run, tmp_path):
    images = strip_run.parent / "data" / "cloth" / "test"
    scores = predict(str(strip_run), str(images), out=str(tmp_path))
    with scores.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    for row in rows:
        width, height = Image.open(tmp_path / row["heatmap"]).size
        assert (width, height > 64) == (96, True)  # the caption is below


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pt2", pytest.param("onnx", marks=pytest.mark.nightly)])
def test_the_exported_graph_cuts_the_tiles_itself(strip_run, tmp_path, kind):
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    images = strip_run.parent / "data" / "cloth" / "test"
    # Compares the file with the live detector, and refuses differences.
    export(str(strip_run), format=(kind,), images=str(images), out=str(tmp_path))
    assert json.loads((tmp_path / "preprocessing.json").read_text())["size"] == [64, 96]
    card = (tmp_path / "model_card.md").read_text()
    assert "[B, 3, 64, 96]" in card
    assert "cutting images into overlapping tiles of 32 pixels too" in card
    if kind == "pt2":
        names = {}
        photograph = images / "weave" / "0.png"
        block = card.split("```python\n")[1].split("```")[0]
        exec(block.replace('"preprocessing.json"', repr(str(tmp_path / "preprocessing.json"))).replace(
            '"image.png"', repr(str(photograph))), names)  # fmt: skip
        expected = ImageTransform([64, 96], mean=(0,), std=(1,)).image(photograph)[None]
        assert np.allclose(names["pixels"], expected.numpy(), atol=1e-6)
        outputs = torch.export.load(tmp_path / "detector.pt2").module()(expected)
        assert outputs["anomaly_map"].shape == (1, 64, 96)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["image.overlap=8"], "image.overlap=8 belongs to image.tile"),
        (["image.tile=64"], "image.tile=64 is larger than the image, 32 x 32"),
        (["image.size=64", "image.tile=32", "image.overlap=32"], "image.overlap=32 must be smaller"),
        (["image.size=64", "image.tile=40"], "image.tile=40: .* give 32 or 48"),
        (["method=fedavg", "task=autoencoder", "image.tile=32"], "image.tile=32: task Autoencoder"),
        (["method=fedavg", "task=autoencoder", "image.size=[32,64]"], "Autoencoder learns from pixels"),
        (["image.size=2048", "image.tile=32", "grid=32"], "would have 2048 x 2048 patches"),
    ],
)
def test_tiles_that_make_no_sense_end_in_one_line(strip_run, tmp_path, overrides, message):
    method = [o for o in overrides if o.startswith("method=")]
    kept = [o for o in COMMON if not method or o.partition("=")[0] not in ("method", "rounds", "task.sigma")]
    root = strip_run.parent / "data"
    with refusal(message):
        train(compose([*kept, f"data.root={root}", f"out={tmp_path / 'run'}", *overrides]), quiet=True)


def test_without_tiles_a_run_is_the_run_it_was():
    config = compose(["debug=seconds"])
    before = {**config, "image": {k: v for k, v in config["image"].items() if k not in ("tile", "overlap")}}
    assert identity(config) == identity(before)
    assert identity(config) != identity(compose(["debug=seconds", "image.tile=32"]))
