"""Accuracies of constant predictions on a set for classification: as the evaluator judges a model that makes them."""

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Prediction
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.accuracy import AccuracyEvaluator
from lit_fedad.federation.round_report import RoundReport

LABELS = [0, 0, 0, 0, 1, 2, 2]
COUNTS = np.array([[1, 5, 2], [4, 0, 3]])


class Constant:
    """Gives one class to every image."""

    def __init__(self, label):
        self.label = label

    def predict_step(self, batch):
        logits = torch.nn.functional.one_hot(torch.full_like(batch["label"], self.label), 3).float()
        return Prediction(-logits.amax(1), logits=logits)


def test_they_are_what_a_model_of_one_class_has():
    loader = DataLoader([{"label": label} for label in LABELS], batch_size=3)
    evaluator = AccuracyEvaluator(loader, torch.from_numpy(COUNTS), Fabric(accelerator="cpu", devices=1))
    found = evaluator.constants(RoundReport(1, "train", [0, 1]))
    for name, guesses in (("client_largest", (1, 0)), ("global_largest", (0, 0))):  # of 5, 5 and 5 the first
        judged = evaluator.summarise({c: evaluator.score(Constant(k), c) for c, k in enumerate(guesses)})
        assert found[name].keys() == judged.keys() - {"predicted_classes"}
        for metric, value in found[name].items():
            assert value == pytest.approx(judged[metric]["mean"]), (name, metric)
    assert found["random"]["balanced_accuracy"] == pytest.approx(1 / 3)


def test_they_are_judged_by_the_test_images_of_each_site():
    """The first site has no test images of its largest class, so that class has no weight there."""
    tested = torch.tensor([[4, 0, 2], [4, 1, 2]])
    fabric = Fabric(accelerator="cpu", devices=1)
    evaluator = AccuracyEvaluator(None, torch.from_numpy(COUNTS), fabric, tested, common=False)
    found = evaluator.constants(RoundReport(1, "train", [0, 1]))
    expected = {
        "client_largest": ((0 + 4 / 7) / 2, (0 + 4 / 7) / 2, (0 + 1 / 3) / 2),
        "global_largest": ((4 / 6 + 4 / 7) / 2, (1 / 3 + 4 / 7) / 2, (1 / 2 + 1 / 3) / 2),
    }
    for name, values in expected.items():
        assert [*found[name].values()] == pytest.approx(values), name


def test_a_site_whose_every_image_is_right_is_believed():
    evaluator = AccuracyEvaluator(None, torch.from_numpy(COUNTS), Fabric(accelerator="cpu", devices=1))
    there = torch.tensor([4, 0, 2])
    answer = evaluator.unpack({"correct": there, "total": there, "predicted": there})
    assert float(answer.compute_local()["accuracy"]) == 1


@pytest.mark.parametrize(
    ("right", "there", "called"),
    [
        ((3, 0, 0), (2, 2, 0), (4, 0, 0)),  # more right than there are
        ((2, 2, 0), (2, 2, 0), (3, 1, 0)),  # more right than were called so
        ((0, 0, 0), (2, 2, 0), (3, 2, 0)),  # more guesses than images
    ],
)
def test_a_site_whose_counts_do_not_add_up_is_refused(right, there, called):
    evaluator = AccuracyEvaluator(None, torch.from_numpy(COUNTS), Fabric(accelerator="cpu", devices=1))
    answer = zip(("correct", "total", "predicted"), map(torch.tensor, (right, there, called)), strict=True)
    with pytest.raises(UserError, match="counted more images as right"):
        evaluator.unpack(dict(answer))
