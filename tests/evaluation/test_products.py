"""Metrics of single products: against scikit-learn, and the same however the test images are split."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from sklearn.metrics import average_precision_score, roc_auc_score

from lit_fedad.contracts import Context, Prediction, Predictors
from lit_fedad.evaluation.anomaly import AnomalyEvaluator
from lit_fedad.evaluation.predict import Cases, Predicted
from lit_fedad.metrics.base import union
from lit_fedad.metrics.federated import plain_values

NUMBER, SIDE = 60, 40
RANDOM = np.random.default_rng(0)
PRODUCTS = [str(name) for name in RANDOM.choice(["nut", "bolt", "cap"], NUMBER)]
LABELS = RANDOM.integers(0, 2, NUMBER)
LABELS[[name == "cap" for name in PRODUCTS]] = 0  # of caps there is no anomalous image
MASKS = (RANDOM.random((NUMBER, SIDE, SIDE)) < 0.2) * LABELS[:, None, None]
MAPS = 20 + RANDOM.normal(size=(2, NUMBER, SIDE, SIDE)) + MASKS  # of two clients
MAPS[:, [name == "bolt" for name in PRODUCTS]] += 2  # each product has a scale of its own
FABRIC = Fabric(accelerator="cpu", devices=1)


class Client:
    """Predicts the maps of one client, and their maximum."""

    def __init__(self, number, round=1, **predictors):
        self.maps = torch.from_numpy(MAPS[number % 2]).float()
        self.context, self.predictors = Context(0, round + 1, number), Predictors(**predictors)

    def predict_step(self, batch):
        maps = self.maps[batch["index"]]
        return Prediction(maps.amax((1, 2)), maps)


def evaluator(indices=range(NUMBER), size=7):
    batches = [
        {"index": part, "label": torch.from_numpy(LABELS)[part], "mask": torch.from_numpy(MASKS)[part]}
        for part in torch.tensor(list(indices)).split(size)
    ]
    return AnomalyEvaluator(batches, PRODUCTS, True, FABRIC)


def by_hand(number, product):
    own = np.array([name == product for name in PRODUCTS])
    maps, masks, labels = MAPS[number][own].astype(np.float32), MASKS[own], LABELS[own]
    return {
        "i_auroc": roc_auc_score(labels, maps.max((1, 2))),
        "aupr": average_precision_score(labels, maps.max((1, 2))),
        "p_auroc": roc_auc_score(masks.ravel(), maps.ravel()),
    }


@pytest.fixture(scope="module")
def found():
    judge = evaluator()
    return judge.summarise({number: judge.score(Client(number), number) for number in (0, 1)})


@pytest.mark.slow
def test_each_product_is_scikit_learns_and_they_count_alike(found):
    for name, accuracy in (("i_auroc", 1e-12), ("aupr", 1e-12), ("p_auroc", 2e-3)):
        values = {p: np.mean([by_hand(c, p)[name] for c in (0, 1)]) for p in ("nut", "bolt")}
        own = found[name]["per_product"]
        assert {p: own[p] for p in values} == pytest.approx(values, abs=accuracy)
        assert found[name]["product_mean"] == pytest.approx(np.mean(list(values.values())), abs=accuracy)
        assert found[name]["product_mean"] != pytest.approx(found[name]["mean"], abs=1e-4)


def test_a_product_without_anomalous_images_has_no_value_and_no_part_in_the_mean(found):
    for values in found.values():
        assert math.isnan(values["per_product"]["cap"])
    assert not math.isnan(found["pro"]["product_mean"])
    # Of fewer than 100,000 pixels of normal images no product has this one.
    assert math.isnan(found["aupimo"]["product_mean"])


@pytest.mark.parametrize("seed", range(3))
def test_any_split_of_the_images_gives_the_same(seed):
    """As clients or processes that hold parts of them would find, in whatever order they are merged."""
    whole = evaluator().score(Client(0), 0)
    random = np.random.default_rng(seed)
    parts = [
        part for part in np.split(random.permutation(NUMBER), sorted(random.integers(0, 60, 4))) if len(part)
    ]
    predicted = Predicted.empty(NUMBER)
    split = [evaluator(part, int(random.integers(1, 9))).states(Client(0), predicted) for part in parts]
    random.shuffle(split)
    for product, values in whole.products.items():
        merged = union(states[product] for states in split if product in states)
        assert plain_values(merged) == pytest.approx(values, rel=0, abs=0, nan_ok=True)
    everything = union(state for states in split for state in states.values())
    assert plain_values(everything) == pytest.approx(plain_values(whole.state), rel=0, abs=0, nan_ok=True)
    assert torch.equal(predicted.scores, whole.predicted.scores)


def test_clients_that_predict_alike_are_scored_once():
    judge = evaluator()
    found = judge.summarise(judge.spread(judge.score(Client(1), 1), [0, 1, 2]))
    for name in ("i_auroc", "p_auroc"):
        assert found[name]["per_product"]["nut"] == pytest.approx(by_hand(1, "nut")[name], abs=2e-3)
        assert found[name]["per_client"].keys() == {0, 1, 2}


@pytest.mark.parametrize(
    ("clients", "round", "predictors", "drawn"),
    [
        ([0, 1, 2, 3], 1, {}, [1]),  # of two with equally many the first
        ([0, 2], 1, {}, [2]),  # the one with most images does not take part
        ([0, 1], 1, {"shared": True}, [0, 1]),
        ([0, 1], 0, {"shared_at_first": True}, [0, 1]),
        ([0, 1], 1, {"shared_at_first": True}, [1]),
    ],
)
def test_maps_are_kept_of_the_client_with_most_images_or_of_the_model_of_all(
    clients, round, predictors, drawn
):
    judge = evaluator(range(8))
    judge.cases = Cases(LABELS.tolist(), 1, {0: 2, 1: 9, 2: 5, 3: 9})

    def ask(round, question, asked):
        return {number: question(Client(number, round, **predictors), number) for number in asked}

    live = Client(0, round, **predictors)
    federation = SimpleNamespace(clients=clients, client=live, fabric=FABRIC, ask=ask)
    kept = judge.evaluate(federation, round).predictions
    assert list(kept) == clients
    assert [number for number, predicted in kept.items() if predicted.maps] == drawn
