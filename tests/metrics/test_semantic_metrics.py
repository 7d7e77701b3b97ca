"""Metrics of semantic anomaly detection against scikit-learn, NumPy's percentiles and by hand."""

import math
import pickle
from itertools import permutations

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_score, recall_score, roc_auc_score

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.federated import summarise
from lit_fedad.metrics.semantic import SemanticMetrics, balanced, detection_errors, percentile_threshold

VALUES = ["auroc", "aupr", "fe", "me", "fe_calibrated", "me_calibrated"]
NAMES = ("cat", "dog")


def drawn(seed: int, *counts: int, decimals: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Shuffled scores on the scale of distances of so many images a set; rounding them makes ties."""
    random = np.random.default_rng(seed)
    sets = random.permutation(np.repeat(np.arange(len(counts)), counts))
    scores = 30 + 3 * random.normal(size=len(sets)) + 3 * sets
    if decimals is not None:
        scores = scores.round(decimals)
    return torch.from_numpy(scores).float(), torch.from_numpy(sets)


def metrics_of(scores, sets, threshold=None, anomalies=None) -> SemanticMetrics:
    metrics = SemanticMetrics(anomalies or NAMES[: max(1, int(sets.max()))])
    metrics.update(scores, sets)
    return metrics if threshold is None else metrics.at_threshold(threshold)


def values_of(metrics: SemanticMetrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.compute_local().items()}


def expected_errors(scores, labels, weights, threshold) -> tuple[float, float]:
    flagged = scores > threshold
    recall = recall_score(labels, flagged, sample_weight=weights)
    precision = precision_score(labels, flagged, sample_weight=weights, zero_division=np.nan)
    return 1 - precision, 1 - recall


def reference(scores, labels, threshold) -> dict[str, float]:
    """One set of anomalies; the percentiles are those of the images repeated as often as their weight."""
    scores, labels = scores.double().numpy(), labels.numpy() != 0
    normal, anomalous = int((~labels).sum()), int(labels.sum())
    weights = np.where(labels, 1.0, anomalous / normal)
    divisor = math.gcd(normal, anomalous)
    repeated = np.repeat(scores, np.where(labels, normal // divisor, anomalous // divisor))
    candidates = [np.percentile(repeated, q) for q in range(45, 56)]
    accuracies = [np.average((scores > c) == labels, weights=weights).round(12) for c in candidates]
    best = candidates[int(np.argmax(accuracies))]
    areas = (
        roc_auc_score(labels, scores, sample_weight=weights),
        average_precision_score(labels, scores, sample_weight=weights),
    )
    errors = [expected_errors(scores, labels, weights, level) for level in (best, threshold)]
    return dict(zip(VALUES, [*areas, *errors[0], *errors[1]], strict=True))


@pytest.mark.parametrize("decimals", [None, 0])
@pytest.mark.parametrize("counts", [(200, 200), (26, 26), (101, 101), (90, 10), (10, 90), (37, 53)])
def test_one_set_is_that_of_sklearn_and_numpy(counts, decimals):
    for seed in range(3):
        scores, sets = drawn(seed, *counts, decimals=decimals)
        values = values_of(metrics_of(scores, sets, threshold=33.0))
        assert list(values) == VALUES
        assert values == pytest.approx(reference(scores, sets, 33.0), abs=1e-12, nan_ok=True)


def test_several_sets_are_each_against_all_normal_images_and_their_mean():
    scores, sets = drawn(1, 60, 40, 25)
    values = values_of(metrics_of(scores, sets, threshold=34.0))
    assert list(values) == VALUES + [f"{value}_{name}" for name in NAMES for value in VALUES]
    references = {}
    for number, name in enumerate(NAMES, start=1):
        chosen = (sets == 0) | (sets == number)
        references[name] = reference(scores[chosen], sets[chosen], 34.0)
        for value in VALUES:
            assert values[f"{value}_{name}"] == pytest.approx(references[name][value], abs=1e-12)
    for value in VALUES:
        assert values[value] == pytest.approx(np.mean([of[value] for of in references.values()]), abs=1e-12)


def test_more_normal_images_of_the_same_scores_change_nothing():
    scores, sets = drawn(2, 40, 40)
    normal = sets == 0
    more = torch.cat([scores, *[scores[normal]] * 4]), torch.cat([sets, *[sets[normal]] * 4])
    expected = values_of(metrics_of(scores, sets, 33.0))
    assert values_of(metrics_of(*more, 33.0)) == pytest.approx(expected, abs=1e-12)
    assert average_precision_score(more[1], more[0]) < expected["aupr"] - 0.05  # without the weights it does


def test_perfect_and_inverted_scores():
    scores, sets = torch.arange(40).float(), torch.arange(40) // 20
    perfect = values_of(metrics_of(scores, sets, threshold=19.0))  # a score at the threshold is normal
    assert perfect == dict(zip(VALUES, [1, 1, 0, 0, 0, 0], strict=True))
    inverted = values_of(metrics_of(-scores, sets, threshold=-20.0))
    assert (inverted["auroc"], inverted["fe_calibrated"], inverted["me_calibrated"]) == (0, 1, 1)


def test_constant_scores_have_a_missing_error_but_no_false_error():
    values = values_of(metrics_of(torch.full((10,), 3.0), torch.arange(10) % 2, threshold=3.0))
    assert (values["auroc"], values["aupr"], values["me"], values["me_calibrated"]) == (0.5, 0.5, 1, 1)
    assert math.isnan(values["fe"])
    assert math.isnan(values["fe_calibrated"])


@pytest.mark.parametrize("mapping", [torch.exp, lambda s: 1e4 * s - 7, lambda s: -1 / s, torch.arctan])
def test_a_monotone_map_of_scores_and_threshold_changes_nothing(mapping):
    scores, sets = drawn(3, 80, 50, 30, decimals=1)
    scores = scores / 10
    mapped = mapping(scores)
    assert mapped.unique().numel() == scores.unique().numel()
    middle = scores.median(0).indices  # a score, so that it is mapped as the others are
    expected = values_of(metrics_of(scores, sets, float(scores[middle])))
    assert values_of(metrics_of(mapped, sets, float(mapped[middle]))) == expected


def test_infinite_scores_are_ranked():
    scores, sets = torch.tensor([-torch.inf, 1.0, 2.0, torch.inf]), torch.tensor([0, 0, 1, 1])
    assert values_of(metrics_of(scores, sets, 1.5)) == dict(zip(VALUES, [1, 1, 0, 0, 0, 0], strict=True))


def test_of_equally_accurate_percentiles_the_lowest_wins():
    # The candidates lie at ranks 8 to 10 of 0 .. 19; those at 8 and 10 are wrong once, that at 9 twice.
    labels = torch.tensor([0] * 9 + [1, 0] + [1] * 9)
    wrong = [int(((torch.arange(20) > rank) != labels).sum()) for rank in (8, 9, 10)]
    assert wrong == [1, 2, 1]
    assert percentile_threshold(1 - labels, labels) == 8


def test_balanced_totals_agree_and_weights_are_in_lowest_terms():
    for normal, anomalous in [(5, 5), (12, 18), (7, 3), (1, 1000)]:
        counts = torch.tensor([normal - 1, 1]), torch.tensor([0, anomalous])
        negative, positive = balanced(*counts)
        assert negative.sum() == positive.sum() == math.lcm(normal, anomalous)
    equal = torch.tensor([2, 3]), torch.tensor([4, 1])
    assert torch.equal(torch.stack(balanced(*equal)), torch.stack(equal))


def test_errors_by_hand():
    errors = detection_errors(torch.tensor([6, 3, 1]), torch.tensor([1, 0, 4]), threshold=0)
    assert [float(error) for error in errors] == [4 / 8, 1 / 5]


def test_without_a_threshold_only_the_label_free_errors_are_undefined():
    values = values_of(metrics_of(*drawn(0, 30, 30)))
    assert [name for name, value in values.items() if math.isnan(value)] == ["fe_calibrated", "me_calibrated"]


@pytest.mark.parametrize("counts", [(), (5,), (0, 5)])
def test_without_normal_images_or_anomalies_all_is_undefined(counts):
    metrics = SemanticMetrics(("cat",))
    if counts:
        metrics.update(*drawn(0, *counts))
    assert list(values_of(metrics)) == VALUES
    assert all(math.isnan(value) for value in values_of(metrics).values())


def test_an_absent_set_leaves_the_others_defined_but_no_mean():
    values = values_of(metrics_of(*drawn(0, 20, 20), threshold=30.0, anomalies=NAMES))
    undefined = {name for name, value in values.items() if math.isnan(value)}
    assert undefined == {*VALUES, *(f"{value}_dog" for value in VALUES)}


def test_the_decision_is_not_rounded_to_the_precision_of_scores():
    score = torch.tensor([0.1, 0.1])  # 0.100000001 in float32
    assert values_of(metrics_of(score, torch.tensor([0, 1]), threshold=0.1))["me_calibrated"] == 0


def test_merged_clients_are_the_pooled_images_in_any_order():
    parts = [drawn(seed, 15 + seed, 12, 9) for seed in range(3)]
    pooled = metrics_of(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)), 33.0)
    for order in permutations(parts):
        merged = SemanticMetrics(NAMES)
        for part in order:
            merged.merge_state(metrics_of(*part, 33.0))
            merged.compute()  # must not be remembered
        assert values_of(merged) == values_of(pooled)


def test_merged_clients_keep_their_own_decisions():
    scores, sets = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 1, 1])
    low, high = metrics_of(scores, sets, 0.0), metrics_of(scores, sets, 3.0)
    for first, second in ((low, high), (high, low)):
        merged = SemanticMetrics(("cat",))
        merged.merge_state(first)
        merged.merge_state(second.metric_state)
        values = values_of(merged)
        assert (values["fe_calibrated"], values["me_calibrated"]) == (2 / 5, 1 / 4)
    merged.merge_state(metrics_of(scores, sets))
    assert math.isnan(values_of(merged)["fe_calibrated"])


def test_another_threshold_over_the_same_scores():
    scores, sets = drawn(4, 30, 20, 25)
    metrics = metrics_of(scores, sets, 31.0)
    before = values_of(metrics)
    other = metrics.at_threshold(35.0)
    assert values_of(other) == values_of(metrics_of(scores, sets, 35.0))
    assert values_of(other)["me_calibrated"] > before["me_calibrated"]
    other.update(torch.tensor([99.0]), torch.tensor([0]))
    assert values_of(metrics) == before


def test_reset_forgets_images_and_decisions():
    metrics = metrics_of(*drawn(0, 30, 20, 10), 33.0)
    expected = values_of(metrics)
    assert values_of(pickle.loads(pickle.dumps(metrics))) == expected
    metrics.reset()
    assert all(math.isnan(value) for value in values_of(metrics).values())
    metrics.update(*drawn(0, 30, 20, 10))
    assert values_of(metrics.at_threshold(33.0)) == expected


def test_summary_of_a_federation():
    parts = {seed: drawn(seed, 20, 14, 17) for seed in range(3)}
    clients = {seed: metrics_of(*part, 31.0 + seed) for seed, part in parts.items()}
    summary = summarise(clients)
    everything = metrics_of(*(torch.cat(tensors) for tensors in zip(*parts.values(), strict=True)))
    for name, value in values_of(everything).items():
        own = [values_of(metrics)[name] for metrics in clients.values()]
        assert summary[name]["mean"] == pytest.approx(np.mean(own), abs=1e-12)
        assert summary[name]["worst"] == (max(own) if name[:2] in ("fe", "me") else min(own))
        assert min(own) < max(own)
        if "calibrated" not in name:
            assert summary[name]["pooled"] == value
    flagged = np.concatenate([part[0].numpy() > 31.0 + seed for seed, part in parts.items()])
    sets = np.concatenate([part[1].numpy() for part in parts.values()])
    assert summary["me_calibrated_cat"]["pooled"] == pytest.approx(1 - flagged[sets == 1].mean(), abs=1e-12)


def test_the_worst_error_leaves_out_undefined_clients():
    clients = {0: metrics_of(*drawn(0, 9, 9), 33.0), 1: metrics_of(*drawn(1, 9, 9))}
    summary = summarise(clients)["me_calibrated"]
    assert summary["worst"] == summary["mean"] == summary["per_client"][0]
    assert math.isnan(summary["per_client"][1])


def test_the_state_is_three_floats_an_image():
    metrics = metrics_of(*drawn(0, 20, 10, 10), 33.0)
    assert sum(part.nbytes for state in metrics.metric_state.values() for part in state) == 40 * 3 * 4


def test_a_refused_batch_leaves_no_trace():
    scores, sets = drawn(0, 10, 10)
    metrics = metrics_of(scores, sets, 33.0)
    expected = values_of(metrics)
    with pytest.raises(UserError, match="NaN"):
        metrics.update(scores * torch.nan, sets)
    with pytest.raises(ValueError, match="same shape"):
        metrics.update(scores[1:], sets)
    for beyond in (-1, 2):
        with pytest.raises(ValueError, match=r"0 \.\. 1"):
            metrics.update(torch.ones(1), torch.tensor([beyond]))
    assert values_of(metrics) == expected


def test_sets_are_checked():
    with pytest.raises(ValueError, match="at least one"):
        SemanticMetrics(())
    for names in (("cat", "cat"), ("calibrated", "cat")):  # fe_calibrated is taken
        with pytest.raises(UserError, match="rename"):
            SemanticMetrics(names)
    with pytest.raises(ValueError, match="settings"):
        SemanticMetrics(("cat",)).merge_state(SemanticMetrics(("dog",)))


def test_a_single_set_may_have_any_name_and_has_no_values_of_its_own():
    metrics = metrics_of(*drawn(0, 10, 10), 33.0, anomalies=("train",))
    assert list(values_of(metrics)) == VALUES
    assert metrics.lower_is_better == {"fe", "me", "fe_calibrated", "me_calibrated"}
