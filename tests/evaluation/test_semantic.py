"""How clients are judged on whole sets of anomalous images: against scikit-learn and NumPy."""

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from sklearn.metrics import average_precision_score, roc_auc_score

from lit_fedad.contracts import Client as AnyClient
from lit_fedad.contracts import Prediction, Predictors, Task
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.evaluation.predict import ImageScorer, image_scores
from lit_fedad.evaluation.semantic import SemanticEvaluator, SemanticTest, semantic_names
from lit_fedad.metrics.conformal import ScoreCounts

NORMAL, SETS = 2, ("cats", "dogs")
LABELS = np.array([0, 1, 1, 0, 1, 0, 2, 2, 2, 3, 3, 3, 3])  # of the test images: two classes and two sets
CLIENTS = ([0, 3, 4, 7], [1, 2, 5, 6, 8, 9], [])


def pictures(number, seed):
    return torch.randint(
        256, (number, 3, 2, 2), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )


class Mean(Task):
    """Scores an image by its mean, or its mean's distance to the client's own number."""

    def __init__(self, number):
        super().__init__()
        self.register_buffer("number", torch.tensor(number))

    def forward(self, batch):
        return batch["image"].mean((2, 3))

    def predict(self, features, batch):
        return Prediction((features.mean(1) - self.number / 9).abs())


class Client(AnyClient):
    predictors = Predictors(shared=True, server_shared=True)

    def __init__(self, number=0):
        super().__init__(Mean(number))
        self.number = number

    def by_hand(self, images):
        return (images.float().div(255).mean((1, 2, 3)) - self.number / 9).abs().numpy()


@pytest.fixture
def module():
    """Ten training images of three clients, of which one holds none, and the test images."""
    plain = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    train = LabelledDataset(
        pictures(10, 0), torch.zeros(10, dtype=torch.int64), normal_classes=NORMAL, **plain
    )
    test = LabelledDataset(pictures(len(LABELS), 1), torch.from_numpy(LABELS), normal_classes=NORMAL, **plain)
    return FederatedDataModule(train, test, CLIENTS, batch_size=3, eval_batch_size=4)


@pytest.fixture
def evaluator(module):
    def make(anomalies=SETS, alpha=0.25, shown=()):
        fabric = Fabric(accelerator="cpu", devices=1)
        scorer = ImageScorer(module.test_dataloader(), fabric)
        labels, counted = torch.from_numpy(LABELS), training_scores(module, fabric)
        labels = labels.clamp(max=NORMAL + len(anomalies) - 1)
        holders = [client for client, size in module.sizes.items() if size]
        shown = torch.tensor(shown, dtype=torch.int64)
        test = SemanticTest(scorer, labels, NORMAL, counted, alpha, shown)
        return SemanticEvaluator(anomalies, test, holders)

    return make


def training_scores(module, fabric):
    """Calibration on the training images: what holds images out is tested where it is built."""

    def counted(client, number):
        loader = module.client_loader(number, torch.Generator(), shuffle=False)
        return {"all": ScoreCounts.of(image_scores(client, loader, fabric))}

    return counted


def values_by_hand(client, holder, alpha=0.25):
    """AUROC, AUPR and the errors at the holder's threshold against each set, normal images weighed to be as many."""
    scores, values = client.by_hand(pictures(len(LABELS), 1)), {}
    threshold = threshold_by_hand(client, holder, alpha)
    for number, name in enumerate(SETS, NORMAL):
        chosen = np.isin(LABELS, (0, 1, number))
        truth, own = LABELS[chosen] == number, scores[chosen]
        weight = np.where(truth, 1, truth.sum() / (~truth).sum())
        called = own > threshold
        values[f"auroc_{name}"] = roc_auc_score(truth, own)
        values[f"aupr_{name}"] = average_precision_score(truth, own, sample_weight=weight)
        values[f"me_calibrated_{name}"] = np.mean(~called[truth])
        values[f"fe_calibrated_{name}"] = (
            weight[called & ~truth].sum() / weight[called].sum() if called.any() else np.nan
        )
    for name in ("auroc", "aupr", "me_calibrated", "fe_calibrated"):
        values[name] = np.mean([values[f"{name}_{of}"] for of in SETS])
    return values


