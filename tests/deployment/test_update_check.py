"""What an update refuses before it begins, on a run that is complete."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.images import picture
from helpers.refusals import refusal

from lit_fedad.contracts import Prediction
from lit_fedad.data.additions import Addition
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.deployment import live_detector, update
from lit_fedad.deployment.new_images import NewImages
from lit_fedad.deployment.update import UpdateOptions
from lit_fedad.deployment.update_check import Judged, judge_new, refuse_foreign
from lit_fedad.experiment.finished_run import complete_run, same_model
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.report.console import Display

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


@pytest.mark.parametrize("given", [{"default": 1}, {"alpha": 0.1}])
@pytest.mark.parametrize("other", [{"client": 0}, {"product": "nut"}, {"reviews": "a.csv"}, {"force": True}])
def test_options_of_images_are_not_passed_over_without_images(given, other):
    with refusal("client, product, reviews and force are of images=FOLDER alone"):
        UpdateOptions("run", **given, **other)


@pytest.mark.parametrize(
    ("leaves_out", "federation", "message"),
    [
        (None, {}, "a detector of bank with these settings is not made of sums"),
        (len, {"privacy": {"epsilon": 8.0}}, "its sums are noised, and an update's would not be"),
        (
            len,
            {"secure_sum": {"clients": 3}},
            "its sums are of all clients, and an update's would be of those",
        ),
        (len, {"privacy": {"epsilon": None}, "secure_sum": None}, "cifar is no set of image files"),
    ],
)
def test_sums_that_images_cannot_be_added_to_are_refused(leaves_out, federation, message):
    method = SimpleNamespace(exchanges=SimpleNamespace(leave_out=leaves_out))
    config = {"method": {"name": "bank"}, "federation": federation}
    with refusal(message):
        update._check(
            SimpleNamespace(path="run"), config, SimpleNamespace(method=method), SimpleNamespace(name="cifar")
        )


@pytest.fixture
def judged(tiny_run, monkeypatch):
    """Judges images of client 0 that are said to be of a product, with given scores."""
    folder, result, config = complete_run(str(tiny_run), None, None)
    photos = sorted((tiny_run.parent / "data").rglob("weave/train/good/*.png"))

    def judge(scores, product="weave"):
        new = Addition({0: tuple(Sample(photos[0], product) for _ in scores)})
        monkeypatch.setattr(live_detector, "predict_batch", lambda *_: Prediction(torch.tensor(scores)))
        (found,) = judge_new(folder, config, same_model(config, result), new)
        return found

    return judge


@pytest.mark.parametrize(("score", "beyond"), [(math.nan, 3), (math.inf, 3), (-math.inf, 0)])
def test_an_image_whose_score_is_no_number_lies_beyond_the_threshold(judged, score, beyond):
    found = judged([score] * 3)
    assert (found.client, found.product, found.images, found.beyond) == (0, "weave", 3, beyond)


@pytest.mark.parametrize("product", ["weave", "unknown"])
@pytest.mark.parametrize("above", [0, 1, 3])
def test_the_chance_is_that_of_so_many_among_the_largest_of_all(tiny_run, judged, product, above):
    """Counted: of all places that the new scores could have among those of calibration, how many are as high."""
    folder = RunFolder(tiny_run)
    rule = folder.calibration().rule(0, folder.alpha(), product if product == "weave" else None)
    scores, images = rule.scores, 3
    rate = max(rule.alpha, 1 / (scores.total + 1))
    threshold = scores.threshold(rate)
    found = judged([threshold] * (images - above) + [threshold + 1] * above, product)
    below = scores.rank(rate)  # calibration scores up to the threshold

    def places(number):
        higher = math.comb(scores.total - below + number, number)
        return higher * math.comb(below - 1 + images - number, images - number)

    as_high = sum(places(number) for number in range(above, images + 1))
    assert found.beyond == above
    assert found.chance == pytest.approx(as_high / math.comb(scores.total + images, images))


@pytest.mark.parametrize(
    ("beyond", "chance", "alike", "message"),
    [
        (4, 0.009, "nut", "4 of the 5 new images of client 1, product nut, are anomalous to the detector"),
        (
            1,
            0.011,
            "bolt",
            "most of the 5 new images of client 1, product nut, look like bolt to the detector",
        ),
        (1, 0.011, "nut", None),
        (1, 0.011, None, None),
    ],
)
def test_foreign_images_are_refused(beyond, chance, alike, message):
    judged = [Judged(0, "nut", 3, 0, 1.0, None), Judged(1, "nut", 5, beyond, chance, alike)]
    if message is None:
        refuse_foreign(judged)
    else:
        with refusal(message):
            refuse_foreign(judged)


def test_a_copy_of_an_image_of_calibration_is_not_new(tmp_path):
    held = tuple(Sample(tmp_path / f"{value}.png", "nut") for value in (10, 20))
    for value in (10, 20):
        picture(tmp_path / f"{value}.png", value)
    picture(tmp_path / "new" / "copy.png", 20)
    partition = Partition(((0,),), calibration=((1,),))
    search = NewImages(
        folder=tmp_path / "new",
        client=0,
        clients=[0],
        images=ImageSet("set", held, ()),
        partition=partition,
        memo=None,
        display=Display(quiet=True),
    )
    with refusal("no new image there; the 1 there are part of the detector already, or copies"):
        search.find()


@pytest.mark.parametrize(
    ("products", "below", "product", "shown"),
    [
        (("nut",), "", None, "nut"),
        (("bolt", "nut"), "nut", None, "nut"),
        (("bolt", "nut"), "", "bolt", "bolt"),
        (("bolt", "nut"), "", None, None),
    ],
)
def test_an_image_shows_the_given_product_or_its_folders_or_the_only_one(
    tmp_path, products, below, product, shown
):
    picture(tmp_path / "new" / below / "a.png", 9)
    held = tuple(Sample(tmp_path / f"{name}.png", name) for name in products)
    for value, sample in enumerate(held):
        picture(sample.path, value)
    search = NewImages(
        folder=tmp_path / "new",
        client=0,
        product=product,
        clients=[0],
        images=ImageSet("set", held, ()),
        partition=Partition.of_clients([range(len(held))]),
        memo=None,
        display=Display(quiet=True),
    )
    if shown is None:
        with refusal("which product\\? give product=NAME \\(bolt, nut\\), or a folder for each"):
            search.find()
    else:
        (sample,) = search.find().images[0]
        assert sample.category == shown
