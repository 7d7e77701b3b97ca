"""What decisions are judged by, and what a run says of those that it cannot promise."""

import re
from types import SimpleNamespace

import pytest
import torch

from lit_fedad.core.client_names import NUMBERS
from lit_fedad.data.partition import Partition
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.decisions import _report_promises, evaluated_images


@pytest.mark.parametrize(
    ("silent", "deciding", "said"),
    [
        (["nut", "bolt"], [12, 7], "needs 19 calibration images, and client 0 has at most 12: "),
        (["bolt"], [12, 7], "needs 19 calibration images, and client 0 has fewer of bolt: "),
        (
            ["nut", "bolt"],
            [0, 0],
            "client 0 has no calibration images: .* give calibration.share above 0, or more",
        ),
    ],
)
def test_who_cannot_promise_is_told_with_the_products_that_have_too_few_images(silent, deciding, said):
    lines = []
    run = SimpleNamespace(
        display=SimpleNamespace(warn=lines.append), federation=SimpleNamespace(names=NUMBERS)
    )
    own = {
        "products": {"nut": 0, "bolt": 0},
        "without_promise": silent,
        "promised": 0.05,
        "deciding": deciding,
    }
    _report_promises(run, {0: own}, 0.05)
    assert [bool(re.search(said, line)) for line in lines] == [True]


def test_classes_are_products_and_images_of_foreign_sets_anomalies_of_none():
    pixels, labels = torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 1, 2])
    images = SemanticSet(
        "both", ("cat", "dog", "noise"), pixels, labels, pixels, labels, anomalies=("noise",)
    )
    partition = Partition(((0,), (1,)), calibration=((), (2,)))
    found = evaluated_images({}, SimpleNamespace(images=images, partition=partition))
    assert found.labels.tolist() == [0, 0, 0, 1]
    assert found.products == ["cat", "dog", "dog", None]
    assert found.held == {0: {"cat": 1}, 1: {"dog": 2}}
    assert not found.known
