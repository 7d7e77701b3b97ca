"""Calibration scores: each normal image is scored once, by a model that has not seen it."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from lightning.fabric import Fabric

from lit_fedad.contracts import LeaveOut, Prediction
from lit_fedad.core.errors import UserError
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.evaluation.calibration import CalibrationScores, calibrate, with_calibration
from lit_fedad.metrics.conformal import ScoreCounts

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
PRODUCTS = ["nut", "nut", "leaf", "nut", "leaf", "leaf", "nut"]
IMAGES = ImageSet("drawn", tuple(Sample(Path(f"{n}.png"), product) for n, product in enumerate(PRODUCTS)), ())


class Module:
    """Batches of two values."""

    def normal_loader(self, indices):
        chunks = [indices[start : start + 2] for start in range(0, len(indices), 2)]
        return [{"image": VALUES[list(chunk)], "index": torch.tensor(list(chunk))} for chunk in chunks]


class Sums(LeaveOut):
    """Scores a value by its distance to the sum of all values, from which values can be taken."""

    def __init__(self, refuses=(), held=(True,)):
        self.task = SimpleNamespace(local_buffers=("total",), total=VALUES.sum())
        self.refuses, self.held = set(refuses), held

    def holds(self, client, stage):
        assert client is self
        return self.held[stage]

    def leave_out(self, client, loader):
        assert client is self
        for batch in loader:
            if self.refuses & set(batch["index"].tolist()):
                raise UserError("no vector remains")
            self.task.total = self.task.total - batch["image"].sum()

    def predict_step(self, batch):
        return Prediction((self.task.total - batch["image"]).abs())


def scores_of(partition, client, folds=5):
    fabric = Fabric(accelerator="cpu", devices=1)
    return CalibrationScores(IMAGES, partition, Module(), fabric, folds, leave_out=client)(client, 0)


def counts(values):
    return ScoreCounts.of(torch.tensor(values)).to_json()


@pytest.mark.parametrize(
    ("share", "given", "held"),
    [
        (None, {}, 4),
        (None, {"shared": False}, 9),
        (None, {"sums": True}, 0),
        (None, {"sums": True, "epsilon": 1.0}, 4),
        (None, {"kind": "classification"}, 0),
        (0.2, {"shared": False}, 4),
        (0.5, {"sums": True}, 10),
        (0.0, {"shared": False}, 0),
    ],
)
def test_so_many_of_twenty_images_are_held_out(share, given, held):
    given = {"kind": "anomaly", "shared": True, "sums": False, "epsilon": None} | given
    client = SimpleNamespace(
        task=SimpleNamespace(kind=given["kind"]), predictors=SimpleNamespace(shared=given["shared"])
    )
    method = SimpleNamespace(
        client=client, exchanges=SimpleNamespace(leave_out=Sums() if given["sums"] else None)
    )
    config = {
        "seed": 0,
        "calibration": {"share": share, "group": None},
        "federation": {"privacy": {"epsilon": given["epsilon"]}},
    }
    images = ImageSet("drawn", tuple(Sample(Path(f"{n}.png"), "nut") for n in range(20)), ())
    partition = with_calibration(config, images, Partition((tuple(range(20)),)), method)
    assert sum(map(len, partition.calibration)) == held
    assert partition.sizes == (20 - held,)


def test_with_a_fold_an_image_the_model_is_that_of_all_others():
    found = scores_of(Partition((tuple(range(7)),)), Sums(), folds=100)
    alone = [abs(float(VALUES.sum() - 2 * value)) for value in VALUES]
    assert {product: part.to_json() for product, part in found.items()} == {
        product: counts([alone[n] for n in range(7) if PRODUCTS[n] == product]) for product in ("nut", "leaf")
    }


def test_images_of_a_group_are_left_out_together():
    owner = [0, 0, 1, 1, 1, 2, 0]
    samples = tuple(Sample(Path(f"patient{one}/{n}.png"), "nut") for n, one in enumerate(owner))
    images, partition = ImageSet("drawn", samples, ()), Partition((tuple(range(7)),))
    fabric = Fabric(accelerator="cpu", devices=1)
    client = Sums()
    scores = CalibrationScores(
        images, partition, Module(), fabric, 100, group=r"patient\d+", leave_out=client
    )
    groups = {one: sum(float(VALUES[n]) for n in range(7) if owner[n] == one) for one in owner}
    alone = [abs(float(VALUES.sum()) - groups[owner[n]] - float(VALUES[n])) for n in range(7)]
    assert scores(client, 0)["nut"].to_json() == counts(alone)


def test_every_image_is_scored_once_and_the_model_is_whole_again():
    client = Sums()
    found = scores_of(Partition((tuple(range(7)),)), client, folds=3)
    assert sum(part.total for part in found.values()) == 7
    assert client.task.total == VALUES.sum()


@pytest.mark.parametrize(
    "partition", [Partition((tuple(range(7)),)), Partition(((0, 1),), calibration=((2, 3, 4),))]
)
def test_an_image_whose_score_is_no_number_does_not_lower_the_threshold_unseen(partition):
    class Diverged(Sums):
        def predict_step(self, batch):
            return Prediction(torch.where(batch["image"] == 8, torch.nan, batch["image"]))

    with refusal("anomaly scores hold NaN: the model has diverged"):
        scores_of(partition, Diverged())


def test_images_without_which_there_is_no_model_are_not_scored():
    client = Sums(refuses={0})
    found = scores_of(Partition((tuple(range(7)),)), client, folds=100)
    assert found["nut"].total == PRODUCTS.count("nut") - 1
    assert client.task.total == VALUES.sum()


def test_images_of_a_stage_that_sums_do_not_hold_are_scored_by_the_model_as_it_is():
    """Those of a stage that they hold in part, or of a group that they hold, by none: no model is without these."""
    client, stages = Sums(held=(True, False, None)), Partition.in_stages([[[0, 1], [2, 3, 4], [5, 6]]])
    whole = float(VALUES.sum())
    alone = [whole - 2 * float(VALUES[n]) for n in (0, 1)]
    found = scores_of(stages, client, folds=100)
    assert found["nut"].to_json() == counts([*alone, whole - 8])
    assert found["leaf"].to_json() == counts([whole - 4, whole - 16])
    fabric = Fabric(accelerator="cpu", devices=1)
    grouped = CalibrationScores(IMAGES, stages, Module(), fabric, 100, leave_out=client)
    grouped.groups = ["both", "one", "both", *"3456"]
    assert grouped(client, 0)["leaf"].to_json() == counts([whole - 16])


@pytest.mark.parametrize(("held", "total"), [(False, 7), (None, 0)])
def test_a_client_that_took_part_in_no_sum_is_scored_by_the_model_as_it_is(held, total):
    found = scores_of(Partition((tuple(range(7)),)), Sums(held=(held,)))
    assert sum(part.total for part in found.values()) == total


def test_images_that_were_held_out_are_scored_by_the_model_as_it_is():
    partition = Partition((tuple(range(5)),), calibration=((5, 6),))
    found = scores_of(partition, Sums())
    whole = float(VALUES.sum())
    assert found["leaf"].to_json() == counts([whole - 32])
    assert found["nut"].to_json() == counts([whole - 64])


@pytest.mark.parametrize("calibration", [(), ((),)])
def test_a_client_that_holds_none_out_has_no_scores(calibration):
    partition = Partition((tuple(range(7)),), calibration=calibration)
    fabric = Fabric(accelerator="cpu", devices=1)
    assert CalibrationScores(IMAGES, partition, Module(), fabric)(Sums(), 0) == {}


def test_folds_are_the_seeds():
    fabric = Fabric(accelerator="cpu", devices=1)
    found = [
        CalibrationScores(IMAGES, Partition((tuple(range(7)),)), Module(), fabric, 2, seed, leave_out=client)(
            client, 0
        )
        for seed in (0, 0, 1)
        for client in [Sums()]
    ]
    values = [np.concatenate([part.bins.numpy() for part in one.values()]) for one in found]
    assert np.array_equal(values[0], values[1])
    assert not np.array_equal(values[0], values[2])


@pytest.mark.parametrize(
    ("distance", "scores", "warned"),
    [(1e-6, 200, True), (1e-6, 4, False), (0.5, 200, False)],
)
def test_scores_that_no_decision_could_tell_apart_are_warned_of(distance, scores, warned):
    """Decisions know scores by bins a thousandth of a score wide: nothing would be anomalous, without a word."""
    held = [-4.9 - distance * torch.rand(scores, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    answers = {client: {"nut": ScoreCounts.of(values)} for client, values in enumerate(held)}
    federation = SimpleNamespace(
        ask=lambda *_, **__: answers,
        exchanges=SimpleNamespace(leave_out=None),
        client=SimpleNamespace(predictors=SimpleNamespace(shared=True)),
    )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert calibrate(federation, 1, None).clients == answers
    assert [f"{2 * scores} calibration scores fall into" in str(one.message) for one in seen] == [
        True
    ] * warned
