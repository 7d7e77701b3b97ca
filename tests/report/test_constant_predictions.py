"""Whoever predicts one class alone is named."""

import math

import pytest

from lit_fedad.report.closing import constant_predictions
from lit_fedad.report.console import Display


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
