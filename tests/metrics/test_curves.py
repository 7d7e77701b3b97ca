"""AUROC and average precision from histograms: against scikit-learn, by hand, and within their stated errors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins, distinct_bins
from lit_fedad.metrics.functional.curves import auroc, average_precision
from lit_fedad.metrics.functional.histograms import label_histograms

CURVES = [(auroc, roc_auc_score), (average_precision, average_precision_score)]
ALL = [(curve, bins) for curve, _ in CURVES for bins in (None, DEFAULT_BINS)]


def distances(n: int = 2000, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores on the scale of distances: about 30 if normal, about 40 if anomalous."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.rand(n, generator=random) < 0.2
    return 30 + 5 * torch.randn(n, generator=random) + 10 * labels, labels


def value_of(curve, scores, labels, bins: LogBins | None = None) -> torch.Tensor:
    """Of one bin for every distinct score, or of logarithmic bins."""
    index, count = distinct_bins(scores) if bins is None else (bins.index(scores), bins.count)
    return curve(*label_histograms(index, labels, count))


@pytest.mark.parametrize(("curve", "reference"), CURVES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("decimals", [6, 0])  # 0: nearly all scores are tied
def test_distinct_bins_give_the_values_of_sklearn(curve, reference, scale, decimals):
    scores, labels = distances()
    scores = ((scores - 33).round(decimals=decimals) * scale).float()
    assert value_of(curve, scores, labels) == pytest.approx(reference(labels, scores), abs=1e-12)


@pytest.mark.parametrize(
    ("curve", "reference", "mantissa_bits", "tolerance"),
    [(*CURVES[0], 10, 2e-6), (*CURVES[1], 10, 1e-3), (*CURVES[1], 14, 1e-4)],
)
def test_logarithmic_bins_are_close_to_sklearn(curve, reference, mantissa_bits, tolerance):
    scores, labels = distances(100_000)
    found = value_of(curve, scores, labels, LogBins(mantissa_bits))
    assert found == pytest.approx(reference(labels, scores), abs=tolerance)


@pytest.mark.parametrize(("curve", "bins"), ALL)
def test_by_hand(curve, bins):
    # Pairs (normal, anomaly): -2 < -1, -2 < 3, 0 > -1, 0 < 3, 3 > -1, 3 = 3: won 1 + 1 + 0 + 1 + 0 + 1/2 of
    # 6. Thresholds 3, 0, -1, -2: precision 1/2, 1/3, 2/4, 2/5; recall steps 1/2, 0, 1/2, 0.
    scores, labels = torch.tensor([-2.0, -1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 1, 0, 1, 0])
    expected = 3.5 / 6 if curve is auroc else 0.5 * 1 / 2 + 0.5 * 2 / 4
    assert value_of(curve, scores, labels, bins) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("curve", "bins"), ALL)
def test_infinite_scores_have_a_rank(curve, bins):
    scores, labels = torch.tensor([-math.inf, 1.0, math.inf]), torch.tensor([0, 0, 1])
    assert value_of(curve, scores, labels, bins) == 1


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=2, max_size=60).filter(
        lambda pairs: len({label for _, label in pairs}) == 2
    ),
    st.integers(0, 10),
)
@pytest.mark.slow
def test_auroc_of_logarithmic_bins_is_off_by_at_most_half_the_tied_pairs(pairs, mantissa_bits):
    scores, labels = torch.tensor([score for score, _ in pairs]), torch.tensor([label for _, label in pairs])
    bins = LogBins(mantissa_bits)
    normal, anomalous = scores[~labels], scores[labels]
    tied = (bins.index(normal)[:, None] == bins.index(anomalous)[None]).sum()
    bound = 0.5 * float(tied) / (len(normal) * len(anomalous))
    error = abs(float(value_of(auroc, scores, labels, bins)) - roc_auc_score(labels, scores))
    assert error <= bound + 1e-12


@pytest.mark.parametrize(("curve", "bins"), ALL)
@pytest.mark.parametrize("labels", [[0] * 5, [1] * 5, []])
def test_one_kind_only_or_no_sample_is_undefined(curve, bins, labels):
    assert value_of(curve, torch.rand(len(labels)), torch.tensor(labels), bins).isnan()


@pytest.mark.parametrize(("curve", "bins"), ALL)
def test_order_and_type_of_the_labels_leave_no_trace(curve, bins):
    scores, labels = distances()
    expected = value_of(curve, scores, labels, bins)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(1))
    assert torch.equal(value_of(curve, scores[order], labels[order], bins), expected)
    for same in (labels.int(), labels.float(), labels.to(torch.uint8) * 255):
        assert torch.equal(value_of(curve, scores, same, bins), expected)


def test_pairs_of_many_clients_pixels_do_not_overflow():
    normal, anomalous = torch.tensor([5, 5]) * 10**9, torch.tensor([1, 9]) * 10**8
    assert auroc(normal, anomalous) == pytest.approx(0.7, abs=1e-15)
