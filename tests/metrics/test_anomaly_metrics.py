"""The four figures in one metric: those of scikit-learn, and the same whatever the batches and clients."""

import math
import pickle
import warnings

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.functional.bins import DEFAULT_BINS

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
    return defined(metrics.compute())


def defined(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """Values as numbers; without AUPIMO, for which there are too few pixels."""
    found = {name: float(value) for name, value in values.items()}
    assert math.isnan(found.pop("aupimo", math.nan))
    return found


def test_values_are_those_of_sklearn():
    scores, labels, maps, masks = batch(50)
    values = of(AnomalyMetrics(), (scores, labels, maps, masks))
    assert list(values) == ["i_auroc", "aupr", "f1_max", "p_auroc", "pro", "pro_05", "p_ap"]
    assert values["i_auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert values["aupr"] == pytest.approx(average_precision_score(labels, scores), abs=1e-12)
    assert values["p_auroc"] == pytest.approx(roc_auc_score(masks.flatten(), maps.flatten()), abs=1e-5)


def test_without_pixels():
    scores, labels, maps, masks = batch()
    metrics = AnomalyMetrics(pixel=False)
    metrics.update(scores, labels)
    metrics.update(scores, labels, maps, masks)
    assert list(metrics.compute()) == ["i_auroc", "aupr", "f1_max"]
    assert set(metrics.metric_state) == {"image_scores", "image_labels"}


def test_batches_order_and_clients_leave_no_trace_in_any_value():
    whole = batch(12)
    parts = [tuple(tensor[part] for tensor in whole) for part in (slice(0, 5), slice(5, 6), slice(6, 12))]
    expected = of(AnomalyMetrics(), whole)
    assert of(AnomalyMetrics(), *parts) == expected
    scores, labels, maps, masks = (tensor.flip(0) for tensor in whole)
    assert of(AnomalyMetrics(), (scores, labels, maps.mT, masks.mT)) == expected
    merged = AnomalyMetrics()
    for part in reversed(parts):
        client = AnomalyMetrics()
        of(client, part)
        merged.merge_state(client)
        merged.compute()  # must not be remembered
    assert of(merged) == expected


def test_a_bare_state_merges_after_compute():
    first, second = batch(seed=0), batch(seed=1)
    merged, other = AnomalyMetrics(), AnomalyMetrics()
    alone = of(merged, first)
    other.update(*second)
    merged.merge_state(other.metric_state)
    assert of(merged) == of(AnomalyMetrics(), first, second)
    assert of(merged) != alone


def test_a_merged_metric_does_not_claim_to_be_empty():
    seen, merged = AnomalyMetrics(), AnomalyMetrics()
    seen.update(*batch())
    merged.merge_state(seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged.compute()


def test_forward_gives_the_values_of_the_batch():
    first, second = batch(seed=0), batch(seed=1)
    running = AnomalyMetrics()
    for each in (first, second):
        assert defined(running(*each)) == of(AnomalyMetrics(), each)
    assert of(running) == of(AnomalyMetrics(), first, second)


def test_normal_images_alone_are_undefined_not_an_error():
    scores, labels, maps, masks = (tensor[::2] for tensor in batch())
    values = torch.stack(list(AnomalyMetrics()(scores, labels, maps, masks).values()))
    assert values.isnan().all()


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_no_image_is_undefined():
    metrics = AnomalyMetrics()
    assert torch.stack(list(metrics.compute().values())).isnan().all()
    metrics.update(torch.empty(0), torch.empty(0), torch.empty(0, 4, 4), torch.empty(0, 4, 4))
    assert torch.stack(list(metrics.compute().values())).isnan().all()


def test_metrics_survive_pickling_resetting_and_a_state_dict():
    original, restored = AnomalyMetrics(), AnomalyMetrics()
    expected = of(original, batch())
    copy = pickle.loads(pickle.dumps(original))
    assert of(copy) == expected
    copy.reset()
    assert of(copy, batch()) == expected
    for metrics in (original, restored):
        metrics.persistent(True)
    restored.load_state_dict(original.state_dict())
    assert defined(restored.compute_local()) == expected


def test_what_the_caller_does_to_a_batch_later_does_not_matter():
    given, kept = batch(), batch()
    metrics = AnomalyMetrics()
    metrics.update(*given)
    scores, labels, maps, masks = given
    for scored in (scores, maps):
        scored.neg_()
    for marked in (labels, masks):
        marked.logical_not_()
    assert of(metrics) == of(AnomalyMetrics(), kept)


def test_pixel_states_do_not_grow():
    metrics = AnomalyMetrics()
    sizes = set()
    for seed in range(3):
        metrics.update(*batch(seed=seed))
        states = metrics.metric_state
        sizes.add(sum(states[name].nbytes for name in ("normal", "anomalous", "region")))
    assert sizes == {3 * 8 * DEFAULT_BINS.count}


@pytest.mark.parametrize("marked", [torch.int64, torch.float32, torch.uint8])
def test_any_type_of_labels_will_do(marked):
    scores, labels, maps, masks = batch()
    same = scores, labels.to(marked) * 255, maps, masks.to(marked) * 255
    assert of(AnomalyMetrics(), same) == of(AnomalyMetrics(), batch())


def test_a_refused_batch_leaves_no_trace():
    scores, labels, maps, masks = batch()
    metrics = AnomalyMetrics()
    expected = of(metrics, (scores, labels, maps, masks))
    for bad in [(scores * torch.nan, labels, maps, masks), (scores, labels, maps * torch.nan, masks)]:
        with pytest.raises(UserError, match="NaN"):
            metrics.update(*bad)
    for bad in [(scores, labels[1:], maps, masks), (scores, labels, maps, masks[1:])]:
        with pytest.raises(ValueError, match="same shape"):
            metrics.update(*bad)
    with pytest.raises(ValueError, match=r"\[B, H, W\]"):
        metrics.update(scores, labels, maps.flatten(1), masks.flatten(1))
    for given in [(), (maps,), (None, masks)]:
        with pytest.raises(ValueError, match="pixel=False"):
            metrics.update(scores, labels, *given)
    with pytest.raises(ValueError, match=r"\d+ image scores and \d+ maps are of different images"):
        metrics.update(scores, labels, maps[1:], masks[1:])
    assert of(metrics) == expected


@pytest.mark.parametrize("other", [{"pixel": False}, {"limit": 0.1}, {"spro_limit": 0.1}])
def test_other_settings_do_not_merge(other):
    with pytest.raises(ValueError, match="settings"):
        AnomalyMetrics().merge_state(AnomalyMetrics(**other))


def test_scores_and_maps_may_have_anomalibs_channel():
    draw = torch.Generator().manual_seed(0)
    maps, labels = torch.rand(4, 6, 6, generator=draw), torch.tensor([0, 1, 0, 1])
    masks = labels.view(4, 1, 1).expand(4, 6, 6)
    plain, channel = AnomalyMetrics(), AnomalyMetrics()
    plain.update(maps.amax((1, 2)), labels, maps, masks)
    channel.update(maps.amax((1, 2))[:, None], labels[:, None], maps[:, None], masks[:, None])
    for one, other in zip(plain.compute().values(), channel.compute().values(), strict=True):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))
