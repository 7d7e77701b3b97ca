"""Classification metrics, and accuracies of predictions that look at no image, against scikit-learn and by hand."""

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.classification import CONSTANTS, ClassificationMetrics, constant_accuracies
from lit_fedad.metrics.federated import summarise
from lit_fedad.report.closing import CONSTANT_LABELS


def drawn(seed: int, images: int = 300, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that favour the right class, of skewed labels without class 2."""
    random = np.random.default_rng(seed)
    labels = random.choice(classes, images, p=[0.5, 0.2, 0.0, 0.2, 0.1])
    logits = random.normal(size=(images, classes)) + 1.5 * np.eye(classes)[labels]
    return torch.from_numpy(logits).float(), torch.from_numpy(labels)


def metrics_of(logits, labels, shares=None) -> ClassificationMetrics:
    metrics = ClassificationMetrics(logits.shape[1])
    metrics.update(logits, labels)
    return metrics if shares is None else metrics.at_shares(shares)


def plain(values) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_values_are_those_of_sklearn():
    logits, labels = drawn(0)
    guesses = logits.argmax(1)
    values = plain(metrics_of(logits, labels).compute())
    assert values["accuracy"] == pytest.approx(accuracy_score(labels, guesses), abs=1e-12)
    assert values["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(labels, guesses), abs=1e-12)
    assert values["own_accuracy"] == pytest.approx(values["accuracy"], abs=1e-12)
    assert values["predicted_classes"] == len(set(guesses.tolist())) == 5


def test_own_accuracy_weighs_classes_as_the_client_holds_them():
    logits, labels = drawn(1)
    guesses = logits.argmax(1)
    shares = torch.tensor([0, 30, 50, 10, 10])
    # Class 2 is not in the test set: its weight goes to the others.
    weights = shares[labels] / labels.bincount(minlength=5)[labels]
    expected = accuracy_score(labels.numpy(), guesses.numpy(), sample_weight=weights.numpy())
    for given in (shares, shares / 100):
        metrics = metrics_of(logits, labels, given)
        assert float(metrics.compute()["own_accuracy"]) == pytest.approx(expected, abs=1e-7)
    assert abs(expected - accuracy_score(labels, guesses)) > 0.01


def test_a_constant_prediction_is_seen():
    labels = torch.tensor([0] * 3 + [1] * 5)
    values = plain(metrics_of(torch.tensor([[0.0, 1.0]]).repeat(8, 1), labels).compute())
    assert values == {
        "accuracy": 0.625,
        "balanced_accuracy": 0.5,
        "own_accuracy": 0.625,
        "predicted_classes": 1.0,
    }


def test_batches_add_up():
    logits, labels = drawn(2)
    metrics = ClassificationMetrics(5)
    for part in torch.arange(300).split(37):
        metrics.update(logits[part], labels[part])
    assert plain(metrics.compute()) == plain(metrics_of(logits, labels).compute())


def test_state_is_three_counts_a_class():
    metrics = metrics_of(*drawn(3))
    assert {name: tuple(state.shape) for name, state in metrics.metric_state.items()} == {
        "correct": (5,),
        "total": (5,),
        "predicted": (5,),
    }
    assert {state.dtype for state in metrics.metric_state.values()} == {torch.int64}


def test_merged_states_are_those_of_all_images():
    parts = [drawn(seed) for seed in range(3)]
    merged = ClassificationMetrics(5)
    for part in parts:
        merged.merge_state(metrics_of(*part))
    together = metrics_of(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    assert plain(merged.compute()) == plain(together.compute())


def test_shares_survive_a_merge_only_where_they_agree():
    shares = torch.tensor([1.0, 2, 3, 2, 2])
    parts = [drawn(seed) for seed in range(2)]
    same = metrics_of(*parts[0], shares)
    same.merge_state(metrics_of(*parts[1], 10 * shares))
    together = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    assert plain(same.compute()) == plain(metrics_of(*together, shares).compute())
    for other in (torch.ones(5), None):
        for first, second in ((shares, other), (other, shares)):
            mixed = metrics_of(*parts[0], first)
            mixed.merge_state(metrics_of(*parts[1], second))
            assert plain(mixed.compute()) == plain(metrics_of(*together).compute())


def test_summary_of_clients_with_their_own_shares():
    shares = {0: torch.tensor([8.0, 1, 0, 1, 0]), 1: torch.tensor([0.0, 1, 0, 1, 8])}
    parts = {client: drawn(client) for client in shares}
    clients = {client: metrics_of(*parts[client], shares[client]) for client in shares}
    before = deepcopy(clients)
    summary = summarise(clients)
    together = metrics_of(*(torch.cat(tensors) for tensors in zip(*parts.values(), strict=True)))
    own = summary["own_accuracy"]
    assert own["pooled"] == float(together.compute()["accuracy"]) == summary["accuracy"]["pooled"]
    assert own["per_client"] == {
        client: float(metrics.compute()["own_accuracy"]) for client, metrics in before.items()
    }
    assert own["mean"] == pytest.approx(sum(own["per_client"].values()) / 2)
    assert summarise(dict(reversed(clients.items()))) == summary
    assert clients[0].class_shares is not None


def test_the_worst_client_is_the_one_that_predicts_fewest_classes():
    logits, labels = drawn(4)
    constant = torch.zeros_like(logits)
    constant[:, 3] = 1
    summary = summarise({0: metrics_of(logits, labels), 1: metrics_of(constant, labels)})
    assert summary["predicted_classes"]["worst"] == 1
    assert summary["predicted_classes"]["pooled"] == 5


def test_undefined_values_are_nan():
    assert all(math.isnan(value) for value in plain(ClassificationMetrics(3).compute_local()).values())
    foreign = metrics_of(torch.eye(3)[[0, 1]], torch.tensor([0, 1]), torch.tensor([0.0, 0, 1]))
    values = plain(foreign.compute())
    assert math.isnan(values["own_accuracy"])
    assert values["accuracy"] == 1


@pytest.mark.parametrize(
    ("logits", "labels"),
    [
        (torch.zeros(2, 4), torch.tensor([0, 1])),
        (torch.zeros(3, 3), torch.tensor([0, 1])),
        (torch.zeros(2, 3), torch.tensor([[0], [1]])),
        (torch.zeros(2, 3), torch.tensor([0, 3])),
        (torch.zeros(2, 3), torch.tensor([-1, 0])),
    ],
)
def test_what_does_not_fit_is_refused(logits, labels):
    with pytest.raises(ValueError, match="must"):
        ClassificationMetrics(3).update(logits, labels)


def test_other_numbers_of_classes_do_not_merge():
    with pytest.raises(ValueError, match="settings"):
        ClassificationMetrics(3).merge_state(ClassificationMetrics(4))


def test_nan_is_refused():
    with pytest.raises(UserError, match="diverged"):
        ClassificationMetrics(2).update(torch.tensor([[0.0, math.nan]]), torch.tensor([0]))


def test_constant_predictions_against_counting_image_by_image():
    counts = torch.tensor([[4, 1, 0], [0, 2, 7], [3, 3, 3]])
    tests = [[0, 0, 1, 2], [1, 2, 2], [0, 1, 1, 2, 2, 2]]  # labels of each client's test images
    weights = torch.stack([torch.tensor(labels).bincount(minlength=3) for labels in tests])
    found = constant_accuracies(counts, weights)
    assert tuple(found) == CONSTANTS == tuple(CONSTANT_LABELS)

    def accuracy(guesses):
        return sum(sum(k == g for k in own) / len(own) for own, g in zip(tests, guesses, strict=True)) / 3

    assert found["client_largest"] == pytest.approx(accuracy([0, 2, 0]))  # of equal classes the first
    assert found["global_largest"] == pytest.approx(accuracy([2, 2, 2]))  # 7, 6 and 10 images in all
    random = [(2 / 4 + 1 / 4) / 2, (1 / 3 + 2 / 3) / 2, 1 / 3]
    assert found["random"] == pytest.approx(sum(random) / 3)


def test_constant_predictions_leave_out_clients_without_training_or_test_images():
    counts, weights = torch.tensor([[5, 1], [0, 0], [1, 5]]), torch.tensor([[1, 1], [1, 1], [0, 0]])
    assert constant_accuracies(counts, weights)["client_largest"] == 0.5
    nobody = constant_accuracies(torch.zeros(2, 3), torch.ones(2, 3))
    assert all(math.isnan(value) for value in nobody.values())


@pytest.mark.parametrize("total", [4.0, 1.0, 0.01])
def test_constant_predictions_of_clients_with_one_training_image_under_weights_of_any_sum(total):
    counts, shares = torch.eye(2, dtype=torch.int64), torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    assert constant_accuracies(counts, shares * total)["client_largest"] == pytest.approx(0.75)


def test_a_class_that_is_predicted_once_is_predicted():
    metrics = ClassificationMetrics(3)
    metrics.update(torch.eye(3)[[0, 0, 2]], torch.tensor([0, 1, 2]))
    assert float(metrics.compute()["predicted_classes"]) == 2
