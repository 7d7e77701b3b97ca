"""The four figures in one metric: the same values as each on its own, pooled over batches and clients."""

import pickle

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from lit_fedad.errors import UserError
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.detection import ExactAUROC, ExactAveragePrecision, HistogramAUROC
from lit_fedad.metrics.functional.bins import DEFAULT_BINS, LogBins
from lit_fedad.metrics.pro import ExactPRO, HistogramPRO

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch(n: int = 12, seed: int = 0) -> Batch:
    """Scores, labels, maps and masks on the scale of distances; every other image has an anomaly."""
    random = torch.Generator().manual_seed(seed)
    masks = torch.zeros(n, 16, 16, dtype=torch.bool)
    masks[1::2, 4:9, 5:11] = True
    maps = 30 + 4 * torch.randn(n, 16, 16, generator=random) + 5 * masks
    labels = masks.flatten(1).any(1)
    return 35 + 3 * torch.randn(n, generator=random) + 2 * labels, labels, maps, masks


def of(metrics: AnomalyMetrics, *batches: Batch) -> dict[str, float]:
    for each in batches:
        metrics.update(*each)
    return {name: float(value) for name, value in metrics.compute().items()}


def test_image_values_are_those_of_sklearn():
    scores, labels, maps, masks = batch(50)
    values = of(AnomalyMetrics(), (scores, labels, maps, masks))
    assert list(values) == ["i_auroc", "aupr", "p_auroc", "pro"]
    assert values["i_auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert values["aupr"] == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert values["p_auroc"] == pytest.approx(roc_auc_score(masks.flatten(), maps.flatten()), abs=1e-5)


@pytest.mark.parametrize("exact", [False, True])
def test_values_are_those_of_the_single_metrics(exact):
    scores, labels, maps, masks = batch()
    pixel = (ExactAUROC(), ExactPRO(0.2)) if exact else (HistogramAUROC(), HistogramPRO(0.2))
    for metric in pixel:
        metric.update(maps, masks)
    image = ExactAUROC(), ExactAveragePrecision()
    for metric in image:
        metric.update(scores, labels)
    expected = [float(metric.compute()) for metric in image + pixel]
    assert (
        list(of(AnomalyMetrics(exact=exact, limit=0.2), (scores, labels, maps, masks)).values()) == expected
    )


def test_without_pixels():
    scores, labels, maps, masks = batch()
    metrics = AnomalyMetrics(pixel=False)
    metrics.update(scores, labels)
    metrics.update(scores, labels, maps, masks)
    assert list(metrics.compute()) == ["i_auroc", "aupr"]
    assert set(metrics.metric_state) == {"image_scores", "image_labels"}


@pytest.mark.parametrize("exact", [False, True])
def test_batches_and_clients_leave_no_trace_in_any_value(exact):
    whole = batch(12)
    parts = [tuple(tensor[part] for tensor in whole) for part in (slice(0, 5), slice(5, 6), slice(6, 12))]
    expected = of(AnomalyMetrics(exact=exact), whole)
    assert of(AnomalyMetrics(exact=exact), *parts) == expected
    merged = AnomalyMetrics(exact=exact)
    for part in reversed(parts):
        client = AnomalyMetrics(exact=exact)
        of(client, part)
        merged.merge_state(client)
        merged.compute()  # must not be remembered
    assert of(merged) == expected


def test_normal_images_alone_are_undefined_not_an_error():
    scores, labels, maps, masks = (tensor[::2] for tensor in batch())
    values = torch.stack(list(AnomalyMetrics()(scores, labels, maps, masks).values()))
    assert values.isnan().all()


@pytest.mark.parametrize("exact", [False, True])
def test_metrics_survive_pickling_and_a_state_dict(exact):
    original, restored = AnomalyMetrics(exact=exact), AnomalyMetrics(exact=exact)
    expected = of(original, batch())
    assert of(pickle.loads(pickle.dumps(original))) == expected
    for metrics in (original, restored):
        metrics.persistent(True)
    restored.load_state_dict(original.state_dict())
    assert {name: float(value) for name, value in restored.compute_local().items()} == expected


def test_pixel_states_do_not_grow():
    metrics = AnomalyMetrics()
    sizes = set()
    for seed in range(3):
        metrics.update(*batch(seed=seed))
        states = metrics.metric_state
        sizes.add(sum(states[name].nbytes for name in ("normal", "anomalous", "region")))
    assert sizes == {3 * 8 * DEFAULT_BINS.count}


@pytest.mark.parametrize("exact", [False, True])
def test_half_precision_maps(exact):
    scores, labels, maps, masks = batch()
    half = scores.half(), labels, maps.half(), masks
    full = scores.half().float(), labels, maps.half().float(), masks
    assert of(AnomalyMetrics(exact=exact), half) == of(AnomalyMetrics(exact=exact), full)


@pytest.mark.parametrize("exact", [False, True])
def test_a_refused_batch_leaves_no_trace(exact):
    scores, labels, maps, masks = batch()
    metrics = AnomalyMetrics(exact=exact)
    expected = of(metrics, (scores, labels, maps, masks))
    for bad in [(scores * torch.nan, labels, maps, masks), (scores, labels, maps * torch.nan, masks)]:
        with pytest.raises(UserError, match="NaN"):
            metrics.update(*bad)
    for bad in [(scores, labels[1:], maps, masks), (scores, labels, maps, masks[1:])]:
        with pytest.raises(ValueError, match="same shape"):
            metrics.update(*bad)
    with pytest.raises(ValueError, match="pixel=False"):
        metrics.update(scores, labels)
    assert of(metrics) == expected


@pytest.mark.parametrize(
    "other", [{"pixel": False}, {"exact": True}, {"limit": 0.1}, {"bins": LogBins(mantissa_bits=8)}]
)
def test_other_settings_do_not_merge(other):
    with pytest.raises(ValueError, match="settings"):
        AnomalyMetrics().merge_state(AnomalyMetrics(**other))
