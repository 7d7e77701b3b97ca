"""The library from Python: the code of its page runs, and scores are those of the command."""

import csv
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.images import tiff
from PIL import Image

import lit_fedad as lf
from lit_fedad import api
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data import pictures
from lit_fedad.data.textures import textures
from lit_fedad.deployment.predict import predict
from lit_fedad.experiment.finished_run import complete_run
from lit_fedad.experiment.run_folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SMALL = [
    "debug=seconds",
    "tracking=off",
    "cache.enabled=false",
    "evaluation.pictures=0",
    "fabric.accelerator=cpu",
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_code_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = textures(tmp_path / "painted", size=64, train_per_product=15, test_per_product=6)
    for folder, product, defective in (("north", "weave", 0), ("south", "grain", 0), ("bad", "weave", 1)):
        samples = [s for s in (*images.train, *images.test) if s.category == product and s.label == defective]
        (tmp_path / folder).mkdir()
        for number, sample in enumerate(samples):
            shutil.copy(sample.path, tmp_path / folder / f"{number}.png")
    original = api.compose

    def small(words):
        replaced = ["data=textures" if word == "data=mvtec_mixture" else word for word in words]
        root = f"data.root={tmp_path / 'painted'}"
        size = ["data.size=64"] if "data=textures" in replaced else []
        return original(
            [*(root if word.startswith("data.root") else word for word in replaced), *SMALL, *size]
        )

    monkeypatch.setattr(api, "compose", small)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(block, names)
    assert [one.decision in ("normal", "anomalous") for one in names["several"]] == [True] * 3
    assert names["several"][0].score == pytest.approx(names["one"].score, rel=1e-5)
    assert lf.load("outputs/two", client=0)("bad/0.png").score == pytest.approx(names["one"].score, rel=1e-5)
    assert len(names["predictions"]) > 0
    assert names["two"].task.training  # a Trainer leaves modes as they are
    assert names["distances"].shape == (1000, 1)
    assert names["alone"].result["partition"]["sizes"] == [len(names["north"]) - 4]


def test_each_name_is_a_client_whatever_a_preset_says(tmp_path):
    image = tmp_path / "a.png"
    image.touch()
    normal = {name: [image] for name in ("north", "east", "south")}
    config = api._configured("fedavg", None, normal, None, tmp_path, {"debug": "seconds"})[0]
    assert config["partition"] == {"_target_": "lit_fedad.data.strategies.ByProduct", "clients": None}


@pytest.mark.parametrize("text", [r"C:\images\bottle", 'a "b" \\"c', "two\nlines", "größe"])
def test_a_text_of_a_setting_is_taken_as_it_stands(text):
    config = api._configured("federated_bank", "textures", None, None, None, {"data.root": text})[0]
    assert config["data"]["root"] == text


@pytest.mark.parametrize("name", ["null", "1e3", r"a\b"])
def test_a_folder_has_the_name_that_it_was_given(name):
    assert api._configured("federated_bank", None, None, None, name, {})[0]["out"] == name


def test_a_setting_that_nothing_reads_is_warned_of():
    with pytest.warns(UserWarning, match="^encoder=resnet18 has no effect: nothing of this run reads it$"):
        api._configured("feddymem", None, None, None, None, {"encoder": "resnet18"})


def test_a_name_that_no_client_has_is_answered_with_those_that_there_are(tmp_path, monkeypatch):
    stored = compose(["data=path_lists", "data.file=x"])
    monkeypatch.setattr(RunFolder, "config", lambda self: stored)
    run = api.TrainedRun(tmp_path, {"partition": {"products": ["east", "north"], "counts": [[3, 0], [0, 3]]}})
    with pytest.raises(UserError, match="^client=nroth: the run has clients east, north$"):
        run.detector("nroth")


@pytest.mark.parametrize(
    ("named", "opened"), [("east", 1), ("both", "both"), (0, 0), ("1", "1"), (None, None)]
)
def test_a_product_of_one_client_names_it(tmp_path, monkeypatch, named, opened):
    monkeypatch.setattr(api, "load_detector", lambda path, client, alpha, product: (client, alpha, product))
    monkeypatch.setattr(api.TrainedRun, "_named", False)
    partition = {"products": ["both", "east"], "counts": [[3, 0], [2, 4]]}
    run = api.TrainedRun(tmp_path, {"partition": partition})
    assert run.detector(named, 0.1, "nut") == (opened, 0.1, "nut")


def test_a_run_is_opened_with_the_weights_that_it_took_without_a_question_to_the_hub(tiny_run, monkeypatch):
    stored = RunFolder(tiny_run).config()
    stored["backbone"] |= {"name": "resnet18", "weights": "auto"}
    monkeypatch.setattr(RunFolder, "config", lambda self: stored)
    taken = complete_run(str(tiny_run), None)[2]["backbone"]
    assert (taken["name"], taken["weights"]) == (RunFolder(tiny_run).result()["backbone"]["name"], "random")


@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_image_scores_as_the_command_does(tiny_run, tmp_path):
    photo = next((tiny_run.parent / "data").rglob("test/scratch/*.png"))
    table = predict(str(tiny_run), str(photo), client=1, out=str(tmp_path), alpha=0.1)
    row = next(csv.DictReader(table.open()))
    detector = lf.load(tiny_run, client=1, alpha=0.1)
    picture = Image.open(photo)
    array = np.asarray(picture)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    alone = detector(photo)
    assert isinstance(alone, lf.Scored)
    for one in (alone, *detector([str(photo), picture, array, tensor, tensor / 255]), *detector(array[None])):
        assert one.score == pytest.approx(float(row["score"]), rel=1e-5)
        assert one.p_value == pytest.approx(float(row["p_value"]), rel=1e-5)
        assert one.decision == row["decision"]
        assert one.map.ndim == 2
    turned, exif = tmp_path / "turned.tif", Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    picture.convert("L").crop((0, 0, 20, 31)).save(turned, exif=exif)
    from_file, opened = detector([turned, Image.open(turned)])
    assert opened.score == pytest.approx(from_file.score, rel=1e-5)
    for odd, message in ((array / 255, "give uint8"), (tensor * 2.0, "from 0 to 1"), (7, "int: give a path")):
        with pytest.raises(UserError, match=message):
            detector(odd)


def test_an_opened_file_scores_as_its_path_where_pillow_would_turn_it_negative(tiny_run, tmp_path):
    values = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    (tmp_path / "a.tif").write_bytes(tiff(values, photometric="miniswhite"))
    detector = lf.load(tiny_run, client=1, alpha=0.1)
    read, opened = detector(tmp_path / "a.tif"), detector(Image.open(tmp_path / "a.tif"))
    assert opened.score == read.score


def test_a_dark_image_of_sixteen_bits_in_memory_is_told(tiny_run, monkeypatch):
    monkeypatch.setattr(pictures, "_warned", set())
    detector = lf.load(tiny_run, client=1, alpha=0.1)
    with pytest.warns(UserWarning, match="in memory has images of 16 bits that are nearly black or dark"):
        detector(Image.fromarray(np.full((32, 32), 200, np.uint16)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "textures", "normal": ["a.png"]}, "both given"),
        ({"test": {"good": ["a.png"]}}, "needs normal="),
        ({"normal": {"north": []}}, "north has no training image"),
        ({"normal": {}}, "normal: no client is named"),
        ({"normal": [PAGE], "out": PAGE}, r"python\.md: cannot be written \(File exists\)"),
        ({"normal": [PAGE], "out": PAGE / "run"}, r"cannot be written \(Not a directory\)"),
        ({"out": PAGE}, "cannot be written"),
        ({"normal": {"north": ["a.png"]}, "test": {"good": ["b.png"]}}, "'good' is no client"),
        ({"normal": ["a.png"], "test": {"good": ["b.png"]}}, "a.png: no such image"),
        ({"normal": [b"a.png"] * 5}, "normal: give paths of image files, not bytes"),
        ({"normal": "photos"}, "normal: give a list of paths, not 'photos'"),
        ({"normal": ["a.png"] * 5, "test": {"good": "b.png"}}, "test: give a list of paths, not 'b.png'"),
        ({"normal": ["a.png"] * 5, "test": ["b.png"]}, "test: give paths by label"),
        ({"normal": {"north": ["a.png"]}, "test": {"north": ["b.png"]}}, "test: give paths by label"),
        ({"normal": ["a.png"], "test": {"Normal": ["b.png"]}}, "called 'good', .* not 'Normal'"),
        (
            {"normal": {"north": ["a.png"]}, "test": {"north": {0: ["b.png"], 1: []}}},
            "called 'good', .* not 0",
        ),
        ({"normal": [PAGE, PAGE]}, r"python\.md: is given to images and again to images, and would be"),
        ({"normal": {"north": [PAGE], "south": [PAGE]}}, r"python\.md: is given to north and again to south"),
        ({"out": 5}, "out: give a path, not int"),
        ({"out": ""}, "out: give a path, not ''"),
        ({"out": "x" * 300}, "^x{60}... is too long for a path"),
        ({"normal": ["x" * 300]}, "is too long for a path"),
        ({"method": b"fedavg"}, "method: give a number, a text, a list or a section, not bytes"),
        ({"normal": [PAGE]}, "a single image"),  # as the run is built, where its list of images is written
    ],
)
def test_bad_input_is_refused(given, message, tmp_path):
    with pytest.raises(UserError, match=message):
        lf.train(**{"out": tmp_path / "run", **given}, settings={"tracking": "off"}, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_list_that_the_run_in_the_folder_refuses_is_not_left_behind(tmp_path):
    run = tmp_path / "outputs" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("rounds: 1")
    images = [str(tmp_path / name) for name in ("a.png", "b.png", "c.png")]
    for place, path in enumerate(images):
        Image.fromarray(np.full((32, 32, 3), 9 * place, np.uint8)).save(path)
    with pytest.raises(UserError, match="not the configuration of a run"):
        lf.train("federated_bank", normal=images, out=run, quiet=True)
    assert [path.name for path in run.parent.iterdir()] == ["run"]
