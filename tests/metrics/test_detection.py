"""AUROC and AUPR: against scikit-learn, by hand, and as states that merge."""

import math
import pickle
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.classification import BinaryAUROC

from lit_fedad.errors import UserError
from lit_fedad.metrics.detection import (
    ExactAUROC,
    ExactAveragePrecision,
    HistogramAUROC,
    HistogramAveragePrecision,
)
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins
from lit_fedad.metrics.functional.curves import auroc

ALL = [ExactAUROC, HistogramAUROC, ExactAveragePrecision, HistogramAveragePrecision]
REFERENCE = {
    ExactAUROC: roc_auc_score,
    HistogramAUROC: roc_auc_score,
    ExactAveragePrecision: average_precision_score,
    HistogramAveragePrecision: average_precision_score,
}


def distances(n: int = 2000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores on the scale of distances: about 30 if normal, about 40 if anomalous."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.rand(n, generator=random) < 0.2
    return 30 + 5 * torch.randn(n, generator=random) + 10 * labels, labels


def value_of(metric, *batches):
    for scores, labels in batches:
        metric.update(scores, labels)
    return metric.compute()


def test_sigmoid_trap_of_torchmetrics():
    scores, labels = distances()
    expected = roc_auc_score(labels, scores)
    assert expected > 0.9
    assert value_of(BinaryAUROC(), (scores, labels.long())) == pytest.approx(0.5, abs=0.01)  # the trap
    assert value_of(ExactAUROC(), (scores, labels)) == pytest.approx(expected, abs=1e-12)
    assert value_of(HistogramAUROC(), (scores, labels)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("metric", [ExactAUROC, ExactAveragePrecision])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("decimals", [6, 0])  # 0: nearly all scores are tied
def test_exact_is_sklearn(metric, scale, decimals):
    scores, labels = distances()
    scores = ((scores - 33).round(decimals=decimals) * scale).float()
    assert value_of(metric(), (scores, labels)) == pytest.approx(REFERENCE[metric](labels, scores), abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "mantissa_bits", "tolerance"),
    [
        (HistogramAUROC, 10, 2e-6),
        (HistogramAveragePrecision, 10, 1e-3),
        (HistogramAveragePrecision, 14, 1e-4),
    ],
)
def test_histogram_is_close_to_sklearn(metric, mantissa_bits, tolerance):
    scores, labels = distances(100_000)
    expected = REFERENCE[metric](labels, scores)
    assert value_of(metric(LogBins(mantissa_bits)), (scores, labels)) == pytest.approx(
        expected, abs=tolerance
    )


@pytest.mark.parametrize("metric", ALL)
def test_by_hand(metric):
    # Pairs (normal, anomaly): -2 < -1, -2 < 3, 0 > -1, 0 < 3, 3 > -1, 3 = 3: won 1 + 1 + 0 + 1 + 0 + 1/2 of
    # 6. Thresholds 3, 0, -1, -2: precision 1/2, 1/3, 2/4, 2/5; recall steps 1/2, 0, 1/2, 0.
    scores, labels = torch.tensor([-2.0, -1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 1, 0, 1, 0])
    expected = 3.5 / 6 if "AUROC" in metric.__name__ else 0.5 * 1 / 2 + 0.5 * 2 / 4
    assert value_of(metric(), (scores, labels)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", ALL)
def test_infinite_scores_have_a_rank(metric):
    scores, labels = torch.tensor([-math.inf, 1.0, math.inf]), torch.tensor([0, 0, 1])
    assert value_of(metric(), (scores, labels)) == 1


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=2, max_size=60).filter(
        lambda pairs: len({label for _, label in pairs}) == 2
    ),
    st.integers(0, 10),
)
def test_histogram_auroc_is_off_by_at_most_half_the_tied_pairs(pairs, mantissa_bits):
    scores, labels = torch.tensor([score for score, _ in pairs]), torch.tensor([label for _, label in pairs])
    bins = LogBins(mantissa_bits)
    normal, anomalous = scores[~labels], scores[labels]
    tied = (bins.index(normal)[:, None] == bins.index(anomalous)[None]).sum()
    bound = 0.5 * float(tied) / (len(normal) * len(anomalous))
    error = abs(float(value_of(HistogramAUROC(bins), (scores, labels))) - roc_auc_score(labels, scores))
    assert error <= bound + 1e-12


def test_more_bits_are_closer():
    scores, labels = distances(20_000)
    exact = value_of(ExactAUROC(), (scores, labels))
    errors = [
        abs(value_of(HistogramAUROC(LogBins(bits)), (scores, labels)) - exact) for bits in (0, 4, 8, 12)
    ]
    assert all(finer < coarser for coarser, finer in pairwise(errors))


def test_auroc_counts_pairs_of_a_hundred_million_pixels():
    # Sums of 3e15 pairs: a float32 or int32 slip would show.
    counts = torch.tensor([60_000_000, 40_000_000]), torch.tensor([10_000_000, 20_000_001])
    pairs = [(0, 0, 0.5), (0, 1, 1.0), (1, 1, 0.5)]
    won = sum(int(counts[0][n]) * int(counts[1][p]) * share for n, p, share in pairs)
    assert float(auroc(*counts)) == pytest.approx(won / (100_000_000 * 30_000_001), abs=1e-15)


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("label", [0, 1])
def test_one_kind_only_is_undefined(metric, label):
    assert value_of(metric(), (torch.rand(5), torch.full((5,), label))).isnan()


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_sample_is_undefined(metric):
    assert metric().compute().isnan()
    assert value_of(metric(), (torch.empty(0), torch.empty(0))).isnan()


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("size", [1, 7, 2000])
def test_batches_leave_no_trace(metric, size):
    scores, labels = distances()
    batches = zip(scores.split(size), labels.split(size), strict=True)
    assert torch.equal(value_of(metric(), *batches), value_of(metric(), (scores, labels)))


