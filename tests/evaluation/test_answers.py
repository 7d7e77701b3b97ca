"""Answers of sites: counts that add up, and nothing about single images beyond them."""

import math

import numpy as np
import pytest
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.data.stream import Timetable
from lit_fedad.evaluation.anomaly import AnomalyEvaluator, Scored
from lit_fedad.evaluation.anomaly_stream import AnomalyStreamEvaluator, Judged
from lit_fedad.evaluation.calibration import CalibrationQuery
from lit_fedad.evaluation.decisions import DecisionsQuery, EvaluatedImages, Rate
from lit_fedad.evaluation.semantic import SemanticEvaluator, SemanticScores
from lit_fedad.evaluation.state_messages import IMAGE_BINS, MOST_IMAGES
from lit_fedad.federation.message_check import check
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.metrics.semantic import SemanticMetrics


def state(seed, pixel=True, images=40):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 2
    metrics = AnomalyMetrics(pixel=pixel)
    maps = torch.rand(images, 8, 8, generator=draw) + labels[:, None, None] * 0.2
    masks = (torch.rand(images, 8, 8, generator=draw) < 0.3) * labels[:, None, None]
    scores = maps.amax((1, 2)) if seed % 2 else -maps.amin((1, 2))
    metrics.update(scores, labels, *((maps, masks) if pixel else ()))
    return metrics


SERVER = AnomalyEvaluator(None, (), True, None, common=False)


def crossed(question, answer):
    message = question.pack(answer)
    check(message, question.spec(), "a site")
    return question.unpack(message)


@pytest.mark.parametrize("seed", range(4))
def test_a_metric_state_crosses_as_counts(seed):
    own = state(seed)
    found = crossed(SERVER, Scored(own, {})).state
    # Pixels to the last count; images as if every score were the largest of its bin.
    binned = AnomalyMetrics()
    scores, labels = torch.cat(own.image_scores), torch.cat(own.image_labels)
    binned.update(
        IMAGE_BINS.upper(IMAGE_BINS.index(scores)), labels, torch.zeros(40, 8, 8), torch.zeros(40, 8, 8)
    )
    values, whole, of_images = (m.compute_local() for m in (found, own, binned))
    for name in ("p_auroc", "pro", "p_ap", "pro_05"):
        assert values[name] == whole[name]
    for name in ("i_auroc", "aupr", "f1_max"):
        assert values[name] == of_images[name]
        assert values[name] == pytest.approx(float(whole[name]), abs=0.05)


@pytest.mark.parametrize(
    ("bins", "count", "said"),
    [
        (1, MOST_IMAGES + 1, "images.normal.counts"),
        (256, 1 << 56, "images.normal.counts"),  # the sum is 0 in int64
        (2, MOST_IMAGES, f"the client scored more than {MOST_IMAGES} images"),
    ],
)
def test_more_images_than_memory_holds_are_refused(bins, count, said):
    message = SERVER.pack(Scored(state(1), {}))
    message |= {"images.normal.bins": torch.arange(bins), "images.normal.counts": torch.full((bins,), count)}

    def received():
        check(message, SERVER.spec(), "a site")
        SERVER.unpack(message)

    with pytest.raises(UserError, match=said):
        received()


def test_a_message_does_not_say_which_image_scored_what():
    own, other = state(1), AnomalyMetrics()
    scores, labels = torch.cat(own.image_scores), torch.cat(own.image_labels)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    other.image_scores, other.image_labels = [scores[order]], [labels[order]]
    for name in ("normal", "anomalous", "region", "normal_images", "image"):
        setattr(other, name, getattr(own, name))
    one, two = SERVER.pack(Scored(own, {})), SERVER.pack(Scored(other, {}))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert sum(entry.numel() for name, entry in one.items() if name.endswith("counts")) < 2 * 64 * 40
    assert all(entry.dtype == torch.int64 for entry in one.values())


def test_states_of_two_sites_add_up():
    states = {0: crossed(SERVER, Scored(state(1), {})), 1: crossed(SERVER, Scored(state(3), {}))}
    found = SERVER.summarise(states)
    both = AnomalyMetrics()
    both.merge_state(state(1))
    both.merge_state(state(3))
    assert found["p_auroc"]["pooled"] == float(both.compute_local()["p_auroc"])
    # A site without masks leaves the image metrics of all.
    states[2] = crossed(SERVER, Scored(state(5, pixel=False), {}))
    assert set(SERVER.summarise(states)) == {"i_auroc", "aupr", "f1_max"}


def test_infinite_scores_cross():
    own, maps = AnomalyMetrics(), torch.tensor([[[-math.inf, 0.0]], [[1.0, math.inf]]])
    own.update(torch.tensor([-math.inf, math.inf]), torch.tensor([0, 1]), maps, maps > 0.5)
    found = crossed(SERVER, Scored(own, {})).state
    assert float(found.compute_local()["i_auroc"]) == float(found.compute_local()["p_auroc"]) == 1


@pytest.mark.parametrize("bins", [[IMAGE_BINS.count], [5, 5]])
def test_bins_that_are_none_or_come_twice_are_refused(bins):
    message = SERVER.pack(Scored(state(1), {}))
    message |= {
        "images.normal.bins": torch.tensor(bins),
        "images.normal.counts": torch.ones_like(message["images.normal.bins"][: len(bins)]),
    }
    with pytest.raises(UserError, match="images.normal.bins"):
        check(message, SERVER.spec(), "a site")