def threshold_by_hand(client, holder, alpha):
    known = np.sort(client.by_hand(pictures(10, 0))[CLIENTS[holder]])
    rank = int(np.ceil((len(known) + 1) * (1 - alpha)))
    return np.inf if rank > len(known) else known[rank - 1] * (1 + 2**-10)  # the end of its bin


@pytest.mark.parametrize("alpha", [0.05, 0.25, 0.5])
def test_clients_that_differ(evaluator, alpha):
    own = [Client(number) for number in range(2)]
    for client in own:
        client.predictors = Predictors()
    judge = evaluator(alpha=alpha)
    states = {number: judge.score(client, number) for number, client in enumerate(own)}
    found = judge.summarise(states)
    for number, client in enumerate(own):
        for name, value in values_by_hand(client, number, alpha).items():
            assert found[name]["per_client"][number] == pytest.approx(value, abs=1e-9, nan_ok=True), name
    for name in ("auroc", "aupr", "me_calibrated"):
        values = [values_by_hand(client, number, alpha)[name] for number, client in enumerate(own)]
        assert found[name]["mean"] == pytest.approx(np.mean(values))
        assert found[name]["worst"] == pytest.approx((max if name.startswith("me") else min)(values))


def test_clients_that_predict_alike_are_scored_once_and_judged_at_their_own_thresholds(evaluator):
    """As if each had been scored by itself; a client without images is none."""
    judge, client = evaluator(alpha=0.7), Client()
    state = judge.score(client, 0)
    assert list(state.thresholds) == [0, 1]
    found = judge.summarise(judge.spread(state, [0, 1]))
    for number in (0, 1):
        for name, value in values_by_hand(client, number, 0.7).items():
            assert found[name]["per_client"][number] == pytest.approx(value, abs=1e-9, nan_ok=True), name
    assert found["me_calibrated"]["per_client"][0] != found["me_calibrated"]["per_client"][1]
    assert found["me"]["per_client"][0] == found["me"]["per_client"][1]
    # Asked one by one, as by the evaluate command, they say the same.
    again = judge.summarise({number: judge.score(client, number) for number in (0, 1)})
    np.testing.assert_equal(again, found)


def test_metrics_are_named_in_order_and_all_of_them_are_given(evaluator):
    judge = evaluator()
    found = judge.summarise(judge.spread(judge.score(Client(), 0), [0, 1]))
    assert judge.metrics[:7] == (*semantic_names(("cats",)), "auroc_cats")
    assert set(judge.metrics) == set(found)


def test_a_single_set_has_no_metrics_of_its_own(evaluator):
    judge = evaluator(("cats",))
    found = judge.summarise(judge.spread(judge.score(Client(), 0), [0, 1]))
    assert judge.metrics == semantic_names(("cats",))
    assert set(found) == set(judge.metrics)
    truth = LABELS >= NORMAL
    assert found["auroc"]["mean"] == pytest.approx(roc_auc_score(truth, Client().by_hand(pictures(13, 1))))


def test_the_threshold_keeps_its_promise_by_the_client_s_own_images(evaluator):
    judge, client = evaluator(alpha=0.4), Client(3)
    for number in (0, 1):
        by_hand = threshold_by_hand(client, number, 0.4)
        assert judge.threshold(client, number) == pytest.approx(by_hand, rel=2**-9)
    assert evaluator(alpha=0.01).threshold(client, 0) == np.inf


def test_features_of_the_first_client_are_kept_in_the_order_of_the_images_that_are_shown(evaluator):
    judge, images = evaluator(shown=[7, 2, 9]), pictures(len(LABELS), 1)
    kept = judge.score(Client(), 0).predicted.features
    torch.testing.assert_close(kept, images[[7, 2, 9]].float().div(255).mean((2, 3)))
    client = Client(1)
    client.predictors = Predictors()
    assert judge.score(client, 1).predicted.features is None


def test_scoring_draws_no_random_numbers(evaluator):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    evaluator().score(Client(), 0)
    assert torch.equal(torch.get_rng_state(), before)
