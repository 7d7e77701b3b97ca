"""A detector that new images are folded into is the one that would have been trained with them."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from PIL import Image

from lit_fedad.core.errors import UserError
from lit_fedad.data.partition import Partition
from lit_fedad.data.textures import textures
from lit_fedad.deployment import update as module
from lit_fedad.deployment.export import export
from lit_fedad.deployment.predict import evaluate, predict
from lit_fedad.deployment.reviews import add_review
from lit_fedad.deployment.ui.reading import ScoredFile
from lit_fedad.deployment.update import UpdateOptions, update
from lit_fedad.deployment.watch import watch
from lit_fedad.experiment.claim import clear
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.tracking.sender import Delivery

BASE = [list(range(8)), list(range(8, 15))]
SUBSPACE = ("method=federated_subspace", "rounds=0")
BANK = ("method=federated_bank", "rounds=1")


@pytest.fixture
def desk(lab, tmp_path):
    """Trains runs on given parts of the textures, and copies other parts into folders of clients."""
    lab.finished("method=federated_bank")  # draws the textures

    class Desk:
        @staticmethod
        def train(name, *overrides, **content):
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(content))
            chosen = (
                "partition=file",
                "~partition.clients",
                f"partition.path={file}",
                "evaluation.pictures=0",
            )
            lab.train(tmp_path / name, *overrides, *chosen)
            return tmp_path / name

        @staticmethod
        def textures():
            settings = lab.config(tmp_path)["data"]
            return textures(
                **{key: value for key, value in settings.items() if key not in ("_target_", "name")}
            )

        def images(self, name, indices):
            data = self.textures()
            for client, own in indices.items():
                for index in own:
                    sample = data.train[index]
                    path = tmp_path / name / str(client) / sample.category / f"{index:03}{sample.path.suffix}"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(sample.path, path)
            return tmp_path / name

    return Desk()


def fold(run, images, force=True, **options):
    return update(UpdateOptions(str(run), str(images), force=force, **options))


def choose(run, version):
    return update(UpdateOptions(str(run), default=version))


def same(one, other):
    """The same numbers summed in another order."""
    torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)


def outside(state):
    """The projection on what lies outside the subspace, whose basis may be rotated."""
    basis = state["subspace"]["basis"][0]
    return basis @ basis.T


def calibrated(folder):
    """Calibration scores by client and product, as large as they may be in their bins."""
    return {
        client: {name: held.edges.repeat_interleave(held.counts) for name, held in own.items()}
        for client, own in RunFolder(folder).calibration().clients.items()
    }


def scores(run, images, out, **options):
    with predict(str(run), str(images), client=1, out=str(out), **options).open(newline="") as file:
        return [float(row["score"]) for row in csv.DictReader(file)]


BOTH, ONE = {0: [15, 16], 1: [17, 18, 19]}, {1: [15, 19]}


@pytest.mark.parametrize(
    ("method", "new"),
    [
        pytest.param(SUBSPACE, BOTH, id="subspace, both", marks=pytest.mark.slow),
        pytest.param(BANK, ONE, id="bank, one", marks=pytest.mark.slow),
    ],
)
def test_an_update_is_a_further_stage_of_training(lab, desk, method, new):
    run = desk.train("run", *method, clients=BASE)
    version = fold(run, desk.images("new", new))
    stages = [[own, *([new[client]] if client in new else [])] for client, own in enumerate(BASE)]
    trained = desk.train("stages", method[0], "rounds=2", stages=stages)
    found, wanted = (lab.state(folder)["server"] for folder in (version, trained))
    assert (
        found["measured"]
        == wanted["measured"]
        == {c: len(own) + len(new.get(c, ())) for c, own in enumerate(BASE)}
    )
    for part in ("moments", *({"known", "slots_of"} & found.keys())):
        same(found[part], wanted[part])
    same(*(outside(state) for state in (found, wanted)))
    same(*(calibrated(folder) for folder in (version, trained)))


@pytest.mark.slow
def test_two_updates_of_a_subspace_are_training_with_all_images_at_once(lab, desk):
    run = desk.train("run", *SUBSPACE, clients=BASE)
    fold(run, desk.images("first", {0: [15, 16]}))
    choose(run, 1)
    version = fold(run, desk.images("second", {0: [17], 1: [18, 19]}))
    trained = desk.train("whole", *SUBSPACE, clients=[[*BASE[0], 15, 16, 17], [*BASE[1], 18, 19]])
    found, wanted = lab.state(version)["server"], lab.state(trained)["server"]
    assert found["measured"] == wanted["measured"] == {0: 11, 1: 9}
    same(found["moments"], wanted["moments"])
    same(outside(found), outside(wanted))
    assert RunFolder(version).result()["partition"]["sizes"] == [11, 9]
    assert [len(own) for own in Partition.load(version / "partition.json").clients] == [11, 9]
    counted = RunFolder(version).calibration().clients
    assert [sum(counts.total for counts in counted[client].values()) for client in (0, 1)] == [11, 9]


@pytest.mark.slow
def test_commands_use_the_chosen_version_and_all_others_remain(desk, tmp_path):
    run, photos = desk.train("run", *SUBSPACE, clients=BASE), desk.images("photos", {0: [2, 19]}) / "0"
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    old = scores(run, photos, tmp_path / "a")
    version = fold(run, desk.images("new", {1: [18, 19]}) / "1", client=1)
    assert version == run / "versions" / "1"
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert scores(run, photos, tmp_path / "b", version=0) == old
    assert scores(run, photos, tmp_path / "b") == old
    choose(run, 1)
    new = scores(run, photos, tmp_path / "c")
    assert new == scores(run, photos, tmp_path / "d", version=1) == scores(version, photos, tmp_path / "e")
    assert new != old
    for number, folder in ((None, version), (0, run)):
        wanted = RunFolder(folder).result()["last"]["i_auroc"]["mean"]
        assert evaluate(str(run), version=number)["i_auroc"]["mean"] == pytest.approx(wanted)
    card = (export(str(run), format=("pt2",)) / "model_card.md").read_text()
    title = next(line for line in card.splitlines() if line.startswith("# "))
    assert title.endswith(", version 1")
    assert (version / "export").is_dir()
    watch(str(run), str(photos), client=1, once=True)
    assert (version / "watch" / "client_1" / "images.csv").is_file()
    for number in (2, -1):
        with pytest.raises(UserError, match=rf"has no version {number}, only 0, 1"):
            predict(str(run), str(photos), version=number)
        with pytest.raises(UserError, match=rf"has no version {number}, only 0, 1"):
            choose(run, number)
    choose(run, 0)
    assert scores(run, photos, tmp_path / "f") == old
    (run / "versions" / "default.json").write_text('{"default": "1"}')
    with pytest.raises(UserError, match=r"default.json: names no version"):
        predict(str(run), str(photos))


@pytest.mark.slow
def test_images_that_are_part_of_it_already_are_left_out(desk, capsys):
    run, images = desk.train("run", *SUBSPACE, clients=BASE), desk.images("new", {0: [15]})
    fold(run, images)
    choose(run, 1)
    with pytest.raises(UserError, match=r"no new image there; the 1 there are part of the detector already"):
        fold(run, images)
    desk.images("new", {0: [16, 17]})
    (folder,) = {path.parent for path in images.rglob("016.*")}
    (image,) = images.rglob("016.*")
    hidden = folder / ".ipynb_checkpoints"
    hidden.mkdir()
    (images / "@eaDir").mkdir()
    shutil.copy(image, hidden / "n1-checkpoint.png")
    shutil.copy(image, folder / "copy.png")
    (folder / "damaged.png").write_text("no image")
    (folder / "notes.txt").write_text("no image")
    capsys.readouterr()
    version = fold(run, images)
    said = capsys.readouterr()
    assert "2 images are part of the detector already" in said.out
    assert "damaged.png: cannot be read as an image" in said.err
    assert "skipped files that are no image (1, first" in said.err
    assert [len(addition.images[0]) for addition in RunFolder(version).additions()] == [1, 2]


@pytest.mark.slow
def test_images_that_look_anomalous_are_refused_until_they_are_forced(desk, tmp_path, capsys, monkeypatch):
    sent = []
    monkeypatch.setattr(module, "amend", lambda *given: sent.append(given) or Delivery(None, 0, None))
    # A rate that so few calibration images cannot promise: the largest of their scores is the threshold.
    run, folder = desk.train("run", *SUBSPACE, "evaluation.alpha=0.01", clients=BASE), tmp_path / "foreign"
    folder.mkdir()
    for number in range(20):
        pixels = np.random.default_rng(number).integers(0, 2, (64, 64, 3), np.uint8) * 255
        Image.fromarray(pixels).resize((512, 512), 0).save(folder / f"{number:02}.png")
    (product, *_) = RunFolder(run).result()["partition"]["products"]
    words = rf"20 of the 20 new images of client 0, product {product}, are anomalous .* force=true"
    with pytest.raises(UserError, match=words):
        fold(run, folder, force=False, client=0, product=product)
    # Each product's own images, by another's name.
    for place, sample in enumerate(desk.textures().train[:15]):
        pixels = np.asarray(Image.open(sample.path)) // 2 * 2
        named = tmp_path / "misnamed" / {"brick": "grass"}.get(sample.category, "brick")
        named.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(named / f"{place}.png")
    with pytest.raises(
        UserError, match=r"product brick, look like \w+ to the detector|product grass, look like brick"
    ):
        fold(run, tmp_path / "misnamed", force=False, client=0)
    assert RunFolder(run).versions() == [0]
    version = fold(run, folder, client=0, product=product)
    assert RunFolder(run).version(None).path == run  # the default is what it was
    # The run's own numbers are as they were.
    assert {name.split("/")[1] for name in sent[0][1]} == {version.name}
    said = capsys.readouterr().out
    assert f"product {product}: 20 before, " in said
    assert re.search(r"^I-AUROC +0\.\d{3} +0\.\d{3}$", said, re.MULTILINE)  # before and now
    assert f"lit-fedad update run={run} default={version.name}" in said
    choose(run, 1)
    assert capsys.readouterr().out == f"version 1 is the default: {version}\n"


@pytest.mark.slow
def test_a_forced_product_is_added_however_far_it_lies_and_others_after_it_as_ever(desk, tmp_path):
    run = desk.train("run", *BANK, clients=[list(range(5)), list(range(5, 10)), list(range(10, 15))])
    folder = tmp_path / "new"
    folder.mkdir()
    # Like each other and nothing else: a client that held these alone would be left out.
    for number in range(6):
        pixels = np.full((64, 64, 3), (255, 0, 0), np.uint8)
        pixels[number] = 0
        Image.fromarray(pixels).save(folder / f"{number}.png")
    rules = RunFolder(run).config()["federation"]["robust"]
    assert rules["banks"]
    assert RunFolder(fold(run, folder, client=0, product="red")).additions()[-1].total == 6
    choose(run, 1)
    later = fold(run, desk.images("later", {2: [15]}), force=False)  # judged as the run was
    assert RunFolder(later).config()["federation"]["robust"] == rules


@pytest.mark.slow
def test_of_reviewed_images_false_alarms_alone_are_folded_in_and_new_products_if_forced(desk, tmp_path):
    run, images = desk.train("run", *SUBSPACE, clients=BASE), desk.images("new", {0: [15, 16, 17]})
    new, missed, known = sorted((images / "0").rglob("*.png"))  # grain, which the run has not; weave
    reviews = tmp_path / "reviews.csv"
    add_review(reviews, ScoredFile(str(missed), 1.0, 0.1, "anomalous", None), "missed", "run")
    with pytest.raises(UserError, match=r"no new image that \S+reviews\.csv calls a false alarm there$"):
        fold(run, images, reviews=str(reviews))
    add_review(reviews, ScoredFile(str(known), 1.0, 0.1, "anomalous", None), "false alarm", "run")
    version = fold(run, images, force=False, reviews=str(reviews))
    assert [sample.path for sample in RunFolder(version).additions()[0].images[0]] == [known.resolve()]
    add_review(reviews, ScoredFile(str(new), 1.0, 0.1, "anomalous", None), "false alarm", "run")
    with pytest.raises(UserError, match=r"product=grain: the detector has .*; force=true adds a new one"):
        fold(run, images, force=False, reviews=str(reviews))
    assert fold(run, images, reviews=str(reviews)).name == "2"


@pytest.mark.slow
def test_a_refused_update_is_one_line_and_changes_nothing(lab, desk, tmp_path):
    run, good = desk.train("run", *SUBSPACE, clients=BASE), desk.images("new", {0: [15]})
    (tmp_path / "damaged" / "1").mkdir(parents=True)
    (tmp_path / "damaged" / "1" / "a.png").write_text("no image")
    tested = desk.textures().test[0].path.parent
    literal, _ = lab.finished("method=feddymem_literal")
    for folder, images, options, message in (
        (run, tmp_path / "nowhere", {}, r"images=\S+: no such folder"),
        (run, tmp_path / "damaged" / "1" / "a.png", {"client": 0}, r"a.png: is a file; give its folder"),
        (run, good / "0", {}, r"is no folder named by a client's number, 0 to 1; or give client=N"),
        (run, good, {"client": 7}, r"client=7: the run has clients 0, 1"),
        (run, tmp_path / "damaged", {}, r"a.png: which product\? give product=NAME \(\w+, \w+"),
        (run, tmp_path / "damaged", {"product": "grass"}, r"a.png"),
        (
            run,
            good,
            {"client": 0, "product": "gras", "force": False},
            r"product=gras: the detector has .*; force=true adds",
        ),
        (run, tested, {"client": 0, "product": "grass"}, r"is a test image of the run; give others"),
        (literal, good, {}, r"feddymem_literal with these settings is not made of sums"),
    ):
        with refusal(message):
            fold(folder, images, **options)
        assert RunFolder(folder).versions() == [0]
        assert list(folder.glob("versions/.*")) == []


@pytest.mark.slow
def test_what_a_killed_update_left_is_no_version(desk):
    run = desk.train("run", *SUBSPACE, clients=BASE)
    (run / "versions" / ".partial_1").mkdir(parents=True)
    (run / "versions" / ".partial_1" / "config.yaml").write_text("half")
    assert fold(run, desk.images("new", {0: [15]})).name == "1"
    clear(run)
    assert not (run / "versions").exists()


@pytest.mark.slow
def test_a_changed_or_missing_image_of_an_update_is_one_line(desk):
    run, images = desk.train("run", *SUBSPACE, clients=BASE), desk.images("new", {0: [15, 16]})
    version = fold(run, images)
    choose(run, 1)
    (path,) = images.rglob("015.*")
    path.unlink()
    with pytest.raises(UserError, match=r"image \S+015\.\S+ cannot be read|015"):
        evaluate(str(run))
    (version / "additions.json").write_text("{}")
    with pytest.raises(UserError, match=r"additions.json: changed since .* or use another version: "):
        evaluate(str(run))
