"""Who takes part."""

import pytest

from lit_fedad.contracts import Context
from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler


def test_set_up_takes_in_everyone():
    assert ClientSampler(fraction=0.1).sample(range(10), Context(0, 0)) == list(range(10))


def test_a_round_can_be_replayed_and_differs_from_others():
    half = ClientSampler(fraction=0.5)
    picks = [tuple(half.sample(range(20), Context(0, round))) for round in range(1, 30)]
    assert picks == [tuple(half.sample(range(20), Context(0, round))) for round in range(1, 30)]
    assert all(len(set(pick)) == 10 and list(pick) == sorted(pick) for pick in picks)
    assert len(set(picks)) > 25
    assert set().union(*picks) == set(range(20))


def test_min_clients_beats_the_fraction():
    assert len(ClientSampler(fraction=0.01, min_clients=3).sample(range(10), Context(0, 1))) == 3


def test_bad_settings_are_one_line():
    with pytest.raises(UserError, match="fraction=0"):
        ClientSampler(fraction=0)
    with pytest.raises(UserError, match="on_failure='ignore'"):
        ClientSampler(on_failure="ignore")
    with pytest.raises(UserError, match="min_clients=4, but only 3"):
        ClientSampler(min_clients=4).sample(range(3), Context(0, 1))


def test_picks_may_be_held_for_several_rounds():
    held, fresh = ClientSampler(fraction=0.5, resample_every=3), ClientSampler(fraction=0.5)
    picks = [held.sample(range(20), Context(0, round)) for round in range(1, 13)]
    assert picks == [fresh.sample(range(20), Context(0, first)) for first in (1, 4, 7, 10) for _ in range(3)]
    assert len(set(map(tuple, picks))) == 4
    assert held.sample(range(20), Context(0, 0)) == list(range(20))
    with pytest.raises(UserError, match="resample_every=0 must be at least 1"):
        ClientSampler(resample_every=0)


@pytest.mark.parametrize(("failed", "end"), [(5, "client 4: lost 4"), (7, "client 4: lost 4; and 2 more")])
def test_a_failure_names_five_clients_and_counts_the_others(failed, end):
    with pytest.raises(UserError, match=f"^round 3, client 0: lost 0; .*{end}$"):
        ClientSampler().check_failures({f"client {number}": f"lost {number}" for number in range(failed)}, 3)


def test_a_cause_that_clients_share_is_told_once():
    with pytest.raises(UserError, match="^round 3, north, west: too few images; east: lost$"):
        ClientSampler().check_failures(
            {"north": "too few images", "east": "lost", "west": "too few images"}, 3
        )
