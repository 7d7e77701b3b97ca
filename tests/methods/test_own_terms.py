"""By default every method's own part changes what is learnt; the guide names the exceptions."""

import pytest
import torch
import yaml
from helpers.feddm import loader, make
from torch import Tensor

from lit_fedad.core.building import locate
from lit_fedad.core.config import conf_folder

# Each method's own part, and what switches it off; of clients, or of the server.
# The exceptions that docs/parameter_sharing.md names are not here: DBE's bias, FedBN, APPLE's relations.
ON_BANKS = [
    ("fedprox", "client", {"mu": 0.0}),
    ("fedphp", "client", {"weight": 0.0}),
    ("fedphp", "client", {"mu": 0.0}),
    ("apple", "server", {"independent_init": False}),
    ("apfl", "client", {"adaptive": False}),
    ("dbe", "client", {"kappa": 0.0}),
    ("moon", "client", {"mu": 0.0}),
]
ON_CLASSES = [
    ("fedgen", "client", {"weight": 0.0}),
    ("fedmix", "client", {"weight": 0.0}),
    ("fedgan", "client", {"share": 0.0}),
    ("dfrd", "server", {"steps": 0}),
]
LEAST = 1e-4  # of the distance that training moves what predicts


def settings_of(method: str, part: str, given: dict) -> tuple[type, dict]:
    """Class and defaults of a method's client or server; `given` stands for what refers to other sections."""
    section = yaml.safe_load((conf_folder() / "method" / f"{method}.yaml").read_text())["method"][part]
    plain = {k: v for k, v in section.items() if k != "_target_" and not (isinstance(v, str) and "${" in v)}
    asked = {k: given[k] for k, v in section.items() if isinstance(v, str) and "${" in v and k in given}
    return locate(section["_target_"]), {**plain, **asked}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Root of the summed squared differences of two states."""
    return sum(float((one[n].detach().double() - other[n].detach()).square().sum()) for n in one) ** 0.5


def predicts(client, number):
    """Weights and features' bias of what a client predicts with."""
    return {name: p.detach().clone() for name, p in client.task.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("method", "part", "off"),
    [
        pytest.param(*case, marks=pytest.mark.slow if case[0] in ("fedgan", "dfrd") else [])
        for case in ON_BANKS + ON_CLASSES
    ],
)
def test_the_default_changes_what_is_learnt(federate, make_task, make_loader, method, part, off):
    given = {"rounds": 6, "fraction": 1.0, "batch_size": 4, "image_size": 8, "channels": 3}
    given |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    if (method, part, off) in ON_BANKS:
        task, data = make_task, {c: make_loader(6 + 4 * c, c) for c in range(2)}
    else:
        task, data = make, {0: loader([0, 0, 0, 1, 1, 2]), 1: loader([1, 2, 2, 2], seed=1)}
    states = []
    for change in ({}, off):
        (client, ours), (server, theirs) = (settings_of(method, each, given) for each in ("client", "server"))
        (ours if part == "client" else theirs).update(change)
        played = federate(
            client, server, task=task(), data=data, rounds=2, client=ours, server=theirs, question=predicts
        )
        states.append(played.history[-1].metrics)
    start = dict(task().named_parameters())
    for number in data:
        moved = distance({n: w for n, w in states[0][number].items() if n in start}, start)
        apart = distance(states[0][number], states[1][number])
        assert apart > LEAST * moved


def test_apples_early_term_holds_its_relations_in_the_first_round(federate, make_linear, points_by_hand):
    """Of the preset's six rounds; in double precision, as relations move little in them."""
    relations = []
    for change in ({}, {"mu": 0.0}):
        client, ours = settings_of("apple", "client", {"rounds": 6})
        server, _ = settings_of("apple", "server", {})
        ours |= {"relation_learning_rate": 0.1, **change}  # so that they move in steps this few
        played = federate(client, server, task=make_linear(), data=points_by_hand, rounds=1, client=ours)
        relations.append(played.pool.get(0)["relations"])
    moved = (relations[0] - torch.tensor([0.6, 0.4])).norm()
    assert (relations[0] - relations[1]).norm() > 1e-3 * moved
