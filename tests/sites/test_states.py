"""A site's personal states on its own disk."""

import pytest
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.sites.messages import MOST_STEPS, Request
from lit_fedad.sites.states import States, digest_of

INITIAL = {"w": torch.zeros(2), "contacts": 0}


def test_states_are_found_by_step(tmp_path):
    states = States(tmp_path / "run", INITIAL, images="some", model="one")
    states.put(3, {"w": torch.ones(2), "contacts": 1})
    states.put(5, {"w": torch.ones(2) * 2, "contacts": 2})
    again = States(tmp_path / "run", INITIAL, images="some", model="one")  # as after a restart
    assert [again.get(step)["contacts"] for step in (0, 3, 5)] == [0, 1, 2]
    again.get(0)["w"].add_(1)
    assert again.get(0)["w"].tolist() == [0, 0]


def test_settled_states_go_but_not_the_one_to_start_from(tmp_path):
    states = States(tmp_path, INITIAL, images="some", model="one")
    for step in (1, 2, 3, 4):
        states.put(step, {"contacts": step})
    states.settle(settled=3, base=2)
    assert [states.get(step)["contacts"] for step in (2, 3, 4)] == [2, 3, 4]
    with pytest.raises(UserError, match="no state of step 1 of this run: its folder was cleared"):
        states.get(1)


@pytest.mark.parametrize("other", ["images", "model"])
def test_a_run_goes_on_with_what_it_began_with(tmp_path, other):
    marks = {"images": "some", "model": "one"}
    States(tmp_path, INITIAL, **marks).begin()
    with pytest.raises(UserError, match=f"has (an)?other {other} than when this run began; give back"):
        States(tmp_path, INITIAL, **{**marks, other: "another"})


def test_a_damaged_state_is_refused(tmp_path):
    states = States(tmp_path, INITIAL, images="some", model="one")
    states.put(1, {"contacts": 1})
    (tmp_path / f"{1:012d}.pt").write_bytes(b"half")
    with pytest.raises(UserError, match=r"cannot be read .*restore it from a copy, or begin another run"):
        states.get(1)


def test_states_that_nobody_settles_do_not_fill_the_disk(tmp_path):
    states = States(tmp_path, {"w": torch.zeros(1)})
    for step in range(1, 65):
        states.put(step, {})
    states.put(64, {})  # asked again
    with pytest.raises(UserError, match="holds 64 states"):
        states.put(65, {})
    states.settle(60, 60)
    states.put(65, {})


def test_a_run_has_no_step_whose_state_would_be_neither_counted_nor_removed(tmp_path):
    states = States(tmp_path, INITIAL)
    states.put(MOST_STEPS - 1, {})
    states.settle(MOST_STEPS, 0)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="out of range"):
        Request("play", "0123456789abcdef", [], 0, step=MOST_STEPS).check()


def test_digests_tell_states_apart():
    whole = {"a": torch.arange(4), "b": [torch.zeros((), dtype=torch.bfloat16), None, 1.5]}
    assert digest_of(whole) == digest_of({"b": whole["b"], "a": whole["a"].clone()})
    for other in (
        {**whole, "a": torch.arange(4).float()},
        {**whole, "a": torch.arange(4).reshape(2, 2)},
        {**whole, "b": [whole["b"][0], None, 2.5]},
        {"c": whole["a"], "b": whole["b"]},
    ):
        assert digest_of(other) != digest_of(whole)
