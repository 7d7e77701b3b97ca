"""What an update refuses before it begins, on a run that is complete."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.refusals import refusal

from lit_fedad.data.additions import Addition
from lit_fedad.data.sample import Sample
from lit_fedad.deployment import update_check
from lit_fedad.deployment.update import UpdateOptions
from lit_fedad.deployment.update_check import Judged, judge_new, refuse_foreign
from lit_fedad.experiment.finished_run import complete_run, same_model

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


@pytest.mark.parametrize("given", [{"default": 1}, {"alpha": 0.1}])
@pytest.mark.parametrize("other", [{"client": 0}, {"product": "nut"}, {"reviews": "a.csv"}, {"force": True}])
def test_options_of_images_are_not_passed_over_without_images(given, other):
    with refusal("client, product, reviews and force are of images=FOLDER alone"):
        UpdateOptions("run", **given, **other)


@pytest.mark.parametrize(("score", "beyond"), [(math.nan, 3), (math.inf, 3), (-math.inf, 0)])
def test_an_image_whose_score_is_no_number_lies_beyond_the_threshold(tiny_run, monkeypatch, score, beyond):
    folder, result, config = complete_run(str(tiny_run), None, None)
    photos = sorted((tiny_run.parent / "data").rglob("weave/train/good/*.png"))[:3]
    new = Addition({0: tuple(Sample(photo, "weave") for photo in photos)})
    scored = SimpleNamespace(image_score=torch.full((len(photos),), score))
    monkeypatch.setattr(update_check, "predict_batch", lambda *_: scored)
    (judged,) = judge_new(folder, config, same_model(config, result), new)
    assert (judged.client, judged.product, judged.images, judged.beyond) == (0, "weave", 3, beyond)


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
