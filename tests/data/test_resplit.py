"""Another split of the normal images: same sizes, same anomalies, every normal image used once."""

from collections import Counter
from pathlib import Path

import pytest
from helpers.refusals import refusal

from lit_fedad.core.config import compose
from lit_fedad.core.identity import identity
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.data.subset import resplit, split_normals


def samples(product, part, count, defect="good"):
    return [Sample(Path(product, part, defect, f"{i:03}.png"), product, defect) for i in range(count)]


@pytest.fixture
def images():
    nuts = samples("nut", "test", 6), samples("nut", "test", 3, "dent")
    leaves = samples("leaf", "test", 4, "hole"), samples("leaf", "test", 5)
    train = (*samples("nut", "train", 12), *samples("leaf", "train", 7))
    return ImageSet("two", train, tuple(sample for part in (*nuts, *leaves) for sample in part))


def test_none_keeps_the_split(images):
    assert resplit(images, None) is images


def test_sizes_and_anomalies_stay_and_normal_images_change_sides(images):
    drawn = resplit(images, 3)
    for part in ("train", "test"):
        before, after = getattr(images, part), getattr(drawn, part)
        assert [(s.category, s.defect) for s in before] == [(s.category, s.defect) for s in after]
    assert [s for s in drawn.test if s.label] == [s for s in images.test if s.label]
    assert Counter((*drawn.train, *drawn.test)) == Counter((*images.train, *images.test))
    assert set(drawn.train) != set(images.train)
    assert resplit(images, 3) == drawn != resplit(images, 4)


def test_every_image_tests_equally_often(images):
    tested = Counter(s for seed in range(400) for s in resplit(images, seed).test if s.category == "nut")
    assert all(
        90 < tested[s] < 180 for s in (*images.train, *images.test) if s.category == "nut" and not s.label
    )


def test_a_product_does_not_depend_on_the_others(images):
    def nuts(whole):
        return [s for s in (*whole.train, *whole.test) if s.category == "nut"]

    alone = ImageSet(
        "one", *(tuple(s for s in part if s.category == "nut") for part in (images.train, images.test))
    )
    assert nuts(resplit(images, 5)) == nuts(resplit(alone, 5))


@pytest.mark.slow
def test_runs_on_the_sets_own_split_are_the_same_as_before_there_was_another():
    given = ["method=federated_bank", "debug=seconds"]
    plain, redrawn = compose(given), compose([*given, "data.split_seed=0"])
    without = {**plain, "data": {key: value for key, value in plain["data"].items() if key != "split_seed"}}
    assert identity(plain) == identity(without) != identity(redrawn)


def test_a_single_image_cannot_be_divided():
    with refusal("one: a single image cannot be trained on and tested; give at least two"):
        split_normals(ImageSet("one", (Sample(Path("a.png"), "nut"),), ()), 0.8, 0)
