"""Accuracy over the stages of a stream: by hand, against drawn test sets, merged, and summarised over clients."""

import math
import pickle

import numpy as np
import pytest
import torch

from lit_fedad.metrics.continual import ContinualAccuracy, forgetting, summarise_clients

# One class a stage, so that a stage's accuracy is the recall of its class: easy to work by hand.
ONE_CLASS_A_STAGE = torch.eye(3)


def plain(values) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def with_recalls(metrics: ContinualAccuracy, stage: int, recalls: dict[int, int]) -> ContinualAccuracy:
    """Take in ten images of each class named, of which that many are correct."""
    classes = metrics.weights.shape[1]
    for label, correct in recalls.items():
        guesses = [label] * correct + [(label + 1) % classes] * (10 - correct)
        metrics.update(torch.eye(classes)[guesses], torch.full((10,), label), stage)
    return metrics


def drawn(seed: int, images: int = 200, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), random.integers(classes, size=images - classes)])
    logits = (
        random.normal(size=(images, classes)) + (1 + random.normal(size=classes)) * np.eye(classes)[labels]
    )
    return torch.from_numpy(logits).float(), torch.from_numpy(labels)


def history(weights: torch.Tensor, known_only: bool = False) -> ContinualAccuracy:
    metrics = ContinualAccuracy(weights, known_only)
    for stage in range(len(weights)):
        metrics.update(*drawn(stage), stage)
    return metrics


def test_three_stages_by_hand():
    metrics = ContinualAccuracy(ONE_CLASS_A_STAGE)
    with_recalls(metrics, 0, {0: 8, 1: 0, 2: 0})
    with_recalls(metrics, 1, {0: 9, 1: 6, 2: 1})
    with_recalls(metrics, 2, {0: 3, 1: 7, 2: 5})
    values = plain(metrics.compute())
    assert values["accuracy"] == pytest.approx((0.3 + 0.7 + 0.5) / 3)
    assert values["incremental_accuracy"] == pytest.approx((0.8 + (0.9 + 0.6) / 2 + 0.5) / 3)
    # Stage 0 was best after stage 1; stage 1 has improved.
    assert values["forgetting"] == pytest.approx(((0.9 - 0.3) + (0.6 - 0.7)) / 2)


def test_values_follow_the_last_stage_taken_in():
    metrics = with_recalls(ContinualAccuracy(ONE_CLASS_A_STAGE), 0, {0: 8, 1: 10, 2: 10})
    first = plain(metrics.compute())
    assert first["accuracy"] == first["incremental_accuracy"] == 0.8
    assert math.isnan(first["forgetting"])
    second = plain(with_recalls(metrics, 1, {0: 5, 1: 6, 2: 10}).compute())
    assert second["accuracy"] == pytest.approx(0.55)
    assert second["incremental_accuracy"] == pytest.approx((0.8 + 0.55) / 2)
    assert second["forgetting"] == pytest.approx(0.3)


def test_a_stage_that_was_not_taken_in_is_left_out():
    metrics = with_recalls(ContinualAccuracy(ONE_CLASS_A_STAGE), 0, {0: 8, 1: 4, 2: 0})
    values = plain(with_recalls(metrics, 2, {0: 2, 1: 1, 2: 9}).compute())
    assert values["accuracy"] == pytest.approx(0.4)
    assert values["incremental_accuracy"] == pytest.approx((0.8 + 0.4) / 2)
    # Stage 1 was never learnt, so that its 0.4 by the model after stage 0 cannot be forgotten.
    assert values["forgetting"] == pytest.approx(0.6)


def test_a_stage_without_data_is_left_out():
    weights = torch.tensor([[0.0, 0, 0], [0, 4, 0], [0, 0, 4]])
    metrics = with_recalls(ContinualAccuracy(weights), 0, {0: 9, 1: 9, 2: 9})
    assert all(math.isnan(value) for value in plain(metrics.compute()).values())
    with_recalls(metrics, 1, {0: 1, 1: 8, 2: 0})
    with_recalls(metrics, 2, {0: 1, 1: 6, 2: 10})
    expected = {"accuracy": 0.8, "incremental_accuracy": 0.8, "forgetting": 0.2}
    assert plain(metrics.compute()) == pytest.approx(expected)


