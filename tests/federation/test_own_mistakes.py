"""Mistakes in classes of one's own: the error names the class, the member, and what to give."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from helpers.toy_federation import Slope, ToyClient, ToyServer

from lit_fedad.contracts import Client, Task
from lit_fedad.contracts.server import numbers_of
from lit_fedad.robust.aggregation import RobustAggregation


@pytest.mark.parametrize(
    "given", [None, [1.0], {"spread": "wide"}, {"spread": None}, {"spread": torch.ones(2)}], ids=repr
)
def test_diagnostics_that_are_no_numbers_are_refused(toy, given):
    server = ToyServer()
    server.diagnostics = lambda: given
    with pytest.raises(TypeError, match="^ToyServer: diagnostics gives .*; give a dictionary of numbers$"):
        toy(server=server).run()


@pytest.mark.parametrize("given", [None, "odd clients", ["odd clients", 1], 3], ids=repr)
def test_warnings_that_are_no_texts_are_refused(toy, given):
    server = ToyServer()
    server.warnings = lambda: given
    with pytest.raises(TypeError, match="^ToyServer: warnings gives .*; give a list of texts$"):
        toy(server=server).run()


@dataclass
class OwnRule:
    """A robust rule that returns what the given function makes of the updates."""

    make: Callable

    def __call__(self, updates, spec, previous):
        return self.make(updates)


@pytest.mark.parametrize("within", [lambda rule: rule, lambda rule: RobustAggregation(weights=rule)])
@pytest.mark.parametrize(
    "make",
    [
        lambda updates: updates,
        lambda updates: None,
        lambda updates: (updates, "all are honest"),
        lambda updates: (updates, ["all are honest"]),
        lambda updates: ({client: update.message for client, update in updates.items()}, []),
        lambda updates: ({**updates, 7: updates[0]}, []),
    ],
    ids=["no remarks", "nothing", "a text", "remarks on nobody", "messages", "another client"],
)
def test_a_robust_rule_that_gives_no_updates_and_remarks_is_refused(toy, make, within):
    with pytest.raises(TypeError, match="^OwnRule gives a .*; give two: .* updates .* remarks"):
        toy(robust=within(OwnRule(make))).run()


def test_a_tensor_of_one_number_is_recorded_as_a_number():
    server = ToyServer()
    server.diagnostics = lambda: {"spread": torch.tensor(0.5), "kept": 3}
    assert numbers_of(server) == {"spread": 0.5, "kept": 3.0}
    assert {type(value) for value in numbers_of(server).values()} == {float}


def test_a_defect_in_a_continued_run_is_not_taken_for_a_bad_checkpoint(toy):
    toy(rounds=2).run()
    server = ToyServer()
    server.broadcast = lambda client: {"w": server.weight}
    with pytest.raises(AttributeError, match="weight") as caught:
        toy(rounds=3, server=server).run()
    assert caught.value.__notes__[0].endswith("checkpoints/round_100002.")


@pytest.mark.parametrize(
    "given", [torch.ones(()), {"lost": torch.ones(())}, {"loss": 1.0}, {"loss": torch.ones(2)}], ids=repr
)
def test_a_training_step_without_a_loss_is_refused(toy, given):
    task = Slope()
    task.training_step = lambda batch, batch_idx=0: given
    with pytest.raises(TypeError, match="^training_step of ToyClient and Slope: give a dictionary"):
        toy(client=ToyClient(task)).run()


@pytest.mark.parametrize("listed", ["local_buffers", "free_buffers"])
def test_a_misspelt_buffer_is_refused_since_it_would_be_shared(listed):
    """A buffer of local data that ``local_buffers`` does not list is sent as running statistics are."""
    task = type("Own", (Task,), {listed: ("bnak",)})()
    task.register_buffer("bank", torch.zeros(1))
    with pytest.raises(TypeError, match=r"^Own: .* names \['bnak'\]"):
        Client(task)
