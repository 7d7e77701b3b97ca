"""What a client or server keeps between rounds: read, written back, copied and compared as nested values."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lit_fedad.contracts.state import load_state, mapped, same, state_of, take_sizes
from lit_fedad.core.errors import UserError

Pair = namedtuple("Pair", "mean count")


class Base:
    state_names = ("head",)

    def __init__(self):
        self.head = nn.Linear(2, 1)


class Holder(Base):
    state_names = ("counts",)

    def __init__(self):
        super().__init__()
        self.counts = {"seen": 0}


def test_modules_keep_their_identity_and_take_the_stored_weights():
    """An optimiser holds the module's own parameters: another module in its place would never train."""
    first, second = Holder(), Holder()
    head, stored = second.head, state_of(first)
    with torch.no_grad():
        first.head.weight.add_(1)  # what was stored before does not follow
    load_state(second, stored)
    assert second.head is head
    assert torch.equal(first.head.weight, second.head.weight + 1)


def test_a_loaded_dictionary_may_change_without_the_stored_one():
    holder, stored = Holder(), {**state_of(Holder()), "counts": {"seen": 3}}
    load_state(holder, stored)
    holder.counts["seen"] += 1
    assert (holder.counts, stored["counts"]) == ({"seen": 4}, {"seen": 3})


def test_named_tuples_stay_what_they_are():
    doubled = mapped(Pair(torch.ones(2), 3), lambda value: value * 2)
    assert (type(doubled), doubled.mean.tolist(), doubled.count) == (Pair, [2, 2], 6)


@dataclass(frozen=True)
class Part:
    values: torch.Tensor


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {"a": 1.0}, False),
        ([1], [1, 1], False),
        (Part(torch.ones(2)), Part(torch.ones(2)), True),
        (Part(torch.ones(2)), Part(torch.zeros(2)), False),
        (Part(torch.ones(2)), Part(torch.ones(2, dtype=torch.int64)), False),
        (torch.ones(1), 1.0, False),
        ({}, {}, True),
        ({"a": {}}, {"a": ()}, False),
    ],
)
def test_states_are_the_same_where_names_types_and_values_are(one, other, equal):
    assert same(one, other) is equal


def test_buffers_take_the_sizes_of_a_state_that_has_them():
    module = nn.Module()
    module.register_buffer("bank", torch.zeros(0, 2))
    module.register_buffer("radii", torch.zeros(0))
    take_sizes(module, ["bank", "radii"], {"memory.bank": torch.ones(5, 2)}, "memory.")
    assert (tuple(module.bank.shape), tuple(module.radii.shape)) == ((5, 2), (0,))


def test_a_misspelt_name_of_state_is_told_and_a_defect_of_a_property_is_not_taken_for_one():
    class Misspelt:
        state_names = ("velocty",)
        velocity = 0

    class Defective:
        state_names = ("velocity",)

        @property
        def velocity(self):
            return None.speed

    with pytest.raises(UserError, match="^Misspelt: state_names has 'velocty', an attribute that it lacks"):
        state_of(Misspelt())
    with pytest.raises(AttributeError, match="speed"):
        state_of(Defective())
