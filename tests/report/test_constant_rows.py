"""Rows of predictions that look at no image: where they come from, and where there are none."""

import pytest

from lit_fedad.papers.paper import FilledTable, constant_rows
from lit_fedad.report.closing import CONSTANT_LABELS as LABELS
from lit_fedad.report.closing import looking_at_nothing
from lit_fedad.report.tables import Outcome, Row, Table, results_grid

TABLE = Table(
    "Title", "Table 1", ["accuracy"], "method", {"A": "a"}, [], [Row("Local", ()), Row("Pooled", ())]
)


def result(value, clients=2, constants=True):
    moments = {m: {"round": 4, "accuracy": {"mean": value}} for m in ("first", "last", "best")}
    return {
        **moments,
        "data": "a",
        "constants": {
            name: {"4": {"accuracy": value / 2 + number / 10}} for number, name in enumerate(LABELS)
        }
        if constants
        else {},
        "milestones": [4],
        "metrics": {"4": {"accuracy": value}},
        "rounds": 4,
        "partition": {"strategy": "IID", "sizes": [5] * clients},
        "backbone": {"name": "none", "taken": "none"},
        "exchanges": [4],
        "bytes_up": [1],
        "bytes_down": [1],
        "seconds_per_round": [1.0],
        "scalars": [{}],
        "tracking_run_id": None,
        "config": {"image": {"size": 32}, "task": {}, "method": {"client": {}}},
    }


def test_they_come_from_a_run_with_most_clients_of_each_seed():
    outcomes = [
        Outcome("Pooled", "A", 0, "p", result(0.9, clients=1)),
        Outcome("Local", "A", 0, "l", result(0.4)),
        Outcome("Local", "A", 1, "m", result(0.6), ending="_lp"),
        Outcome("Local", "B", 0, "n"),
    ]
    rows, frame = constant_rows(outcomes, TABLE.metrics)
    assert set(frame[["row", "column", "seed", "folder"]].itertuples(index=False, name=None)) == {
        (label, "A", seed, folder) for label in LABELS.values() for seed, folder in ((0, "l"), (1, "m"))
    }
    grid = results_grid(TABLE, rows, {"A": "a"}, frame, lambda row, column: None, "")
    # Means of .2 and .3, .3 and .4, .4 and .5, after the last and, in brackets, the best round.
    assert [line.cells[1].text for line in grid.lines] == [
        "25.00 ± 7.07 [25.00]",
        "35.00 ± 7.07 [35.00]",
        "45.00 ± 7.07 [45.00]",
    ]


def test_the_files_have_them_below_the_rows():
    outcomes = [Outcome("Local", "A", 0, "l", result(0.4))]
    *_, costs, constants = FilledTable("x", TABLE, {"A": "a"}, outcomes).grids()
    assert constants.title == "Title: predictions that look at no image"
    assert [cell.text for cell in constants.lines[0].cells] == [
        "always the client's largest class",
        "20.00 [20.00]",
    ]
    assert any("1 of 1 runs complete" in note for note in costs.notes)


@pytest.mark.parametrize(
    "outcome", [Outcome("Local", "A", 0, "l"), Outcome("Local", "A", 0, "l", result(1, constants=False))]
)
def test_without_a_classification_there_are_none(outcome):
    assert constant_rows([outcome], TABLE.metrics) is None


def test_a_run_ends_with_what_looking_at_nothing_gives():
    assert looking_at_nothing(result(0.4)) == (
        "Without a look at images, accuracy: always the client's largest class 0.200, always the largest class of all"
        " clients 0.300, a class of the client's at random 0.400."
    )
    assert looking_at_nothing(result(0.4, constants=False)) is None
