"""Images that many clients of one network score are embedded once, and few of their maps are kept."""

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Prediction, Predictors, Task
from lit_fedad.evaluation import predict
from lit_fedad.evaluation.predict import Cases, ImageScorer, Predicted, image_scores, predict_batch
from lit_fedad.report.heatmaps import pick_cases

FABRIC = Fabric(accelerator="cpu", devices=1)
IMAGES = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))


class Nearest(Task):
    """Scores a vector by its distance to the client's own; counts the batches that its network has seen."""

    scoring_buffers = ("bank",)

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(3, 2)
        self.register_buffer("bank", torch.zeros(2))
        self.seen = 0

    def forward(self, batch):
        self.seen += 1
        return self.network(batch["image"])

    def predict(self, features, batch):
        return Prediction((features - self.bank).norm(dim=1))


class Alike(Client):
    predictors = Predictors(shared=True)


@pytest.fixture
def task():
    torch.manual_seed(0)
    return Nearest()


@pytest.fixture
def loader():
    return DataLoader([{"image": image} for image in IMAGES], batch_size=3)


@pytest.fixture
def scorer(loader):
    return ImageScorer(loader, FABRIC)


def score_all(task, score, banks=(0.0, 1.0, 2.0), kind=Client):
    found = []
    for bank in banks:
        task.bank = torch.full((2,), bank)
        found.append(score(kind(task)))
    return torch.stack(found)


def test_clients_that_differ_in_their_banks_share_one_pass(task, loader, scorer):
    alone = score_all(task, lambda client: image_scores(client, loader, FABRIC))
    assert task.seen == 9
    assert torch.equal(score_all(task, scorer), alone)
    assert task.seen == 9 + 3
    assert not torch.allclose(alone[0], alone[1])


def test_other_weights_are_seen_anew(task, loader, scorer):
    score_all(task, scorer)
    with torch.no_grad():
        task.network.bias[0] += 1
    assert torch.equal(
        score_all(task, scorer), score_all(task, lambda client: image_scores(client, loader, FABRIC))
    )


def test_a_bank_that_is_not_declared_counts_as_weights(task, loader, scorer, monkeypatch):
    monkeypatch.setattr(Nearest, "scoring_buffers", ())
    alone = score_all(task, lambda client: image_scores(client, loader, FABRIC))
    assert torch.equal(score_all(task, scorer), alone)
    assert task.seen == 9 + 9


def test_a_shift_of_features_by_a_hook_is_seen(task, loader, scorer):
    """As of a method with a personal bias, which is among the task's weights."""
    task.offset = nn.Parameter(torch.zeros(2))
    task.register_forward_hook(lambda task, _, features: features + task.offset)
    before = score_all(task, scorer, banks=[0.0])
    task.offset.data += 1
    after = score_all(task, scorer, banks=[0.0])
    assert torch.equal(after[0], image_scores(Client(task), loader, FABRIC))
    assert not torch.allclose(before, after)


def test_what_does_not_fit_is_not_kept(task, loader, scorer, monkeypatch):
    monkeypatch.setattr(predict, "_MAX_BYTES", 7 * 2 * 4 - 1)
    alone = score_all(task, lambda client: image_scores(client, loader, FABRIC))
    assert torch.equal(score_all(task, scorer), alone)
    assert task.seen == 9 + 9
    assert not scorer.embeddings


def test_of_one_model_for_all_nothing_is_kept(task, scorer):
    score_all(task, scorer, kind=Alike)
    assert not scorer.embeddings


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        (Prediction(torch.ones(3, 1)), r"image_score of shape \[3, 1\]; give \[B\]"),
        (Prediction(torch.ones(3), torch.ones(3, 1, 4, 4)), r"anomaly_map .* give \[B, H, W\]"),
        (Prediction(torch.ones(1)), r"image_score of shape \[1\]; give \[B\], of 3 images"),
        (Prediction(torch.ones(3), torch.ones(1, 4, 4)), r"anomaly_map of shape \[1, 4, 4\]"),
        (Prediction([1.0, 1.0, 1.0]), r"image_score that is a list; give a tensor \[B\]"),
    ],
)
def test_a_prediction_of_another_form_is_refused_with_the_task_named(task, prediction, said):
    """Metrics take maps [B, 1, H, W] too: only the pictures after the last round would have failed."""
    task.predict = lambda features, batch: prediction
    with refusal(f"task Nearest predicts an {said}"):
        predict_batch(Client(task), {"image": IMAGES[:3]}, FABRIC)


@pytest.mark.parametrize("given", [torch.ones(3), (torch.ones(3), None)], ids=["Tensor", "tuple"])
def test_what_is_no_prediction_is_refused(given, request):
    task = Nearest()
    task.predict = lambda features, batch: given
    with refusal(f"task Nearest predicts a {request.node.callspec.id}; give a Prediction"):
        predict_batch(Client(task), {"image": IMAGES[:3]}, FABRIC)


def test_the_maps_of_all_images_that_are_drawn_are_kept_and_few_others():
    rng = np.random.default_rng(0)
    for _ in range(100):
        number, each = rng.integers(1, 30), int(rng.integers(1, 6))
        labels = rng.integers(0, 2, number).tolist()
        scores = torch.from_numpy(rng.integers(0, 4, number)).float()  # many are equal
        cases, predicted = Cases(labels, each, {0: 1}), Predicted.empty(number)
        for index in torch.arange(number).split(4):
            predicted.scores[index] = scores[index]
            cases.add(predicted, index, index[:, None, None].float())
        assert predicted.maps.keys() >= set(pick_cases(scores, labels, each, each))
        assert len(predicted.maps) <= 4 * each
        assert {index: int(kept) for index, kept in predicted.maps.items()} == {i: i for i in predicted.maps}
