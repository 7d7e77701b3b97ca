"""What a run ends with: four rows, each with a word, and what a client alone would find."""

from __future__ import annotations

import math

import pytest

from lit_fedad.report.closing import closing_rows, constant_predictions, in_words
from lit_fedad.report.console import Display


def metric(mean, worst=0.5):
    return {"mean": mean, "worst": worst, "pooled": mean, "per_client": {"0": mean}}


LAST = {
    "round": 6,
    "i_auroc": metric(0.85),
    "p_auroc": metric(0.9),
    "pro": metric(0.7),
    "f1_max": metric(0.6),
    "false_alarm_rate": metric(0.02, 0.05),
    "miss_rate": metric(0.25, 0.4),
}


def test_a_detector_has_four_rows_and_each_says_what_is_better():
    promised = {"mean": 0.072, "lowest": 0.01, "highest": 0.334}
    rows = closing_rows({"last": LAST, "decisions": {"auto": {"promised": promised}}})
    assert [row["last round"] for row in rows] == ["I-AUROC", "PRO", "false alarms", "misses"]
    assert [row["together"] for row in rows] == ["0.850", "0.700", "0.020", "0.250"]
    assert [row["worst client"] for row in rows] == ["0.500", "0.500", "0.050", "0.400"]
    assert [("higher" in row["what it tells"], "lower" in row["what it tells"]) for row in rows] == [
        (True, False),
        (True, False),
        (False, True),
        (False, True),
    ]
    assert "at most 0.072 promised (0.01 to 0.334 by client)" in rows[2]["what it tells"]
    assert not any("promised" in rows[place]["what it tells"] for place in (0, 1, 3))


def test_false_alarms_are_said_with_their_interval():
    (line,) = in_words({"last": LAST, "decisions": {"auto": {"false_alarm_interval": [0.004, 0.081]}}})
    assert line.endswith("at 2 false alarms in 100 normal images (95 % interval 0 to 8)")
    normal = {**LAST, "miss_rate": metric(math.nan)}  # nothing tells how many defects are found
    for last in (normal, {name: value for name, value in LAST.items() if name != "miss_rate"}):
        assert in_words({"last": last}) == ["as shipped, 2 false alarms in 100 normal images"]


def test_the_promise_has_the_same_digits_in_the_table_and_the_sentence():
    result = {
        "last": LAST,
        "decisions": {"auto": {"promised": {"mean": 0.1124, "lowest": 0.1, "highest": 0.2}}},
    }
    assert "at most 0.112 promised" in closing_rows(result)[2]["what it tells"]
    assert in_words(result)[0].endswith("at most 11.2 promised")


def test_without_calibration_images_nothing_is_said_to_be_promised():
    silent, half = (
        {"products": {"nut": {}, "bolt": {}}, "without_promise": names}
        for names in (["nut", "bolt"], ["nut"])
    )
    promised = {"mean": 0.01, "lowest": 0.01, "highest": 0.01}
    for clients, said in ([silent, silent], "nothing is promised"), ([silent, half], "at most 0.01 promised"):
        shipped = {"promised": promised, "clients": dict(enumerate(clients))}
        assert said in closing_rows({"last": LAST, "decisions": {"auto": shipped}})[2]["what it tells"]
    shipped["clients"] = {0: {"products": {"nut": {}}, "without_promise": ["nut"]}}  # the one product of all
    assert "nothing is" in closing_rows({"last": LAST, "decisions": {"auto": shipped}})[2]["what it tells"]


def test_what_finds_nothing_but_for_rounding_is_not_said_to_find():
    assert in_words({"last": {**LAST, "miss_rate": metric(1 - 2e-16)}}) == []


def test_images_of_foreign_classes_are_no_defects_of_products():
    last = {"auroc": metric(0.7), "false_alarm_rate": metric(0.1), "miss_rate": metric(0.25)}
    (line,) = in_words({"last": last})
    assert (
        line
        == "as shipped, finds 75 of 100 images of foreign classes at 10 false alarms in 100 normal images"
    )


def test_of_errors_less_is_better_and_more_predicted_classes_are_not_said_to_be():
    rows = closing_rows(
        {"last": {name: metric(0.3) for name in ("fe_calibrated", "aupr", "predicted_classes")}}
    )
    words = {row["last round"]: row["what it tells"] for row in rows}
    assert words == {
        "FE calibrated": "lower is better",
        "AUPR": "higher is better",
        "classes predicted": "of all test images: 1 is a constant prediction",
    }


def test_what_a_client_reaches_alone_stands_beside():
    rows = closing_rows({"last": LAST, "alone": {"metrics": {"i_auroc": metric(0.55)}}})
    assert [row["alone"] for row in rows] == ["0.550", "-", "-", "-"]
    assert rows[0]["together"] == "0.850"


def test_where_nobody_holds_a_product_with_defects_nothing_is_said_of_own_products():
    found = {"all": 0.6, "own": math.nan}
    (line,) = in_words(
        {"last": {}, "alone": {"found": dict.fromkeys(["together", "alone"], found), "at_false_alarms": 0}}
    )
    assert line.endswith("finds 60 of 100 defects of all products, a client alone 60")


def test_without_masks_there_is_no_row_of_them():
    last = {**LAST, "pro": {"mean": math.nan, "worst": None}}
    assert [row["last round"] for row in closing_rows({"last": last})] == [
        "I-AUROC",
        "false alarms",
        "misses",
    ]


def test_a_classifier_has_rows_of_its_own():
    last = {"round": 1, "accuracy": metric(0.8), "own_accuracy": metric(0.9), "fe_svhn": metric(0.1)}
    assert [row["last round"] for row in closing_rows({"last": last})] == ["accuracy", "own accuracy"]
    assert in_words({"last": last}) == []


def test_a_detector_that_can_promise_nothing_is_said_to_find_nothing():
    assert in_words({"last": {**LAST, "miss_rate": metric(1.0)}}) == []


def metrics(*predicted):
    return {"accuracy": {"mean": 0.5}, "predicted_classes": {"per_client": dict(enumerate(predicted))}}


@pytest.mark.parametrize(
    ("predicted", "line"),
    [
        ((2.0, 3.0), None),
        ((math.nan, 2.0), None),
        ((4.0, 1.0), "client 1 predicts a single class for every test image; its accuracy is that class's share"),
        ((1.0, 4.0, 1.0), "2 of 3 clients (0, 2) predict a single class for every test image; their"),
        ((1.0, 1.0), "all 2 clients predict a single class for every test image; their"),
        ((*[1.0] * 12, 5.0), "12 of 13 clients (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...) predict"),
    ],
)  # fmt: skip
def test_who_predicts_one_class_alone(predicted, line):
    found = constant_predictions(metrics(*predicted))
    assert found is None if line is None else found.startswith(line)


def test_where_no_classes_are_predicted_nobody_is_named():
    assert constant_predictions({}) is None
    assert constant_predictions({"round": 3, "i_auroc": {"mean": 1.0, "per_client": {0: 1.0}}}) is None


def test_the_closing_table_names_who_does_in_the_last_round(capsys):
    """Results are read from JSON, where clients are texts."""
    last = {"round": 7, "accuracy": {"mean": 0.6}, "predicted_classes": {"per_client": {"0": 4.0, "1": 1.0}}}
    Display().closing_table({"last": last, "bytes_up": [1], "bytes_down": [1], "seconds_per_round": [1.0]})
    sentence = "client 1 predicts a single class for every test image; its accuracy is that class's share"
    assert sentence in capsys.readouterr().out.splitlines()
