"""Which images a client holds in which round."""

from fractions import Fraction

import pytest
import torch
from helpers.refusals import refusal
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.stream import StreamDataModule


class Indices(Dataset):
    """Images that are their own positions."""

    def __len__(self):
        return 100

    def __getitems__(self, indices):
        return {"index": torch.tensor(indices)}


def stream(*lengths, rounds=12, **settings) -> StreamDataModule:
    """Each client has so many stages; stage m of client c holds images 20 c + 3 m, ... of which there are m + 1."""
    stages = [
        [[20 * c + 3 * m + i for i in range(m + 1)] for m in range(own)] for c, own in enumerate(lengths)
    ]
    return StreamDataModule(Indices(), Indices(), stages, rounds, **settings)


def held(module, client, round) -> list[int]:
    loader = module.at(round).client_loader(client, torch.Generator(), shuffle=False)
    return torch.cat([batch["index"] for batch in loader]).tolist()


def stage_numbers(module, client=0) -> list[int]:
    return [module.at(round).stages[client] for round in range(1, module.rounds + 1)]


def test_each_stage_lasts_its_share_of_the_rounds_and_never_comes_again():
    assert stage_numbers(stream(3)) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert stage_numbers(stream(5, rounds=12)) == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert stage_numbers(stream(1)) == [0] * 12


@given(stages=st.integers(1, 9), more=st.integers(0, 40))
def test_every_stage_comes_in_order_and_none_lasts_longer_by_two_rounds(stages, more):
    module = StreamDataModule(Indices(), Indices(), [[[0]] * stages], stages + more)
    at = stage_numbers(module)
    assert at == [int(Fraction((round - 1) * stages, module.rounds)) for round in range(1, module.rounds + 1)]
    assert at == sorted(at)
    lasts = [at.count(stage) for stage in range(stages)]
    assert min(lasts) >= 1
    assert max(lasts) - min(lasts) <= 1


def test_literal_stages_come_in_turns():
    module = stream(5, 2, rounds=7, schedule="literal")
    assert stage_numbers(module) == [0, 1, 2, 3, 4, 0, 1]
    assert stage_numbers(module, client=1) == [0, 1, 0, 1, 0, 1, 0]
    assert module.stage_rounds == [[1], [2], [3], [4], [5]]


def test_stages_that_come_again_are_judged_in_the_last_ten_turns():
    module = stream(3, 2, rounds=37, schedule="literal")
    assert module.stage_rounds == [list(range(7 + stage, 37, 3)) for stage in range(3)]
    assert [len(rounds) for rounds in module.stage_rounds] == [10, 10, 10]
    for stage, rounds in enumerate(module.stage_rounds):
        assert {module.stage(0, round) for round in rounds} == {stage}
    assert module.milestones == set(range(7, 37))


def test_clients_with_fewer_stages_have_longer_ones():
    module = stream(2, 3, rounds=6)
    assert [module.at(round).stages for round in range(1, 7)] == [
        {0: 0, 1: 0}, {0: 0, 1: 0}, {0: 0, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 2}, {0: 1, 1: 2},
    ]  # fmt: skip


def test_milestones_are_the_last_rounds_of_stages():
    assert stream(3).milestones == {4, 8, 12}
    assert stream(2, 3, rounds=6).milestones == {2, 3, 4, 6}
    assert stream(1, rounds=5).milestones == {5}
    assert stream(3, rounds=3).milestones == {1, 2, 3}


def test_clients_hold_the_images_of_their_stage_alone():
    module = stream(2, 3, rounds=6)
    for round in range(1, 7):
        now = module.at(round)
        for client in (0, 1):
            stage = module.stage(client, round)
            assert held(module, client, round) == list(module.by_stage[client][stage])
            assert now.sizes[client] == stage + 1
            assert now.stages[client] == stage


def test_before_round_one_clients_hold_their_first_stage():
    module = stream(2, 3, rounds=6)
    for round in (-2, 0):
        assert module.at(round).stages == {0: 0, 1: 0}
        assert held(module, 1, round) == [20]


def test_rounds_may_be_asked_in_any_order():
    module = stream(3, rounds=6)
    assert [held(module, 0, round) for round in (6, 1, 3, 3, 1)] == [[6, 7, 8], [0], [3, 4], [3, 4], [0]]
    assert module.at(5) is module.at(6)


def test_apart_from_rounds_clients_hold_all_their_images():
    module = stream(2, 3, rounds=6, batch_size=2)
    assert module.sizes == {0: 3, 1: 6}
    assert sorted(torch.cat([b["index"] for b in module.client_loader(0, torch.Generator())]).tolist()) == [
        0, 3, 4,
    ]  # fmt: skip
    assert module.at(6).client_loader(1, torch.Generator()).batch_size == 2


def test_without_stages_nothing_changes_with_the_rounds():
    module = FederatedDataModule(Indices(), Indices(), [[1, 2], [3]])
    assert module.at(7) is module
    assert module.stages == {0: 0, 1: 0}
    assert module.milestones == frozenset()


@pytest.mark.parametrize("schedule", ["stage_major", "literal"])
def test_fewer_rounds_than_stages_are_refused_in_one_line(schedule):
    with refusal("rounds=3, but images come in 4 stages: give at least as many"):
        stream(2, 4, 3, rounds=3, schedule=schedule)
    with refusal("rounds=0, but images come in 1 stage: give"):
        stream(1, 1, rounds=0, schedule=schedule)
    assert stage_numbers(stream(2, 4, rounds=4, schedule=schedule), client=1) == [0, 1, 2, 3]


def test_an_unknown_schedule_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^partition schedule=bogus: give stage_major or literal$"):
        stream(2, rounds=4, schedule="bogus")