def test_classes_absent_from_the_test_split_have_no_weight():
    weights = torch.tensor([[6.0, 2, 2], [0, 0, 5]])
    metrics = with_recalls(ContinualAccuracy(weights), 0, {0: 5, 1: 9})
    assert float(metrics.compute()["accuracy"]) == pytest.approx((6 * 0.5 + 2 * 0.9) / 8)
    with_recalls(metrics, 1, {0: 5, 1: 9})
    values = plain(metrics.compute())
    assert values["accuracy"] == pytest.approx((6 * 0.5 + 2 * 0.9) / 8)
    assert values["forgetting"] == 0


def test_values_are_expectations_over_drawn_test_sets():
    weights = torch.tensor([[50.0, 3, 0, 0], [0, 20, 0, 5], [7, 0, 40, 0]])
    random = np.random.default_rng(7)
    draws = 200_000

    def accuracy(stage: int, counts: np.ndarray) -> float:
        logits, labels = (tensor.numpy() for tensor in drawn(stage))
        correct = logits.argmax(1) == labels
        sizes = random.multinomial(draws, counts / counts.sum())
        hits = [random.choice(correct[labels == c], size).sum() for c, size in enumerate(sizes) if size]
        return sum(hits) / draws

    counts = weights.numpy().astype(float)
    unions = [accuracy(stage, counts[: stage + 1].sum(0)) for stage in range(3)]
    parts = [[accuracy(stage, counts[j]) for j in range(2)] for stage in range(3)]
    forgetting = (max(parts[0][0], parts[1][0]) - parts[2][0] + parts[1][1] - parts[2][1]) / 2
    values = plain(history(weights).compute())
    noise = 5 * 0.5 / math.sqrt(draws)
    assert values["accuracy"] == pytest.approx(unions[2], abs=noise)
    assert values["incremental_accuracy"] == pytest.approx(np.mean(unions), abs=noise)
    assert values["forgetting"] == pytest.approx(forgetting, abs=2 * noise)
    assert abs(forgetting) > 3 * noise
    assert len({round(value, 2) for value in unions}) == 3


def test_known_only_predicts_the_classes_met():
    weights = torch.tensor([[1.0, 1, 0], [0, 1, 1]])
    logits, labels = torch.tensor([[1.0, 0, 2], [0, 1, 2], [0, 1, 2]]), torch.tensor([0, 1, 2])
    free, masked = ContinualAccuracy(weights), ContinualAccuracy(weights, known_only=True)
    for metrics in (free, masked):
        metrics.update(logits, labels, 0)
    assert float(free.compute()["accuracy"]) == 0
    assert float(masked.compute()["accuracy"]) == 1
    for metrics in (free, masked):
        metrics.update(logits, labels, 1)  # class 2 is met now, and takes all
        assert float(metrics.compute()["accuracy"]) == 0.25
    assert logits[0, 2] == 2


def test_known_only_is_the_same_as_classes_without_a_prototype():
    weights = torch.tensor([[4.0, 1, 0, 0], [0, 2, 3, 0]])
    prototypes = ContinualAccuracy(weights)
    for stage, unknown in enumerate(([2, 3], [3])):
        logits, labels = drawn(stage)
        logits[:, unknown] = -math.inf
        prototypes.update(logits, labels, stage)
    assert plain(prototypes.compute()) == plain(history(weights, known_only=True).compute())
    assert plain(prototypes.compute()) != plain(history(weights).compute())


def test_state_is_two_counts_a_stage_and_class():
    metrics = history(torch.ones(2, 4))
    assert {name: (*state.shape, state.dtype) for name, state in metrics.metric_state.items()} == {
        "correct": (2, 4, torch.int64),
        "total": (2, 4, torch.int64),
    }
    metrics.reset()
    assert all(math.isnan(value) for value in plain(metrics.compute_local()).values())


def test_visits_merge_into_the_history():
    weights = torch.tensor([[50.0, 3, 0, 0], [0, 20, 0, 5], [7, 0, 40, 0]])
    merged = ContinualAccuracy(weights)
    for stage in (2, 0, 1):
        logits, labels = drawn(stage)
        for part in torch.arange(200).split(70):
            visit = ContinualAccuracy(weights)
            visit.update(logits[part], labels[part], stage)
            merged.merge_state(pickle.loads(pickle.dumps(visit)))
    assert plain(merged.compute()) == plain(history(weights).compute())