def test_scores_of_sets_of_anomalies_cross_with_the_decisions_about_them():
    """Every score is the largest one of its bin already, so nothing is rounded."""
    scores = torch.tensor([1.0, 3.0, 3.0, 2.0, 7.0, 1.0, 1.0, math.inf])
    scores = IMAGE_BINS.upper(IMAGE_BINS.index(scores))
    own = SemanticMetrics(("cat", "dog"))
    own.update(scores, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2]))
    question = SemanticEvaluator(own.anomalies, common=False)
    found = crossed(question, SemanticScores(own, {3: 2.5})).of(3).compute_local()
    expected = own.at_threshold(2.5).compute_local()
    assert {name: float(value) for name, value in found.items()} == {
        name: float(value) for name, value in expected.items()
    }
    assert float(found["me_calibrated_cat"]) == pytest.approx(2 / 3)


def test_calibration_crosses_by_place_of_the_product():
    own = {
        "nut": ScoreCounts.of(torch.tensor([1.0, 2.0, 2.0])),
        "bolt": ScoreCounts.of(torch.tensor([5.0, math.inf])),
    }
    question = CalibrationQuery(["bolt", "pin", "nut"], None)
    found = crossed(question, own)
    assert {p: counts.to_json() for p, counts in found.items()} == {
        p: counts.to_json() for p, counts in own.items()
    }
    assert crossed(question, {}) == {}
    message = question.pack(own)
    with pytest.raises(UserError, match="products"):  # there is none of this number
        check({**message, "products": torch.full_like(message["products"], 3)}, question.spec(), "a site")
    message["bins"] = message["bins"].flip(0)
    with pytest.raises(UserError, match="bins must ascend"):
        question.unpack(message)


def test_decisions_are_counted_where_the_images_are():
    rows = [
        ("nut", "good", 0.2),
        ("nut", "good", 0.9),
        ("nut", "hole", 0.8),
        ("pin", "good", 9.0),
        ("pin", "hole", 0.1),
    ]

    labels = torch.tensor([int(defect != "good") for _, defect, _ in rows])
    images = EvaluatedImages(labels, [product for product, *_ in rows], {}, known=True)
    limits = {"nut": 0.5, "bolt": 0.0, "pin": math.inf}
    question = DecisionsQuery(list(limits), limits, images, lambda _: torch.tensor([s for *_, s in rows]))
    found = crossed(question, question(None, 0))
    assert found == {"nut": Rate(2, 1, 1, 0), "pin": Rate(1, 0, 1, 1)}
    for wrong in ([1, 2, 0, 0], [0, 0, 1, 2]):
        with pytest.raises(UserError, match="more decisions about nut are wrong than there are"):
            question.unpack({"rates": torch.tensor([wrong, *[[0, 0, 0, 0]] * 3])})
    with pytest.raises(UserError, match="'rates' with values from -2"):  # fewer than no images
        check({"rates": torch.tensor([[-1, -2, 0, 0], *[[0, 0, 0, 0]] * 3])}, question.spec(), "a site")


def test_anomalies_of_no_product_are_counted_apart():
    labels, limits = torch.tensor([0, 0, 1, 1, 1]), {"cat": 2.0, "dog": 2.0}
    images = EvaluatedImages(labels, ["cat", "dog", None, None, None], {}, known=False)
    question = DecisionsQuery(list(limits), limits, images, lambda _: torch.tensor([1.0, 3.0, 1.0, 5.0, 1.5]))
    found = crossed(question, question(None, 0))
    assert found == {"cat": Rate(1, 0), "dog": Rate(1, 1), None: Rate(0, 0, 3, 2)}


def scored(scores, labels, maps=None, masks=None):
    metrics = AnomalyMetrics(pixel=maps is not None)
    pixels = {} if maps is None else {"anomaly_maps": maps, "masks": masks}
    metrics.update(torch.tensor(scores), torch.tensor(labels), **pixels)
    return metrics


def stages_crossed(states, stages):
    timetable = Timetable([stages], stages)
    question = AnomalyStreamEvaluator({}, timetable, [np.ones((stages, 1))], common=False)
    return crossed(question, Judged(states[0], [], {}, states)).stages


def test_each_stage_arrives_as_it_was_and_stages_to_come_are_empty():
    draw = torch.Generator().manual_seed(0)
    maps, masks = torch.rand(2, 8, 8, generator=draw), torch.zeros(2, 8, 8, dtype=torch.bool)
    masks[1, :3, :3] = True
    first, second = scored([0.5, 2.0], [0, 1], maps, masks), scored([3.0, 1.0], [0, 1], maps * 2, masks)
    *found, third = stages_crossed([first, second], stages=3)
    for own, there in zip(found, (first, second), strict=True):
        scores = torch.cat(there.image_scores)
        expected = IMAGE_BINS.upper(IMAGE_BINS.index(scores).long()).sort().values
        assert torch.equal(torch.cat(own.image_scores).sort().values, expected)
        assert float(own.compute_local()["i_auroc"]) == float(there.compute_local()["i_auroc"])
        for name in ("normal", "anomalous", "region", "normal_images", "image"):
            assert torch.equal(getattr(own, name), getattr(there, name))
    assert not len(torch.cat(third.image_scores))


def test_without_masks_only_image_scores_cross():
    (one, two) = stages_crossed([scored([1.0, 4.0], [0, 1]), scored([4.0, 1.0], [0, 1])], stages=2)
    assert not one.pixel
    assert [float(own.compute_local()["i_auroc"]) for own in (one, two)] == [1.0, 0.0]
