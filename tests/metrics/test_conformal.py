"""Conformal p-values and thresholds against counting by hand, and their promise on drawn scores."""

import itertools
import json
import math

import pytest
import torch
from scipy.stats import binomtest

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.conformal import Calibration, ScoreCounts, needed_images, rounded_up, wilson_interval
from lit_fedad.metrics.functional.bins import DEFAULT_BINS

COARSE = torch.arange(1, 40).float()  # whole numbers: each in a bin of its own


def drawn(n, seed):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).exp()


@pytest.mark.parametrize("n", [1, 7, 39])
def test_p_values_count_the_scores_that_are_at_least_as_large(n):
    calibration = COARSE[:n]
    new = torch.tensor([-1.0, 0.5, 1.0, 3.5, 7.0, 100.0, math.inf])
    by_hand = [(1 + sum(old >= score for old in calibration.tolist())) / (n + 1) for score in new.tolist()]
    assert ScoreCounts.of(calibration).p_values(new).tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize("alpha", [1e-320, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 9, 19, 39])
def test_a_score_is_above_the_threshold_exactly_where_its_p_value_is_at_most_alpha(n, alpha):
    counts = ScoreCounts.of(COARSE[:n])
    new = torch.arange(0, 42, 0.5)
    called = new.double() > counts.threshold(alpha)
    assert torch.equal(called, counts.p_values(new) <= alpha + 1e-12)
    assert called.any() == (n >= needed_images(alpha))


@pytest.mark.parametrize("n", [1, 2, 8, 18])
def test_the_automatic_rate_of_few_scores_is_the_smallest_at_which_the_largest_score_can_be_called(n):
    smallest = 1 / (n + 1)  # p-value of a score above all n
    scores = {"nut": ScoreCounts.of(COARSE.repeat(3)[:n])}
    rate = Calibration({0: scores}, shared=False).rule(0, "auto").alpha
    assert smallest <= rate < 1.01 * smallest  # three digits
    assert math.isfinite(scores["nut"].threshold(rate))
    assert math.isinf(scores["nut"].threshold(0.99 * smallest))


def test_from_39_scores_on_one_odd_image_does_not_silence_the_automatic_rate():
    usual, odd = COARSE.repeat(3)[:39], torch.tensor([1e6])
    rule = Calibration({0: {"nut": ScoreCounts.of(torch.cat([usual[:38], odd]))}}, shared=False).rule(
        0, "auto"
    )
    assert rule.alpha == 0.05
    assert rule.threshold <= ScoreCounts.of(usual).edges[-1]


def test_where_a_products_own_scores_can_promise_they_decide_though_all_could_promise_less():
    counts = {
        name: ScoreCounts.of(COARSE.repeat(5)[:n]) for name, n in (("nut", 19), ("bolt", 18), ("gear", 99))
    }
    shared = Calibration({0: counts, 1: {}}, shared=True)
    decided = {name: shared.rule(1, "auto", name) for name in counts}
    assert {name: (rule.alpha, rule.scores.total) for name, rule in decided.items()} == {
        "nut": (0.05, 19),
        "bolt": (0.0527, 18),
        "gear": (0.01, 99),
    }


def test_the_automatic_rate_is_what_each_client_can_promise():
    few, many = (ScoreCounts.of(COARSE.repeat(5)[:n]) for n in (4, 120))
    clients = {0: {"nut": few, "bolt": few}, 1: {"nut": many}, 2: {}}
    own, shared = (Calibration(clients, shared=shared) for shared in (False, True))
    # The first is 1 / (8 + 1), up to three digits.
    assert [own.rule(client, "auto").alpha for client in clients] == [0.112, 0.01, 0.01]
    assert [shared.rule(client, "auto").alpha for client in clients] == [0.01] * 3  # 128 scores
    assert [own.rule(client, 0.3).alpha for client in clients] == [0.3] * 3
    # Of a product with too few scores those of all products decide, at the same rate; who has none decides nothing.
    assert own.rule(0, "auto", "nut").scores.total == 8
    assert math.isinf(own.threshold(2, "auto"))


def test_the_promise_holds_on_average_and_hardly_gives_any_away():
    n, runs, alpha = 39, 400, 0.1
    rates = torch.stack(
        [(drawn(200, 2 * run + 1).double() > ScoreCounts.of(drawn(n, 2 * run)).threshold(alpha)).double().mean()
         for run in range(runs)]
    )  # fmt: skip
    error = float(rates.std()) / math.sqrt(runs)
    assert alpha - 0.01 - 4 * error < float(rates.mean()) < alpha + 4 * error


@pytest.mark.parametrize("alpha", [0.05, "auto"])
@pytest.mark.parametrize("sizes", [(22, 18), (99, 2, 3), (10, 9)])
def test_the_promise_holds_on_the_mean_of_products_with_many_and_with_few_scores(sizes, alpha):
    runs, excess = 300, []
    for run in range(runs):  # scores of a later product lie above those of the ones before
        drawn_scores = [drawn(size + 50, 7 * run + place) + 100 * place for place, size in enumerate(sizes)]
        counts = {str(place): ScoreCounts.of(scores[50:]) for place, scores in enumerate(drawn_scores)}
        rules = [Calibration({0: counts}, shared=True).rule(0, alpha, product) for product in counts]
        alarms = [
            float((scores[:50].double() > rule.threshold).double().mean()) - rule.alpha
            for scores, rule in zip(drawn_scores, rules, strict=True)
        ]
        excess.append(sum(size * alarm for size, alarm in zip(sizes, alarms, strict=True)) / sum(sizes))
    excess = torch.tensor(excess)
    assert float(excess.mean()) < 4 * float(excess.std()) / math.sqrt(runs)


