"""Every door reads every file alike: a picture's score has the same digits, whatever file it lies in."""

import csv
import http.client
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.pictures import files_of, picture, png, tiff
from helpers.sites import HERE, OPEN, Here
from PIL import Image

from lit_fedad.cli.main import main
from lit_fedad.data.pictures import sniff
from lit_fedad.deployment.predict import predict
from lit_fedad.deployment.ui.command import trial
from lit_fedad.deployment.ui.reading import RunView, read_scored
from lit_fedad.deployment.update import UpdateOptions, update
from lit_fedad.deployment.uploads import FORMATS, Limits
from lit_fedad.deployment.watch import watch
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.settings import SiteSettings
from lit_fedad.sites.site import Site

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*RANDOM weights")]

METHOD = ("method=federated_bank", "rounds=1", "evaluation.batch_size=1")
FOLDERS = ("set/train/normal", "set/test/normal", "set/test/anomalous", "new")


def write(place, page, plain):
    """Writes a grey and a coloured picture to each folder, in all kinds of files, or as often as plain ones."""
    for seed, folder in enumerate(FOLDERS):
        (place / folder).mkdir(parents=True)
        for colour in (False, True):
            pixels = picture(seed, colour)
            files = files_of(pixels, page, all_turns=False)
            if folder == "set/test/normal":
                files = dict(list(files.items())[::4])
            for number, (name, content) in enumerate(files.items()):
                file = f"{'colour' if colour else 'grey'}_{number:02}.png"
                (place / folder / file).write_bytes(png(pixels, name) if plain else content)
                if folder == "set/test/anomalous":
                    mask = place / "set" / "masks" / file
                    mask.parent.mkdir(exist_ok=True)
                    marked = np.uint8(255) * (pixels.reshape(*pixels.shape[:2], -1)[..., 0] > 200)
                    mask.write_bytes(tiff([marked], turn=1 if plain else int(name[-1])))


@pytest.fixture(scope="module", params=[None, 1], ids=["alone", "second page"])
def sides(request, lab, tmp_path_factory):
    """The same pictures as files of all kinds, and as plain ones; with the run that was trained on each."""
    home, made = tmp_path_factory.mktemp("doors"), []
    for plain in (False, True):
        place = home / ("plain" if plain else "files")
        write(place, request.param, plain)
        page = [] if plain or request.param is None else [f"image.page={request.param}"]
        data = ["data=folders", f"data.root={place / 'set'}", "data.masks=masks", "data.name=pictures"]
        result = lab.train(place / "run", *METHOD, *data, *page)
        made.append(SimpleNamespace(place=place, run=place / "run", data=data, page=page, result=result))
    return made


def rows(table):
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shown(path):
    """Which of the two pictures a file shows."""
    return path.name.partition("_")[0]


def rgb(name):
    """The pixels of one of the two pictures."""
    pixels = picture(FOLDERS.index("new"), name == "colour")
    return pixels if pixels.ndim == 3 else np.dstack([pixels] * 3)


def scores(table):
    """The scores of each of the two pictures, as they are written."""
    found = {}
    for row in rows(table):
        found.setdefault(shown(Path(row["path"])), set()).add(row["score"])
    return found


def test_training_ends_with_the_same_digits(lab, sides, differences):
    files, plain = sides
    assert differences(lab.state(files.run), lab.state(plain.run)) == []
    assert differences(files.result["last"], plain.result["last"]) == []


def test_data_check_finds_nothing_wrong(sides, capsys):
    for side in sides:
        words = [word.removeprefix("data.") for word in (*side.data[1:], *side.page)]
        assert main(["data", "check", "folders", *words]) == 0, capsys.readouterr()


def test_predict_and_watch_give_a_picture_one_score(sides, tmp_path):
    files, plain = sides
    expected = scores(predict(str(plain.run), str(plain.place / "new")))
    assert [len(own) for own in expected.values()] == [1, 1]
    assert scores(predict(str(files.run), str(files.place / "new"))) == expected
    watch(str(files.run), str(files.place / "new"), once=True, out=str(tmp_path))
    assert scores(tmp_path / "images.csv") == expected


def test_uploads_to_the_server_and_to_the_page_give_a_picture_one_score(sides, tmp_path):
    for package in ("onnx", "onnxruntime", "fastapi"):
        pytest.importorskip(package)
    from helpers.serving import served
    from helpers.tiny_detector import SIDE, tiny_detector

    from lit_fedad.deployment.served_detector import ServedDetector
    from lit_fedad.deployment.serving import Desk

    files, _ = sides
    detector = tiny_detector(tmp_path / "export" / "client_0", page=1 if files.page else None)
    found, said, attempt = {}, {}, trial(tmp_path)
    with served(Desk(ServedDetector(detector, 1), Limits(), workers=1, queue=4)) as port:
        for path in sorted((files.place / "new").iterdir()):
            if sniff(content := path.read_bytes()) in FORMATS:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("POST", "/score", content)
                answer = json.loads(connection.getresponse().read())
                found.setdefault(shown(path), set()).add(answer["score"])
                said.setdefault(shown(path), set()).add(attempt(content, path.name)[-1])
    assert [len(own) for own in (*found.values(), *said.values())] == [1] * 4
    for name, (score,) in found.items():
        small = Image.fromarray(rgb(name)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        assert score == pytest.approx(np.asarray(small).mean() / 255, rel=1e-5)
        assert f"score {score:.4g}," in str(said[name])


def test_the_gallery_shows_each_file_as_its_picture(sides, tmp_path):
    pytest.importorskip("gradio")
    from lit_fedad.deployment.ui.page import OperatorPage

    files, _ = sides
    images = read_scored(predict(str(files.run), str(files.place / "new")))
    page = OperatorPage(RunView.open(str(files.run)), tmp_path / "reviews.csv", trial(files.run)).build()
    choose = next(one.fn for one in page.fns.values() if one.name == "choose")
    for place, image in enumerate(images):
        _, words, original, *_ = choose(images, SimpleNamespace(index=place))
        assert np.array_equal(original.constructor_args["value"], rgb(shown(Path(image.path)))), words


def test_updates_with_them_end_with_the_same_digits(lab, sides, differences):
    options = {"client": 0, "product": "pictures", "force": True}
    versions = [update(UpdateOptions(str(side.run), str(side.place / "new"), **options)) for side in sides]
    assert differences(*map(lab.state, versions)) == []


def test_a_site_that_holds_them_ends_with_the_same_digits(sides, differences):
    results = []
    for side in sides:
        own = (*HERE, f"cache.folder={side.place / 'cache'}", *side.page)
        settings = SiteSettings("north", side.place / "site", tuple(side.data), own, policy=OPEN)
        words = [*METHOD, "debug=seconds", "evaluation.pictures=0"]
        plan = Plan(words, ["north"], str(side.place / "sites"), HERE)
        results.append(coordinate(plan, Here([Site(settings, Display(quiet=True))]), quiet=True))
    assert differences(*(result["last"] for result in results)) == []
