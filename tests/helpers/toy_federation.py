"""A tiny method: clients fit one weight to their own mean, the server averages by data size."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from helpers.methods import SameEveryRound, federation_of
from lit_fedad.contracts import Client, Exchanges, Prediction, Server, Sums, Task, TensorSpec
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS
from lit_fedad.contracts.sums import WeightedMeans
from lit_fedad.federation.client_runner import Train
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.loop import Federation


class Slope(Task):
    """Minimises (w - x)^2 / 2 by plain gradient descent with step 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx=0):
        return {"loss": ((self.w - batch) ** 2).mean() / 2}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.0)

    def predict_step(self, batch, batch_idx=0):
        return Prediction((batch - self.w).abs())


class ToyClient(Client):
    state_names = ("visits",)
    evidence = None
    fails: set[tuple[int, int]] = set()
    """(round, client) pairs that raise."""

    def __init__(self, task):
        super().__init__(task)
        self.visits = 0

    def receive(self, broadcast):
        self.task.w.data.copy_(broadcast["w"])

    discloses = (TRAINED_WEIGHTS,)

    def send(self, loader):
        if (self.context.round, self.context.client) in self.fails:
            raise RuntimeError("the disk is full\nwith a second line")
        self.visits += 1
        return {"w": self.task.w.detach().cpu().clone()}

    def broadcast_spec(self):
        return {"w": TensorSpec((1,))}

    upload_spec = broadcast_spec


def exchanges(client):
    return Exchanges((), (Train(Sums(lambda client: WeightedMeans())),), evidence=client.evidence)


class ToyServer(Server):
    state_names = ("w",)
    merges_sums = False

    def __init__(self):
        super().__init__()
        self.w = torch.zeros(1)

    def broadcast(self, client_id):
        return {"w": self.w}

    def aggregate(self, updates: Mapping[int, Any]):
        total = sum(u.num_samples for u in updates.values())
        self.w = sum(u.message["w"] * (u.num_samples / total) for u in updates.values())

    def diagnostics(self):
        return {"weight": float(self.w)}


@dataclass
class ToyData(SameEveryRound):
    """Client c holds the numbers given; batches of one, in an order that the generator decides."""

    values: dict[int, list[float]]

    @property
    def sizes(self):
        return {client: len(values) for client, values in self.values.items()}

    def client_loader(self, client, generator, shuffle=True):
        values = torch.tensor(self.values[client])
        if shuffle:
            values = values[torch.randperm(len(values), generator=generator)]
        return DataLoader(values, batch_size=1)


class ToyEvaluator(Evaluator):
    def score(self, client, number):
        return float(client.task.w.detach()), client.visits

    def spread(self, state, clients):
        return dict.fromkeys(clients, state)

    def summarise(self, states):
        return {
            "w": {
                "mean": sum(w for w, _ in states.values()) / len(states),
                "visits": {c: v for c, (_, v) in states.items()},
            }
        }


@pytest.fixture
def toy_server():
    """The tiny method's server class."""
    return ToyServer


@pytest.fixture
def toy(tmp_path: Path):
    """Builds a federation of the tiny method; keyword arguments override its parts."""

    def make(
        values=None, folder: Path = tmp_path, fails=(), fabric=None, callbacks=(), evidence=None, **overrides
    ) -> Federation:
        client = ToyClient(Slope())
        client.fails, client.evidence = set(fails), evidence
        parts: dict[str, Any] = {
            "server": ToyServer(),
            "client": client,
            "data": ToyData(values or {0: [1.0], 1: [4.0, 4.0, 4.0]}),
            "evaluator": ToyEvaluator(),
            "fabric": fabric or Fabric(accelerator="cpu", devices=1, callbacks=callbacks),
            "rounds": 3,
        }
        return federation_of(folder=folder, **{**parts, **overrides})

    return make


def by_hand(rounds: int) -> list[float]:
    """One step of 0.5 for client 0 (target 1), three for client 1 (target 4), averaged 1 : 3."""
    w, path = 0.0, []
    for _ in range(rounds):
        first = w + 0.5 * (1 - w)
        second = w
        for _ in range(3):
            second += 0.5 * (4 - second)
        w = 0.25 * first + 0.75 * second
        path.append(w)
    return path
