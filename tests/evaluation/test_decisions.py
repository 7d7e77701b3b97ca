"""False alarms and misses of decisions, counted by hand."""

import math

import pytest
import torch

from lit_fedad.evaluation.decisions import (
    EvaluatedImages,
    Rate,
    decide,
    decide_apart,
    mean_interval,
    pooled_intervals,
    pooled_rates,
    product_rates,
    promised_rates,
    rates_of,
    summarise_rates,
)
from lit_fedad.metrics.conformal import Calibration, ScoreCounts, wilson_interval

LABELS = torch.tensor([0, 0, 1, 1, 0, 1, 1])
PRODUCTS = ["nut", "nut", "nut", "nut", "leaf", "leaf", "leaf"]
SCORES = torch.tensor([1.0, 9.0, 9.0, 2.0, 4.0, 30.0, 3.0])
HELD = {0: {"nut": 7}, 1: {"nut": 6, "leaf": 3}}  # in proportion to the normal test images
CALIBRATION = Calibration(
    {
        0: {"nut": ScoreCounts.of(torch.arange(1.0, 6))},
        1: {"leaf": ScoreCounts.of(torch.arange(11.0, 16)), "nut": ScoreCounts.of(torch.arange(1.0, 6))},
    },
    shared=True,
)


def images(known=True, products=PRODUCTS):
    return EvaluatedImages(LABELS, products, HELD, known)


def test_each_product_is_judged_by_its_own_normal_images():
    judged = decide({0: SCORES, 1: SCORES}, images(), CALIBRATION, alpha=0.2)
    # Above 5 a nut is anomalous, above 15 a leaf.
    nuts = {"normal": 2, "false_alarms": 1, "anomalous": 2, "misses": 1}
    leaves = {"normal": 1, "false_alarms": 0, "anomalous": 2, "misses": 1}
    assert vars(judged[0]["own"]) == nuts
    assert vars(judged[0]["foreign"]) == leaves
    both = judged[1]["own"]
    assert both.false_alarm_rate == pytest.approx((6 * 1 / 2 + 3 * 0) / 9)
    assert both.normal == pytest.approx(3)  # weights as the test images: worth all three
    assert both.miss_rate == pytest.approx((6 * 1 / 2 + 3 * 1 / 2) / 9)
    assert vars(judged[1]["products"]["leaf"]) == leaves
    assert judged[0]["without_promise"] == []


@pytest.mark.parametrize(("held", "tested"), [((12, 7), (7, 9)), ((12, 12, 12, 11, 3), (10, 18, 10, 1, 16))])
def test_where_every_defect_is_missed_exactly_all_are(held, tested):
    missed = Rate.mixed([(own, Rate(n, n, n, n)) for own, n in zip(held, tested, strict=True)])
    assert missed.miss_rate == missed.false_alarm_rate == 1


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("alpha", [0.2, "auto"])
def test_sites_that_judge_the_same_images_apart_say_the_same(known, alpha):
    sets, asked = images(known), []

    class Sites:
        clients, rounds = (0, 1, 2), 5

        def ask(self, round, query, clients, optional):
            asked.append((round, query.name, optional))
            rates = rates_of(SCORES, sets, query.numbers)
            return {client: query.unpack(query.pack(rates)) for client in clients if client != 2}

    held = {**HELD, 2: {"leaf": 1}}  # and does not answer
    found = decide_apart(Sites(), CALIBRATION, ["nut", "leaf"], held, alpha, known, shipped=False)
    expected = decide({0: SCORES, 1: SCORES}, sets, CALIBRATION, alpha)
    assert {client: found[client] for client in HELD} == expected
    assert found[2]["own"].normal == found[2]["own"].anomalous == 0
    assert set(asked) == {(5, "further decisions", True)}


def test_a_score_at_the_limit_is_normal():
    found = rates_of(SCORES, images(), {"nut": 9.0, "leaf": 3.0})
    assert vars(found["nut"]) == {"normal": 2, "false_alarms": 0, "anomalous": 2, "misses": 2}
    assert vars(found["leaf"]) == {"normal": 1, "false_alarms": 1, "anomalous": 2, "misses": 1}


def test_without_products_one_threshold_holds_for_all():
    judged = decide({0: SCORES}, images(known=False), CALIBRATION, alpha=0.2)
    assert vars(judged[0]["foreign"]) == {"normal": 1, "false_alarms": 0, "anomalous": 2, "misses": 1}
    judged = decide({0: SCORES}, images(known=False), CALIBRATION, alpha=0.5)  # above 3
    assert vars(judged[0]["foreign"]) == {"normal": 1, "false_alarms": 1, "anomalous": 2, "misses": 1}


def test_false_alarms_stand_beside_the_mean_of_what_the_same_clients_promise():
    clients = {**CALIBRATION.clients, 2: {}, 3: CALIBRATION.clients[1]}  # 5, 10, no and 10 images
    own = Calibration(clients, shared=False)
    untested = EvaluatedImages(LABELS, PRODUCTS, {**HELD, 2: {}, 3: HELD[1]}, known=True)
    promised = promised_rates(decide(dict.fromkeys(range(4), SCORES), untested, own, "auto"))
    assert promised == {"mean": 0.117, "lowest": 0.091, "highest": 0.167}


def test_a_client_promises_the_mean_rate_of_its_products_by_the_scores_of_each():
    """Of 9 scores 0.1 can be promised, of 99 the usual 0.01; the client holds three nuts for each leaf."""
    calibration = Calibration(
        {0: {"nut": ScoreCounts.of(torch.arange(9.0)), "leaf": ScoreCounts.of(torch.arange(99.0))}},
        shared=True,
    )
    held = EvaluatedImages(LABELS, PRODUCTS, {0: {"nut": 3, "leaf": 1}}, known=True)
    judged = decide({0: SCORES}, held, calibration, "auto")[0]
    assert judged["promised"] == pytest.approx((3 * 0.1 + 0.01) / 4)
    assert judged["deciding"] == [9, 99]


