"""Every task and every way of predicting, written as ONNX and for torch, and tracked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.small_tasks import MOTIFS, SEMANTIC, STREAM
from PIL import Image

from lit_fedad.deployment.export import TOLERANCE, export
from lit_fedad.deployment.formats import FORMATS

load_onnx = pytest.importorskip("onnx").load
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*RANDOM weights")]

EPOCHS = ("method.client.base_epochs=1", "method.client.head_epochs=2")
RUNS = {
    # With more slots than patches many are equal: rounding would choose whose radius counts.
    "feddymem": ("method=feddymem", "task.slots=6"),
    "federated_bank": ("method=federated_bank",),
    "dbe": ("method=dbe",),
    "autoencoder": (
        "method=fedavg", "task=autoencoder", "encoder=resnet18", "encoder.channels=8", "task.decoder.channels=8",
        "cache.enabled=false",
    ),
    "padim": ("method=federated_padim", "task.channels=5"),
    "efficient_ad": ("method=fedavg", "task=efficient_ad", "task.width=8", "task.latent=4"),
    "anomaly_dino": (
        "method=federated_bank", "task=anomaly_dino", "backbone.name=vit_tiny_patch16_224", "backbone.layers=[1]"
    ),
    "dinomaly": (
        "method=fedavg", "task=dinomaly", "backbone.name=vit_tiny_patch16_224", "backbone.layers=[0,1]"
    ),
    "reverse_distillation": ("method=fedavg", "task=reverse_distillation", "task.blocks=1", "image.size=64"),
    "contrastive": ("method=fadngs", *SEMANTIC, "encoder=lenet"),
    "gldp": ("method=gldp", *STREAM, "encoder=lenet", *EPOCHS),  # two classifiers
    "frozen": ("method=gldp", *MOTIFS, *EPOCHS),
}  # fmt: skip


# Each has a graph in common with another: a shared reduction, a transformer, a decoder, a classifier.
AT_NIGHT = {"dbe", "anomaly_dino", "autoencoder", "reverse_distillation", "frozen"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in AT_NIGHT)) for name in RUNS]
)
def test_files_compute_what_the_client_does(lab, name, tmp_path):
    """`export` refuses files that do not; here its own measure is not trusted."""
    run, _ = lab.finished(*RUNS[name])
    export(str(run), client=0, out=str(tmp_path))
    program = torch.export.load(tmp_path / "detector.pt2")
    onnx, pt2 = FORMATS["onnx"].load(tmp_path / "detector.onnx"), torch.no_grad()(program.module())
    side = json.loads((tmp_path / "preprocessing.json").read_text())["size"]
    pixels = torch.rand(6, 3, side, side, generator=torch.Generator().manual_seed(0))
    for size in (1, 6):
        one, other = onnx(pixels[:size]), pt2(pixels[:size])
        assert list(one) == list(other)
        for output, values in other.items():
            assert one[output].shape == values.shape
            assert len(values) == size
            if values.is_floating_point():
                torch.testing.assert_close(
                    one[output], values, rtol=1e-4, atol=1e-4 * float(values.abs().max())
                )
    # A loop over patches would be slow, and OpenVINO cannot read most loops.
    operations = {node.op_type for node in load_onnx(tmp_path / "detector.onnx").graph.node}
    assert not operations & {"If", "Loop", "Scan"}
    # Of a second model there is only what it has in common with the first.
    assert not [key for key in program.state_dict if key.startswith("client.personal.head")]
    assert "detector.onnx" in (tmp_path / "model_card.md").read_text()


class Sorts(torch.nn.Module):
    """A detector of somebody's own, which sorts."""

    def forward(self, pixels):
        return {"image_score": pixels.flatten(1).sort(dim=1, stable=True).values[:, -2]}


def test_an_operation_that_onnx_lacks_is_replaced(tmp_path):
    shapes = {"pixels": {0: torch.export.Dim("batch")}}
    program = torch.export.export(Sorts(), (torch.zeros(2, 3, 4, 4),), dynamic_shapes=shapes)
    FORMATS["onnx"].save(program, tmp_path / "sorts.onnx")
    pixels = torch.rand(5, 3, 4, 4)
    assert (
        FORMATS["onnx"]
        .load(tmp_path / "sorts.onnx")(pixels)["image_score"]
        .equal(Sorts()(pixels)["image_score"])
    )


ROOT = os.environ.get("LIT_FEDAD_DATA")


@pytest.mark.nightly
@pytest.mark.real_data
@pytest.mark.skipif(ROOT is None, reason="LIT_FEDAD_DATA names no folder")
def test_real_weights_and_photographs(lab, tmp_path):
    (weights,) = (Path(ROOT).parent / "weights").glob("resnet18*.pth")
    from lit_fedad.core.config import compose
    from lit_fedad.experiment.train import train

    overrides = (
        "experiment=real_mixture", f"data.root={ROOT}", f"backbone.weights={weights}", "tracking=off",
        "data.train_per_product=8", "data.test_per_product=4", "rounds=1",
        "partition=iid", "partition.clients=2", "fabric.accelerator=cpu", f"cache.folder={lab.shared}",
        f"out={tmp_path / 'run'}",
    )  # fmt: skip
    train(compose(list(overrides)), quiet=True)
    photographs = tmp_path / "photographs"
    photographs.mkdir()
    sources = sorted(path for path in Path(ROOT, "mvtec").rglob("*.jpg") if "test" in path.parts)[::20][:4]
    for number, path in enumerate(sources):
        with Image.open(path) as image:  # as a camera gives them: neither square nor of the run's size
            image.resize((500, 400 + number)).save(photographs / f"{number}.png")
    out = export(str(tmp_path / "run"), images=str(photographs))
    card = (out / "model_card.md").read_text()
    assert "4 random images and 4 image files" in card
    differences = [float(line.split("|")[3]) for line in card.splitlines() if line.startswith("| `detector")]
    assert len(differences) == 2
    assert max(differences) < TOLERANCE
    assert "random weights" not in card
