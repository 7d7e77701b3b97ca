"""What a run says of decisions that it cannot promise."""

import re
from types import SimpleNamespace

import pytest

from lit_fedad.core.client_names import NUMBERS
from lit_fedad.experiment.decisions import _say


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
    _say(run, {0: own}, 0.05)
    assert [bool(re.search(said, line)) for line in lines] == [True]
