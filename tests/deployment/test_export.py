"""An exported detector computes what the live one does, and its card says what it is."""

import csv
import json
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.refusals import refusal
from huggingface_hub import ModelCard
from PIL import Image

from lit_fedad.core import extras
from lit_fedad.core.errors import UserError
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment import export as exporting
from lit_fedad.deployment import predict as predicting
from lit_fedad.deployment.export import export
from lit_fedad.deployment.live_detector import OpenedClient
from lit_fedad.deployment.predict import predict
from lit_fedad.experiment.claim import LOCK, clear, locked
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.tracking.sender import Delivery

CARD = Path(exporting.__file__).with_name("model_card_template.md")

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


def snippets(card):
    """The blocks of code in a card."""
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.fixture(scope="module")
def exported(tiny_run, tmp_path_factory):
    """A folder with the detector of client 1 of the tiny run, and a photograph that is not square."""
    out = tmp_path_factory.mktemp("exported")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out / "image.png")
    export(str(tiny_run), client=1, format=("pt2",), out=str(out), images=str(out / "image.png"))
    return out


@pytest.mark.slow
def test_the_snippets_of_the_card_score_a_file_as_the_run_does(exported, tiny_run, tmp_path, monkeypatch):
    cpu = {"fabric.accelerator": "cpu"}  # a GPU rounds convolutions otherwise
    scores = predict(str(tiny_run), str(exported / "image.png"), client=1, out=str(tmp_path), overrides=cpu)
    with scores.open(newline="") as file:
        (row,) = csv.DictReader(file)
    monkeypatch.chdir(exported)
    names = {}
    for block in snippets((exported / "model_card.md").read_text()):
        exec(block, names)
    outputs = names["outputs"]
    assert outputs["image_score"].item() == pytest.approx(float(row["score"]), rel=1e-5)
    assert outputs["decision"].item() is (row["decision"] == "anomalous")
    assert outputs["anomaly_map"].shape == (1, 32, 32)
    pages = [Image.fromarray(np.full((20, 30, 4), (0, 90, 200, seen), np.uint8)) for seen in (255, 128)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:])
    names["how"]["page"] = 1  # as of a run with image.page=1
    expected = ImageTransform(32, mean=(0,), std=(1,), page=1).image(tmp_path / "pages.tif")
    assert np.array_equal(names["read"](tmp_path / "pages.tif")[0], expected)


def test_the_card_turns_reports_of_use_off_before_it_imports_onnxruntime():
    (block,) = [one for one in snippets(CARD.read_text()) if "import onnxruntime" in one]
    off, loads = (
        block.index(text) for text in ('os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")', "import onnx")
    )
    assert off < loads


@pytest.mark.slow
def test_the_folder_holds_detector_preprocessing_and_card(exported):
    files = {"image.png", "detector.pt2", "preprocessing.json", "detector.json", "model_card.md"}
    assert {path.name for path in exported.iterdir() if path.name != LOCK} == files
    assert json.loads((exported / "preprocessing.json").read_text()) == {
        "size": 32, "fit": "squeeze", "resize": None, "interpolation": "bicubic", "mode": "RGB", "range": [0, 1]
    }  # fmt: skip


@pytest.mark.slow
def test_the_card_says_what_the_run_says(exported, tiny_run):
    # Cells are padded with spaces.
    card = re.sub(" +", " ", (exported / "model_card.md").read_text())
    result, calibration = RunFolder(tiny_run).result(), RunFolder(tiny_run).calibration()
    rules = {client: calibration.rule(client, RunFolder(tiny_run).alpha()) for client in (0, 1)}
    sizes = result["partition"]["sizes"]
    auroc = result["last"]["i_auroc"]
    worst = [number for number, value in auroc["per_client"].items() if value == auroc["worst"]]
    for line in (
        "# federated_bank anomaly detector, textures, client 1",
        "| method | federated_bank (sums of patches; image scores after SubspaceAD, arXiv 2602.23013) |",
        f"SHA-256 {result['backbone']['sha256']}",
        "**Its backbone has random weights",
        f"| I-AUROC | {auroc['per_client']['1']:.3f} | {auroc['mean']:.3f} | {auroc['worst']:.3f}"
        f" ({', '.join(worst)}) |",
        f"| **1** | {rules[1].threshold:.9g} | {rules[1].alpha:g} | {rules[1].scores.total} |",
        f"| 0 | {rules[0].threshold:.9g} |",
        f"with a p-value of at most {rules[1].alpha:g}",
        "| `p_value` | [B] |",
        "| `anomaly_map` | [B, 32, 32] |",
        f"| `detector.pt2` | {(exported / 'detector.pt2').stat().st_size} (",
        "on 4 random images and 1 image files",
        "| 0.0e+00 / 0.0e+00 | 0 of 1 |",
        f"| 0 | {sizes[0]} | ",
        "licence none needed",
        f"torch {version('torch')}",
    ):
        assert line in card
    assert "onnx" not in card