def test_metrics_of_different_clients_do_not_merge():
    metrics = history(torch.ones(2, 4))
    for other in (
        ContinualAccuracy(2 * torch.ones(2, 4)),
        ContinualAccuracy(torch.ones(2, 4), known_only=True),
    ):
        with pytest.raises(ValueError, match="settings"):
            metrics.merge_state(other)


def test_weights_are_a_copy():
    weights = torch.ones(2, 4, dtype=torch.float64)
    metrics = history(weights)
    before = plain(metrics.compute())
    weights[:, 0] = 100
    assert plain(metrics.compute()) == before


@pytest.mark.parametrize(
    ("logits", "labels", "stage"),
    [
        (torch.zeros(2, 4), torch.tensor([0, 1]), 0),
        (torch.zeros(2, 3), torch.tensor([0, 1]), 2),
        (torch.zeros(2, 3), torch.tensor([0, 1]), -1),
    ],
)
def test_what_does_not_fit_is_refused(logits, labels, stage):
    metrics = ContinualAccuracy(torch.ones(2, 3))
    with pytest.raises(ValueError, match="must"):
        metrics.update(logits, labels, stage)
    assert not metrics.total.any()


def test_weights_of_one_stage_alone_are_refused():
    with pytest.raises(ValueError, match=r"weights \(3,\)"):
        ContinualAccuracy(torch.ones(3))


def test_summary_over_clients():
    values = {
        7: {"accuracy": 0.9, "forgetting": 0.1},
        2: {"accuracy": 0.5, "forgetting": 0.4},
        4: {"accuracy": 0.1, "forgetting": math.nan},
    }
    summary = summarise_clients(values, {2: 10, 4: 60, 7: 30, 9: 1000}, {"forgetting"})
    assert summary["accuracy"]["mean"] == pytest.approx(0.5)
    assert summary["accuracy"]["worst"] == 0.1
    assert summary["accuracy"]["pooled"] == pytest.approx((30 * 0.9 + 10 * 0.5 + 60 * 0.1) / 100)
    assert list(summary["accuracy"]["per_client"].items()) == [(2, 0.5), (4, 0.1), (7, 0.9)]
    assert summary["forgetting"]["mean"] == pytest.approx(0.25)
    assert summary["forgetting"]["worst"] == 0.4
    assert summary["forgetting"]["pooled"] == pytest.approx((30 * 0.1 + 10 * 0.4) / 40)
    assert math.isnan(summary["forgetting"]["per_client"][4])


def test_summary_of_what_no_client_or_only_one_has():
    summary = summarise_clients({0: {"forgetting": math.nan}, 1: {"accuracy": 0.5}}, {0: 3, 1: 4}, ())
    assert all(math.isnan(summary["forgetting"][value]) for value in ("mean", "worst", "pooled"))
    assert {summary["accuracy"][value] for value in ("mean", "worst", "pooled")} == {0.5}
    assert math.isnan(summary["accuracy"]["per_client"][0])


def test_pooled_accuracy_is_that_of_all_images_of_all_clients():
    weights = {0: torch.tensor([[30.0, 0, 5, 0]]), 1: torch.tensor([[0.0, 2, 3, 20]])}
    values = {client: plain(history(of_client).compute()) for client, of_client in weights.items()}
    sizes = {client: int(of_client.sum()) for client, of_client in weights.items()}
    together = plain(history(weights[0] + weights[1]).compute())
    summary = summarise_clients(values, sizes, ContinualAccuracy.lower_is_better)
    assert summary["accuracy"]["pooled"] == pytest.approx(together["accuracy"])
    assert summary["accuracy"]["pooled"] != pytest.approx(summary["accuracy"]["mean"])


def test_forgetting_by_hand():
    assert math.isnan(forgetting({0: [0.9]}))
    assert forgetting({0: [0.9], 1: [0.6, 0.5]}) == pytest.approx(0.3)
    # Best after the task itself, or later; negative where it still gains.
    after = {0: [0.8], 1: [0.9, 0.6], 2: [0.7, 0.9, 0.5]}
    assert forgetting(after) == pytest.approx(((0.9 - 0.7) + (0.6 - 0.9)) / 2)
    # What was not measured before counts nowhere, nor what is undefined.
    assert forgetting({1: [0.9, 0.6], 3: [0.7, 0.5, 0.4, 1.0]}) == pytest.approx((0.2 + 0.1) / 2)
    assert forgetting({0: [math.nan], 1: [math.nan, 0.6], 2: [math.nan, 0.5, 1.0]}) == pytest.approx(0.1)