def test_counts_add_up_over_clients_in_any_order():
    parts = [ScoreCounts.of(drawn(20, seed)) for seed in range(3)]
    whole = ScoreCounts.of(torch.cat([drawn(20, seed) for seed in range(3)]))
    for order in (parts, parts[::-1]):
        union = ScoreCounts.union(order)
        assert torch.equal(union.bins, whole.bins)
        assert torch.equal(union.counts, whole.counts)
    assert ScoreCounts.union([]).total == 0


def test_the_most_specific_scores_that_suffice_decide():
    few, many = ScoreCounts.of(COARSE[:5]), ScoreCounts.of(COARSE[:20])
    shared = Calibration({0: {"nut": few}, 1: {"nut": many, "leaf": few, "bud": few}}, shared=True)
    assert shared.rule(0, 0.1, "nut").of == "nut, all clients"
    assert shared.rule(0, 0.1, "nut").scores.total == 25
    assert shared.rule(0, 0.1, "leaf").of == "2 products, all clients"
    assert shared.rule(0, 0.1, "leaf").scores.total == 10
    assert shared.rule(0, 0.03, "leaf").of == "all clients"
    assert shared.rule(0, 0.1, "unseen").of == "all clients"
    assert shared.rule(0, 0.2).of == "client 0"
    assert shared.rule(0, 0.1).of == "all clients"
    own = Calibration(shared.clients, shared=False)
    assert own.rule(1, 0.1, "nut").of == "nut, client 1"
    assert own.rule(1, 0.1, "leaf").of == "2 products, client 1"
    assert own.rule(1, 0.04, "leaf").of == "client 1"
    assert own.rule(0, 0.1, "nut").of == "client 0"
    assert own.threshold(0, 0.1, "nut") == math.inf
    assert own.threshold(7, 0.5) == math.inf
    assert own.rule(1, 0.1, "nut").colour == own.threshold(1, 0.1, "nut") < math.inf
    # Heatmaps without a threshold: the largest calibration score.
    assert own.rule(0, 0.1, "nut").colour == pytest.approx(5, rel=0.01)
    assert own.rule(7, 0.5).colour == 1


@pytest.mark.parametrize("shared", [True, False])
def test_scores_are_added_up_once_for_all_decisions(monkeypatch, shared):
    """Added up anew for each product, client and rate, those of 300 products took days."""
    added, union = [], ScoreCounts.union
    monkeypatch.setattr(ScoreCounts, "union", lambda parts: added.append(1) or union(parts))
    clients, products, alphas = range(4), [f"product {number}" for number in range(9)], (0.05, 0.1, 0.3)
    scores = {client: dict.fromkeys(products, ScoreCounts.of(COARSE[:4])) for client in clients}
    calibration = Calibration(scores, shared)
    for client, product, alpha in itertools.product(clients, [*products, "unseen", None], alphas):
        calibration.rule(client, alpha, product)
    # Of a holder each product's, for each rate those of products with few and of all, and those of all at any rate.
    holders = len(clients) + shared
    assert len(added) <= holders * (len(products) + 2 * len(alphas) + 1)


def test_is_read_back_as_it_was_written():
    ends = ScoreCounts.of(torch.tensor([-math.inf, math.inf]))
    assert ends.bins.tolist() == [0, DEFAULT_BINS.count - 1]
    neighbours = ScoreCounts(torch.tensor([4, 5]), torch.tensor([2, 1]))
    calibration = Calibration(
        {0: {"nut": ScoreCounts.of(COARSE), "bolt": ends, "pin": neighbours}, 3: {}}, shared=True
    )
    again = Calibration.from_json(json.loads(json.dumps(calibration.to_json())))
    assert again.to_json() == calibration.to_json()


@pytest.mark.parametrize(
    "counts",
    [
        {"bins": [1, 2]},
        {"bins": [2, 1, 3], "counts": [1, 1, 1]},
        {"bins": [1, 1], "counts": [1, 1]},
        {"bins": [1], "counts": [0]},
        {"bins": [1], "counts": [1 << 62]},  # of three such bins the sum is negative
        {"bins": [1, 2], "counts": [1, 0]},
        {"bins": [1], "counts": [1, 2]},
        {"bins": [-1], "counts": [1]},
        {"bins": [DEFAULT_BINS.count], "counts": [1]},
        {"bins": "many", "counts": [1]},
        {"bins": [[1]], "counts": [[1]]},
        [],
    ],
)
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(UserError, match="calibration"):
        Calibration.from_json({"shared": True, "clients": {"0": {"nut": counts}}})


@pytest.mark.parametrize(("events", "trials"), [(0, 12), (3, 60), (60, 60)])
def test_the_interval_is_wilsons(events, trials):
    found = binomtest(events, trials).proportion_ci(method="wilson")
    assert wilson_interval(events, trials) == pytest.approx((found.low, found.high), abs=1e-4)


@pytest.mark.parametrize("images", [5, 60, 300, 2000])
def test_a_rate_rounded_up_has_the_threshold_of_the_rate(images):
    """As the operator's page prints it: of 60 images, 1 / 61 to four digits is less than they can promise."""
    scores = ScoreCounts.of(torch.arange(1.0, images + 1))
    for above in range(0, images, 1 + images // 7):
        rate = (1 + above) / (images + 1)
        assert scores.threshold(rounded_up(rate, 4)) == scores.threshold(rate)
