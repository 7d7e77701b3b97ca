"""Files for OpenVINO: what they change in scores is measured, and what follows the network stays exact."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.deployment.export import export
from lit_fedad.deployment.formats import FORMATS
from lit_fedad.experiment.train import train

pytest.importorskip("onnxscript")
pytest.importorskip("openvino")
pytest.importorskip("nncf")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory):
    """A folder with the tiny run's detector in three formats, and the card's block of code for each."""
    out = tmp_path_factory.mktemp("openvino")
    return export_all(tiny_run, out)


def export_all(run, out):
    """Exports client 1 of a run, with six normal images and five others, to a folder."""
    normal, images = out / "normal", out / "images"
    for folder, count in ((normal, 6), (images, 5)):
        folder.mkdir()
        for number in range(count):
            pixels = np.random.default_rng(number).integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    formats = ("pt2", "openvino", "openvino_int8")
    export(str(run), client=1, format=formats, images=str(images), out=str(out), normal=str(normal))
    return out


def test_the_network_is_coarse_and_the_rest_is_not(exported):
    """Half precision rounds weights by at most 2^-11; eight bits by far more, and still score alike."""
    runs = {name: FORMATS[name].load(exported / FORMATS[name].files[0]) for name in FORMATS if name != "onnx"}
    pixels = torch.rand(7, 3, 32, 32)
    live, half, eight = (runs[name](pixels) for name in ("pt2", "openvino", "openvino_int8"))
    assert list(live) == list(half) == list(eight)
    torch.testing.assert_close(half["image_score"], live["image_score"], rtol=2e-2, atol=0)
    torch.testing.assert_close(eight["image_score"], live["image_score"], rtol=0.5, atol=0)
    assert not torch.equal(half["image_score"], live["image_score"])
    assert eight["anomaly_map"].shape == live["anomaly_map"].shape
    assert eight["decision"].dtype == torch.bool
    weights = [exported / name for name in ("detector.pt2", "detector.bin", "detector_int8.bin")]
    assert weights[0].stat().st_size > weights[1].stat().st_size > weights[2].stat().st_size


def test_the_card_counts_decisions_and_loads_the_files(exported, monkeypatch):
    card = re.sub(" +", " ", (exported / "model_card.md").read_text())
    for files in ("`detector.xml`, `detector.bin`", "`detector_int8.xml`, `detector_int8.bin`"):
        assert re.search(rf"\| {re.escape(files)} \| .* \| \d of 5 \|", card)
    assert "took its ranges from 6 normal images" in card
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    (block,) = [block for block in blocks if '"detector.xml"' in block]
    monkeypatch.chdir(exported)
    pixels = torch.rand(1, 3, 32, 32)
    names = {"pixels": pixels.numpy()}
    exec(block, names)
    run = FORMATS["openvino"].load(exported / "detector.xml")
    assert np.array_equal(names["outputs"]["image_score"], run(pixels)["image_score"].numpy())


def test_eight_bits_need_normal_images(tiny_run, tmp_path):
    with pytest.raises(UserError, match="format=openvino_int8 needs normal=FOLDER"):
        export(str(tiny_run), format=("openvino_int8",), out=str(tmp_path))


def test_a_vision_transformer_scores_alike_in_half_precision_and_eight_bits(tmp_path):
    """Weights are random: what eight bits cost real ones, this cannot tell."""
    network = ["backbone=dinov2_small", "backbone.weights=random", "backbone.layers=[1,3]"]
    settings = ["method=federated_subspace", "debug=seconds", *network, "image.size=42", "grid=3"]
    folders = [f"data.root={tmp_path / 'data'}", f"out={tmp_path / 'run'}"]
    train(compose([*settings, "tracking=off", "cache.enabled=false", *folders]), quiet=True)
    (tmp_path / "out").mkdir()
    files = export_all(tmp_path / "run", tmp_path / "out")
    pixels = torch.rand(3, 3, 42, 42)
    live, half, eight = (
        FORMATS[name].load(files / FORMATS[name].files[0])(pixels)
        for name in ("pt2", "openvino", "openvino_int8")
    )
    for coarse, tolerance in ((half, 0.05), (eight, 0.3)):
        for name in ("image_score", "anomaly_map"):
            assert coarse[name].isfinite().all()
            torch.testing.assert_close(coarse[name], live[name], rtol=tolerance, atol=0)
        assert not torch.equal(coarse["image_score"], live["image_score"])