@pytest.mark.parametrize("metric", ALL)
def test_order_leaves_no_trace(metric):
    scores, labels = distances()
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        value_of(metric(), (scores[order], labels[order])), value_of(metric(), (scores, labels))
    )


@pytest.mark.parametrize("metric", ALL)
def test_pixels_count_like_samples(metric):
    scores, labels = distances(2 * 10 * 20)
    maps = scores.view(2, 10, 20), labels.view(2, 10, 20)
    assert torch.equal(value_of(metric(), maps), value_of(metric(), (scores, labels)))


@pytest.mark.parametrize("metric", ALL)
def test_merged_clients_are_the_pooled_samples(metric):
    clients = [distances(n, seed) for seed, n in enumerate([100, 1, 500])]
    merged = metric()
    for client in clients:
        of_client = metric()
        of_client.update(*client)
        merged.merge_state(of_client)
    assert torch.equal(merged.compute(), value_of(metric(), *clients))


@pytest.mark.parametrize("metric", ALL)
def test_merging_after_compute_is_not_stale(metric):
    first, second = distances(300, 0), distances(300, 1)
    merged = metric()
    merged.update(*first)
    alone = merged.compute()
    other = metric()
    other.update(*second)
    merged.merge_state(other.metric_state)
    assert torch.equal(merged.compute(), value_of(metric(), first, second))
    assert merged.compute() != alone


def test_a_merged_metric_does_not_claim_to_be_empty():
    seen, merged = ExactAUROC(), ExactAUROC()
    seen.update(*distances())
    merged.merge_state(seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged.compute()


def test_other_bins_of_the_same_number_do_not_merge():
    low, high = HistogramAUROC(LogBins(4, -8, 0)), HistogramAUROC(LogBins(4, 0, 8))
    with pytest.raises(ValueError, match="settings"):
        low.merge_state(high)


@pytest.mark.parametrize("metric", ALL)
def test_survives_pickling_and_resetting(metric):
    scores, labels = distances()
    original = metric()
    expected = value_of(original, (scores, labels))
    copy = pickle.loads(pickle.dumps(original))
    assert torch.equal(copy.compute(), expected)
    copy.reset()
    assert torch.equal(value_of(copy, (scores, labels)), expected)


@pytest.mark.parametrize("metric", ALL)
def test_state_dict_restores_the_value(metric):
    original, restored = metric(), metric()
    expected = value_of(original, distances())
    for each in (original, restored):
        each.persistent(True)
    restored.load_state_dict(original.state_dict())
    restored.update(torch.empty(0), torch.empty(0))
    assert torch.equal(restored.compute(), expected)


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_precision_is_scored_by_its_float32_value(metric, dtype):
    scores, labels = distances()
    scores = scores.to(dtype)
    assert torch.equal(value_of(metric(), (scores, labels)), value_of(metric(), (scores.float(), labels)))


@pytest.mark.parametrize("metric", ALL)
def test_label_types_agree(metric):
    scores, labels = distances()
    expected = value_of(metric(), (scores, labels))
    for same in (labels.int(), labels.float(), labels.to(torch.uint8) * 255):
        assert torch.equal(value_of(metric(), (scores, same)), expected)


@pytest.mark.parametrize("metric", ALL)
def test_forward_gives_the_value_of_the_batch(metric):
    first, second = distances(300, 0), distances(300, 1)
    running = metric()
    assert torch.equal(running(*first), value_of(metric(), first))
    assert torch.equal(running(*second), value_of(metric(), second))
    assert torch.equal(running.compute(), value_of(metric(), first, second))


@pytest.mark.parametrize("metric", ALL)
def test_what_the_caller_does_to_the_scores_later_does_not_matter(metric):
    scores, labels = distances()
    expected = value_of(metric(), (scores, labels))
    running = metric()
    running.update(scores, labels)
    scores.neg_()
    assert torch.equal(running.compute(), expected)


@pytest.mark.parametrize("metric", [HistogramAUROC, HistogramAveragePrecision])
def test_histograms_do_not_grow(metric):
    running = metric()
    sizes = set()
    for seed in range(3):
        running.update(*distances(1000, seed))
        sizes.add(sum(state.nbytes for state in running.metric_state.values()))
    assert sizes == {2 * 8 * DEFAULT_BINS.count}


@pytest.mark.parametrize("metric", ALL)
def test_bad_input_is_refused_and_leaves_no_trace(metric):
    running = metric()
    expected = value_of(running, distances())
    with pytest.raises(UserError, match="NaN"):
        running.update(torch.tensor([1.0, torch.nan]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="same shape"):
        running.update(torch.rand(3), torch.zeros(3, 1))
    assert torch.equal(running.compute(), expected)


def test_random_scores_are_worth_one_half():
    random = np.random.default_rng(0)
    scores, labels = (
        torch.from_numpy(random.normal(30, 5, 50_000)),
        torch.from_numpy(random.random(50_000) < 0.5),
    )
    assert value_of(HistogramAUROC(), (scores, labels)) == pytest.approx(0.5, abs=0.01)
