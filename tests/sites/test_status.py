"""What a coordinator's operator reads of every site."""

from collections import defaultdict

from lit_fedad.federation.round_report import RoundReport
from lit_fedad.sites.status import Contact, Status


def test_an_exchange_before_round_1_is_no_round_and_has_its_name():
    history = [
        RoundReport(-1, "moments", [0, 1]),
        RoundReport(0, "memory", [0], failures={1: "no answer within 3 s"}),
        RoundReport(1, "train", [0]),
    ]
    found = Status({0: "north", 1: "east"}, defaultdict(Contact)).sites(history, {})
    assert [(own["rounds"], own["last_round"]) for own in found.values()] == [(1, 1), (0, None)]
    assert found["east"]["troubles"] == ["set-up memory: no answer within 3 s"]