def test_a_rate_that_is_given_is_what_is_promised():
    judged = decide({0: SCORES, 1: SCORES}, images(), CALIBRATION, alpha=0.123456)
    assert promised_rates(judged) == dict.fromkeys(("mean", "lowest", "highest"), 0.123456)


def test_what_cannot_be_promised_is_not_called_anomalous():
    judged = decide({0: SCORES}, images(), CALIBRATION, alpha=0.01)
    assert judged[0]["without_promise"] == ["nut", "leaf"]
    assert judged[0]["own"].false_alarms == 0
    assert judged[0]["own"].miss_rate == 1


def test_anomalies_of_no_product_are_every_clients_own():
    products = ["nut", "nut", None, None, "leaf", None, None]
    judged = decide({0: SCORES}, images(known=False, products=products), CALIBRATION, alpha=0.2)
    assert vars(judged[0]["own"]) == {"normal": 2, "false_alarms": 1, "anomalous": 4, "misses": 2}
    assert math.isnan(judged[0]["foreign"].miss_rate)


def test_rates_are_summarised_over_clients():
    judged = decide({0: SCORES, 1: SCORES}, images(), CALIBRATION, alpha=0.2)
    rates = summarise_rates(judged)
    assert rates["false_alarm_rate"]["per_client"] == pytest.approx({0: 1 / 2, 1: 1 / 3})
    assert rates["false_alarm_rate"]["mean"] == pytest.approx(5 / 12)
    assert rates["false_alarm_rate"]["worst"] == 1 / 2
    assert rates["false_alarm_rate"]["pooled"] == pytest.approx(2 / 5)
    assert rates["false_alarm_rate_foreign"]["per_client"][0] == 0
    assert math.isnan(rates["miss_rate_foreign"]["per_client"][1])
    assert rates["miss_rate_foreign"]["mean"] == 1 / 2
    assert pooled_rates(judged)["own"].normal == pytest.approx(5)


def test_products_count_as_often_as_the_client_has_them():
    held = {0: {"nut": 30, "leaf": 10}}
    skewed = EvaluatedImages(LABELS, PRODUCTS, held, known=True)
    own = decide({0: SCORES}, skewed, CALIBRATION, alpha=0.2)[0]["own"]
    assert own.false_alarm_rate == pytest.approx(30 / 40 * 1 / 2 + 10 / 40 * 0)
    assert own.normal == pytest.approx(40**2 / (30**2 / 2 + 10**2 / 1))


def test_products_are_averaged_over_those_that_hold_them_and_the_others():
    judged = decide({0: SCORES, 1: SCORES}, images(), CALIBRATION, alpha=0.2)
    rates = product_rates(judged)
    # Both clients hold nuts and judge the same two normal ones: there are two, not four.
    assert vars(rates["own"]["nut"]) == {"normal": 2, "false_alarms": 1, "anomalous": 2, "misses": 1}
    assert rates["own"]["leaf"] == rates["foreign"]["leaf"]
    assert vars(rates["foreign"]["nut"]) == vars(Rate())
    found = summarise_rates(judged)
    assert found["false_alarm_rate"]["per_product"] == {"nut": 0.5, "leaf": 0.0}
    assert found["false_alarm_rate"]["product_mean"] == 0.25
    assert math.isnan(found["miss_rate_foreign"]["per_product"]["nut"])
    assert found["miss_rate_foreign"]["product_mean"] == 0.5


def test_further_clients_that_judge_the_same_images_make_no_interval_narrower():
    alone = pooled_intervals(decide({0: SCORES}, images(), CALIBRATION, alpha=0.2))
    assert alone["own"] == wilson_interval(1, 2)
    everyone = EvaluatedImages(LABELS, PRODUCTS, {client: {"nut": 7} for client in range(9)}, known=True)
    judged = decide(dict.fromkeys(range(9), SCORES), everyone, CALIBRATION, alpha=0.2)
    assert pooled_rates(judged)["own"].normal == 18
    assert pooled_intervals(judged) == alone
    # Weights that are unequal make two nuts and a leaf worth less than three images.
    skewed = EvaluatedImages(LABELS, PRODUCTS, {0: {"nut": 30, "leaf": 10}}, known=True)
    judged = decide({0: SCORES}, skewed, CALIBRATION, alpha=0.2)
    own = judged[0]["own"]
    assert pooled_intervals(judged)["own"] == pytest.approx(wilson_interval(own.false_alarms, own.normal))
    assert math.isnan(pooled_intervals(judged)["foreign"][0])


def test_the_interval_of_the_mean_is_that_of_the_images_it_is_worth():
    judged = decide({0: SCORES, 1: SCORES}, images(), CALIBRATION, alpha=0.2)
    assert mean_interval({0: judged[0]}) == wilson_interval(1, 2)
    # Nuts are all that client 0 holds and a part of what client 1 does: they weigh more than leaves.
    nuts, leaves = 1 + 2 / 3, 1 / 3
    worth = 2**2 / (nuts**2 / 2 + leaves**2 / 1)
    assert mean_interval(judged) == pytest.approx(wilson_interval(5 / 12 * worth, worth))


def test_both_rates_have_their_interval():
    shown = Rate(normal=100, false_alarms=1, anomalous=10, misses=10).to_json()
    assert shown["interval"] == pytest.approx([0.0018, 0.0545], abs=1e-4)
    assert shown["miss_interval"] == pytest.approx([0.7225, 1.0], abs=1e-4)
