"""Every method on its own task, every task under a method, others at night: failures, an interruption, a use."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.pairs import IN_STAGES, PAIRS, STREAM, TASKS
from helpers.refusals import refusal

from lit_fedad.core.config_groups import choices
from lit_fedad.federation.client_runner import ClientRunner

# The others in the slow tests.
QUICK = {("moon", "classifier")}


def tasks_of(method, refused=False):
    return [task for task in TASKS if bool(PAIRS[method, task]) == refused]


def own_task(method):
    """What its paper learns: classes, where it works with several tasks."""
    tasks = tasks_of(method)
    return "classifier" if "classifier" in tasks else tasks[0]


def others_of(method):
    return [task for task in tasks_of(method)[1:] if task not in DEAR]


# Played under FedAvg alone: a round of them takes many times as long as one of the others.
DEAR = {"reverse_distillation", "efficient_ad", "dinomaly"}
# Of these a further task is played too, if it is not their own: each handles weights in a way of its own.
TWICE = (
    "apfl",
    "apple",
    "dbe",
    "ditto",
    "fedadam",
    "feddyn",
    "fednova",
    "fedphp",
    "moon",
    "pfedme",
    "scaffold",
)
AT_NIGHT = {
    *((method, tasks_of(method)[0]) for method in choices("method")),
    *(
        (method, others[turn % len(others)])
        for turn, method in enumerate(TWICE)
        if (others := others_of(method))
    ),
}
# Of each method its own task; each task under FedAvg, or alone if it has no weights.
PLAYED = {
    *QUICK,
    *((method, own_task(method)) for method in choices("method")),
    *(("local" if PAIRS["fedavg", task] else "fedavg", task) for task in TASKS),
}
# One for each reason; which pairs these are is checked above for all.
REFUSED = [
    ("federated_bank", "classifier"),
    ("fedrep", "memory_bank"),
    ("fedavg", "subspace"),
    ("gldp", "contrastive"),
]


def test_pairs_are_what_methods_and_tasks_declare():
    """A few of them by hand: what is derived is not empty, nor everything."""
    assert (
        PAIRS["fedavg", "memory_bank"]
        is PAIRS["moon", "classifier"]
        is PAIRS["fadngs", "contrastive"]
        is None
    )
    assert "works with task MemoryBank" in PAIRS["federated_bank", "classifier"]
    assert "works with task Classifier" in PAIRS["gldp", "contrastive"]
    assert "keeps heads personal" in PAIRS["fedrep", "memory_bank"]
    assert "has no weights to share" in PAIRS["fedavg", "subspace"]
    assert PAIRS["federated_subspace", "subspace"] is PAIRS["local", "subspace"] is None
    assert all(None in {PAIRS[method, task] for task in TASKS} for method in choices("method"))


def test_the_played_pairs_hold_every_method_and_every_task():
    assert {method for method, _ in PLAYED} == {*choices("method")}
    assert {task for _, task in PLAYED} == {*TASKS}


@pytest.mark.parametrize(
    ("method", "task"),
    [
        *(
            pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow)
            for pair in PAIRS
            if pair in PLAYED
        ),
        *(
            pytest.param(*pair, marks=[pytest.mark.slow, pytest.mark.nightly])
            for pair in sorted(AT_NIGHT - PLAYED)
        ),
    ],
)
def test_pair(play_pair, method, task):
    play_pair(method, task)


@pytest.mark.slow
def test_a_failed_client_is_left_out_of_its_round(lab, pair_overrides, tmp_path, monkeypatch):
    given = [*pair_overrides("fedavg", "memory_bank"), "federation.sampler.fraction=1.0"]
    play = ClientRunner.play

    def play_but_for_one(runner, exchange, data, mask=None):
        if exchange.trains and runner.client.context.client == 1:
            raise RuntimeError("out of memory")
        return play(runner, exchange, data, mask)

    with monkeypatch.context() as patch:
        patch.setattr(ClientRunner, "play", play_but_for_one)
        result = lab.train(tmp_path, *given)
    whole = result["elements_up"][-1] // 3
    assert result["elements_up"][-2:] == [3 * whole, 3 * whole]
    assert all(torch.isfinite(torch.tensor(s["loss"])) for s in result["scalars"][-2:])


@pytest.mark.parametrize(("method", "task"), REFUSED)
def test_a_pair_that_makes_no_sense_says_why_in_one_line(lab, small_tasks, method, task, tmp_path):
    # Sizes of the small tasks meet no key where the method comes with the settings of its own.
    data = [override for override in small_tasks[task] if "data" in override]
    data += STREAM if method in IN_STAGES else []
    with refusal(re.escape(PAIRS[method, task])):
        lab.train(tmp_path, f"method={method}", f"task={task}", *data)