@pytest.mark.slow
def test_a_hub_reads_the_cards_metadata(exported, tiny_run):
    card, last = ModelCard.load(exported / "model_card.md"), RunFolder(tiny_run).result()["last"]
    assert card.data.library_name == "lit_fedad"
    assert card.data.tags == ["anomaly-detection", "federated-learning", "federated_bank"]
    means = {found.metric_type: found.metric_value for found in card.data.eval_results}
    assert means["i_auroc"] == last["i_auroc"]["mean"]
    assert means.keys() == {name for name in last if name != "round" and last[name]["mean"] is not None}
    assert card.text.lstrip().startswith("# federated_bank anomaly detector")


@pytest.mark.slow
def test_a_classifier_gives_probabilities_of_its_classes(tmp_path, monkeypatch):
    from lit_fedad.core.config import compose
    from lit_fedad.experiment.train import train

    overrides = (
        "debug=seconds", "tracking=off", "fabric.accelerator=cpu", "method=fedavg", "data=motif_classes",
        "~data.train_per_product", "~data.test_per_product", "data.train_per_class=3", "data.test_per_class=1",
        "data.size=16", "image.size=16", "task=classifier_convnet", "encoder.channels=4", "rounds=1",
        "evaluation.pictures=0", f"out={tmp_path / 'run'}",
    )  # fmt: skip
    train(compose(list(overrides)), quiet=True)
    folder = export(str(tmp_path / "run"), format=("pt2",))
    result = RunFolder(tmp_path / "run").result()
    largest = int(np.argmax(result["partition"]["sizes"]))
    assert folder == tmp_path / "run" / "export" / f"client_{largest}"
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    scores = predict(str(tmp_path / "run"), str(folder / "image.png"), out=str(tmp_path))
    with scores.open(newline="") as file:
        (row,) = csv.DictReader(file)
    card, names = (folder / "model_card.md").read_text(), {}
    monkeypatch.chdir(folder)
    for block in snippets(card):
        exec(block, names)
    outputs = names["outputs"]
    assert outputs["probabilities"].sum().item() == pytest.approx(1, abs=1e-6)
    assert outputs["probabilities"].max().item() == pytest.approx(float(row["probability"]), rel=1e-5)
    assert result["partition"]["products"][int(outputs["class"])] == row["class"]
    assert "## Threshold" not in card
    assert f"In order: {', '.join(result['partition']['products'])}." in card
    clear(tmp_path / "run")
    assert not (tmp_path / "run" / "export").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"client": 7}, "client=7: the run has clients 0, 1"),
        (
            {"format": ("pt2", "tflite")},
            "format=pt2,tflite: 'tflite' is none of onnx, pt2, openvino, openvino_int8",
        ),
        ({"format": ()}, "format=: '' is none of onnx, pt2, openvino, openvino_int8"),
        ({"normal": "."}, "normal=.: only format=openvino_int8 looks at normal images"),
        ({"images": "nowhere"}, "images=nowhere: no such file or folder"),
        ({"overrides": {"form": "x"}}, "'form' cannot be given for a trained run"),
    ],
)
def test_bad_input_is_one_line(tiny_run, tmp_path, given, message):
    with refusal() as caught:
        export(**{"run": str(tiny_run), "format": ("pt2",), "out": str(tmp_path / "out"), **given})
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "command", "given"),
    [
        (predicting, predict, {"images": "photos", "product": "screw"}),
        (predicting, predict, {"images": "photos", "alpha": 0.05}),
        (exporting, export, {"format": ("pt2",), "product": "screw"}),
    ],
)
def test_a_classifier_takes_no_product_and_no_rate(monkeypatch, module, command, given):
    classifier = SimpleNamespace(task=SimpleNamespace(kind="classification"))
    opened = OpenedClient(None, {}, {}, classifier, 0, None, None, None)
    monkeypatch.setattr(module, "open_client", lambda *_: opened)
    name = list(given)[-1]
    with refusal(f"^{name}={given[name]}: a classifier has no threshold; leave it out$"):
        command("run", **given)


def test_missing_packages_are_named_with_their_command(tiny_run, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(
        UserError,
        match=r"needs onnx, onnxscript, onnxruntime: pip install 'lit-fedad\[export\]'; or give format=pt2",
    ):
        export(str(tiny_run), format=("pt2", "onnx"))


@pytest.mark.slow
def test_a_run_whose_record_another_command_writes_to_is_exported_all_the_same(
    tiny_run, tmp_path, monkeypatch, capsys
):
    held = []

    def amend(folder, *others):
        with pytest.raises(UserError, match="another lit-fedad command is at work"), locked(folder):
            pass
        held.append(folder)
        return Delivery(None, 0, None)

    monkeypatch.setattr(exporting, "amend", amend)
    monkeypatch.setattr(exporting, "_TURN_S", 0)
    export(str(tiny_run), format=("pt2",), out=str(tmp_path / "alone"))
    assert held == [tiny_run]
    with locked(tiny_run):
        export(str(tiny_run), format=("pt2",), out=str(tmp_path / "beside"))
    assert "not tracked: " in capsys.readouterr().err
    assert held == [tiny_run]
    assert (tmp_path / "beside" / "model_card.md").is_file()


def test_a_folder_that_another_export_writes_to_is_left_alone(tiny_run, tmp_path):
    drafts = tmp_path / ".partial.pt2"
    drafts.mkdir()
    with locked(tmp_path), pytest.raises(UserError, match="another lit-fedad command is at work"):
        export(str(tiny_run), format=("pt2",), out=str(tmp_path))
    assert drafts.is_dir()  # the other's
