"""What a coordinator's operator reads of every site."""

import math
from collections import defaultdict
from types import SimpleNamespace

from helpers.strict_json import strict_json

from lit_fedad.federation.round_report import RoundReport
from lit_fedad.sites.status import Contact, Status, status_rows


def test_an_exchange_before_round_1_is_no_round_and_has_its_name():
    history = [
        RoundReport(-1, "moments", [0, 1]),
        RoundReport(0, "memory", [0], failures={1: "no answer within 3 s"}),
        RoundReport(1, "train", [0]),
    ]
    found = Status({0: "north", 1: "east"}, defaultdict(Contact)).sites(history, {})
    assert [(own["rounds"], own["last_round"]) for own in found.values()] == [(1, 1), (0, None)]
    assert found["east"]["troubles"] == ["set-up memory: no answer within 3 s"]


def test_a_site_has_its_last_round_and_each_trouble_once():
    late, wrong = {1: "no answer within 3 s"}, {1: "sent 'w' with values that are not finite"}
    history = [
        RoundReport(1, "train", [0, 1], unscored=late),
        RoundReport(2, "train", [0], failures=late, unscored=late),
        RoundReport(3, "train", [0, 1]),
        RoundReport(4, "train", [0], refused=wrong),
    ]
    east = Status({0: "north", 1: "east"}, defaultdict(Contact)).sites(history, {})["east"]
    assert (east["rounds"], east["last_round"]) == (2, 3)
    assert east["troubles"] == [f"round 1: {late[1]}", f"round 2: {late[1]}", f"round 4: {wrong[1]}"]


def test_the_time_of_a_site_is_that_of_all_its_answers():
    contact = Contact()
    contact.note(1.0)
    contact.note(2.0)
    assert contact.seconds == 3.0


def test_why_a_site_takes_no_part_is_its_trouble():
    status = Status({0: "north", 1: "east"}, defaultdict(Contact))
    status.absent = {1: "site east has another backbone"}
    found = status.sites([RoundReport(1, "train", [0])], {})
    assert [own["troubles"] for own in found.values()] == [
        [],
        ["takes no part: site east has another backbone"],
    ]


def test_a_rate_that_nobody_has_told_is_a_dash():
    rates = {"false_alarm_rate": {"per_client": {0: 0.25, 1: math.nan}}}
    sites = Status({0: "north", 1: "east", 2: "south"}, defaultdict(Contact)).sites([], rates)
    assert [row["false alarms"] for row in status_rows(sites)] == ["0.250", "-", "-"]


def test_the_file_has_the_rates_of_the_run_and_null_where_nobody_has_told_one(tmp_path):
    status = Status({0: "north", 1: "east"}, defaultdict(Contact))
    federation = SimpleNamespace(history=[RoundReport(1, "train", [0])], rounds=1)
    rates = {"false_alarm_rate": {"per_client": {0: math.nan, 1: 0.25}}}
    run = SimpleNamespace(
        folder=SimpleNamespace(path=tmp_path), federation=federation, rates=rates, extras={}
    )
    status.on_run_start(run)
    status.on_rounds_end(run)
    written = strict_json(tmp_path / "status.json")["sites"]
    assert [site["false_alarm_rate"] for site in written.values()] == [None, 0.25]
