"""Mean, worst, pooled and per-client values of a federation."""

import json
import math

import pytest
import torch
from sklearn.metrics import roc_auc_score

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.anomaly import AnomalyMetrics
from lit_fedad.metrics.federated import summarise, with_products


def client(scores: list[float], labels: list[int]) -> AnomalyMetrics:
    metrics = AnomalyMetrics(pixel=False)
    metrics.update(torch.tensor(scores), torch.tensor(labels))
    return metrics


def with_maps(seed: int, scale: float = 1.0) -> AnomalyMetrics:
    random = torch.Generator().manual_seed(seed)
    masks = torch.zeros(6, 12, 12, dtype=torch.bool)
    masks[::2, 3:6, 2:9] = True
    maps = scale * (30 + 4 * torch.randn(6, 12, 12, generator=random) + 5 * masks)
    metrics = AnomalyMetrics()
    metrics.update(maps.amax(dim=(1, 2)), masks.flatten(1).any(1), maps, masks)
    return metrics


def test_by_hand():
    # Client 0 ranks perfectly; client 1 wins one pair of two. Pooled: 2, 3 and 15 beat 1; only 15 beats 10.
    clients = {1: client([10, 20, 15], [0, 0, 1]), 0: client([1, 2, 3], [0, 1, 1])}
    summary = summarise(clients)["i_auroc"]
    assert summary == {
        "mean": 0.75,
        "worst": 0.5,
        "pooled": pytest.approx(4 / 9),
        "per_client": {0: 1.0, 1: 0.5},
    }
    assert list(summary["per_client"]) == [0, 1]


def test_mean_of_clients_is_not_the_pooled_value_when_scales_differ():
    random = torch.Generator().manual_seed(0)
    labels = torch.rand(400, generator=random) < 0.3
    scores = 30 + 5 * torch.randn(400, generator=random) + 10 * labels
    scaled = scores * torch.tensor([1.0, 3.0]).repeat_interleave(200)
    clients = {
        n: client(scaled[part].tolist(), labels[part].int().tolist())
        for n, part in enumerate((slice(0, 200), slice(200, 400)))
    }
    summary = summarise(clients)["i_auroc"]
    assert summary["pooled"] == pytest.approx(roc_auc_score(labels, scaled), abs=1e-12)
    assert summary["mean"] - summary["pooled"] > 0.1


def test_undefined_clients_are_left_out_of_mean_and_worst_but_not_of_pooled():
    clients = {0: client([1, 2], [0, 1]), 1: client([3, 4], [0, 0]), 2: AnomalyMetrics(pixel=False)}
    summary = summarise(clients)["i_auroc"]
    assert (summary["mean"], summary["worst"], summary["pooled"]) == (1, 1, pytest.approx(1 / 3))
    assert math.isnan(summary["per_client"][1])
    assert math.isnan(summary["per_client"][2])


def test_all_undefined_is_nan():
    summary = summarise({0: client([1], [0]), 1: client([2], [0])})["aupr"]
    assert all(math.isnan(summary[key]) for key in ("mean", "worst", "pooled"))


def text(summaries):
    """For comparisons: undefined values are no equals."""
    return json.dumps(summaries)


def test_pooled_pixels_are_those_of_one_metric_over_all():
    clients = {n: with_maps(n) for n in range(3)}
    everything = AnomalyMetrics()
    for metrics in clients.values():
        everything.merge_state(metrics)
    summary = summarise(clients)
    found = everything.compute()
    assert found.pop("aupimo").isnan()  # there are too few pixels for it
    for name, value in found.items():
        per_client = [float(metrics.compute()[name]) for metrics in clients.values()]
        assert summary[name]["pooled"] == float(value)
        assert summary[name]["mean"] == pytest.approx(sum(per_client) / 3, abs=1e-15)
        assert summary[name]["worst"] == min(per_client)


def test_order_of_clients_leaves_no_trace():
    clients = {n: with_maps(n, scale=1 + n) for n in range(3)}
    assert text(summarise(dict(reversed(clients.items())))) == text(summarise(clients))


def test_clients_are_left_unchanged():
    clients = {n: with_maps(n) for n in range(2)}
    first = summarise(clients)
    assert text(summarise(clients)) == text(first)
    clients[0].update(
        *(torch.tensor([50.0]), torch.tensor([0]), torch.full((1, 4, 4), 50.0), torch.zeros(1, 4, 4))
    )
    assert summarise(clients)["pro"]["pooled"] != first["pro"]["pooled"]  # nothing stale either


def test_values_are_plain_floats():
    for summary in summarise({0: with_maps(0)}).values():
        assert {type(summary[key]) for key in ("mean", "worst", "pooled")} == {float}
        assert {type(value) for value in summary["per_client"].values()} == {float}


def test_a_metric_without_values_of_products_stays_as_it_is():
    plain = summarise({0: with_maps(0)})
    found = with_products(plain, {"pro": {"nut": 0.25, "cap": 0.75}})
    assert found["i_auroc"] == plain["i_auroc"]
    assert found["pro"]["product_mean"] == 0.5


def test_no_client_is_refused():
    with pytest.raises(UserError, match="no client"):
        summarise({})


def test_images_of_a_shared_model_are_pooled_once():
    metrics = AnomalyMetrics()
    masks = torch.zeros(2, 256, 256)
    masks[1, :9, :9] = 1
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), 1 + masks, masks)
    assert math.isnan(summarise(dict.fromkeys(range(2), metrics))["aupimo"]["pooled"])  # 65,536 normal pixels
