"""Real federations of tiny data, played in milliseconds, for tests of methods."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.methods import SameEveryRound, federation_of
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Prediction, Task
from lit_fedad.federation.channel import Channel, Link, Plain
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.methods.fedavg import FedAvgServer
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import CRAD, SimCLR


class Linear(Task):
    """Features are ``W x + b`` of 2-vectors, the loss is ``mean_B |W x + b - y|^2 / 2``: easy to play by hand.

    In double precision, so that hand and machine can only differ in the order of sums.
    """

    num_features = 2

    def __init__(self, learning_rate: float = 0.1, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.layer = nn.Linear(2, 2, dtype=dtype)
        self.layer.weight.data = torch.tensor([[0.5, -1.0], [0.25, 2.0]], dtype=dtype)
        self.layer.bias.data = torch.tensor([0.125, -0.5], dtype=dtype)

    def forward(self, batch):
        return self.layer(batch["x"])

    def objective(self, features, batch):
        return {"loss": (features - batch["y"]).square().sum(1).mean() / 2}

    def predict(self, features, batch):
        return Prediction((features - batch["y"]).square().sum(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


class TinyClassifier(Task):
    """A frozen backbone, a normalisation layer whose name does not say so, and a head; SGD with momentum."""

    kind = "classification"
    output_modules = ("classifier",)
    num_features = 3

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.backbone = nn.Linear(2, 4).requires_grad_(False)
            self.downsample = nn.Sequential(
                nn.Linear(4, self.num_features), nn.BatchNorm1d(self.num_features)
            )
            self.classifier = nn.Linear(self.num_features, 2)

    def forward(self, batch):
        return self.downsample(self.backbone(batch["x"].float()))

    def objective(self, features, batch):
        return {"loss": F.cross_entropy(self.classifier(F.relu(features)), batch["label"])}

    def predict(self, features, batch):
        logits = self.classifier(F.relu(features))
        return Prediction(1 - logits.softmax(1).amax(1), logits=logits)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TinyEncoder(nn.Module):
    """A convolution, its normalisation, and the mean over the map: eight features."""

    num_features = 8

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = (
            nn.Conv2d(3, self.num_features, 3, stride=2),
            nn.BatchNorm2d(self.num_features),
        )

    def forward(self, images):
        return F.relu(self.norm(self.convolution(images))).mean((2, 3))


@dataclass
class Data(SameEveryRound):
    """Training data by client, in the loaders' order; `shuffle` draws another one for training, as real data does."""

    loaders: Mapping[int, DataLoader]
    shuffle: bool = False

    @property
    def sizes(self):
        return {client: len(loader.dataset) for client, loader in self.loaders.items()}

    def client_loader(self, client, generator, shuffle=True):
        given = self.loaders[client]
        return DataLoader(
            given.dataset, given.batch_size, shuffle=shuffle and self.shuffle, generator=generator
        )


@dataclass
class Asker(Evaluator):
    """An evaluation that puts one question to every client; metrics are the answers by client."""

    question: object

    def score(self, client, number):
        return self.question(client, number)

    def spread(self, state, clients):
        return dict.fromkeys(clients, state)

    def summarise(self, states):
        return dict(states)


def state_that_predicts(client, number):
    """A copy of all that a client's predictions depend on."""
    return {name: entry.detach().clone() for name, entry in client.task.state_dict().items()}


class TappedLink(Link):
    """A link that remembers the messages sent over it, with their context."""

    def __init__(self, sent: list) -> None:
        super().__init__(Plain())
        object.__setattr__(self, "sent", sent)

    def pack(self, message, spec, context, sender):
        self.sent.append((context.round, context.client, message))
        return super().pack(message, spec, context, sender)


class Tap(Channel):
    """A channel that remembers what crossed; the server's messages have no client."""

    def __init__(self) -> None:
        self.sent = []
        self.up = self.down = TappedLink(self.sent)

    @property
    def names(self) -> set[str]:
        """Names of all tensors that ever crossed, either way."""
        return {name for _, _, message in self.sent for name in message}

    def uploads(self, round: int) -> dict[int, dict[str, torch.Tensor]]:
        """The messages of a round by client that sent one."""
        return {client: message for at, client, message in self.sent if at == round and client is not None}


@pytest.fixture
def tap():
    """A channel that remembers what crossed: ``tap.names``, ``tap.uploads(round)``."""
    return Tap()


@pytest.fixture
def exactly():
    """Asserts that two states, nested as they may be, are equal bit for bit."""
    return partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def make_linear():
    """Builds the task `Linear(learning_rate=0.1, dtype=torch.float64)`; its initial weights are always the same."""
    return Linear


@pytest.fixture
def make_classifier():
    """Builds the task `TinyClassifier(seed=0)`, in float32, with a BatchNorm layer ``downsample.1``."""
    return TinyClassifier


@pytest.fixture
def make_points():
    """Loader of points x [n, 2], targets y [n, 2] and labels [n]; for both tasks."""

    def make(n: int = 4, seed: int = 0, batch_size: int = 2, dtype: torch.dtype = torch.float64):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(2, n, 2, generator=draw, dtype=torch.float64).to(dtype) + seed / 4
        labels = torch.arange(n) % 2
        data = [{"x": x[i], "y": y[i], "label": labels[i]} for i in range(n)]
        return DataLoader(data, batch_size)

    return make


@pytest.fixture
def make_contrastive():
    """Builds a `Contrastive` task of images of 8 pixels, with CRAD after one round of SimCLR."""

    def make(seed: int = 0, **overrides) -> Contrastive:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts = {
                "encoder": TinyEncoder(),
                "loss": CRAD(scale_by_positives=True),
                "warmup_loss": SimCLR(),
                "warmup": 1,
                "rounds": 3,
                "views": ContrastiveViews(),
                "projection": 3,
                "normal_share": 0.7,
                "learning_rate": 0.02,
            }
            return Contrastive(**{**parts, **overrides})

    return make


@pytest.fixture
def make_images():
    """Loader of images [n, 3, 8, 8] in [0, 1] with the positions 100 seed, 100 seed + 1, ... in the data set."""

    def make(n: int = 6, seed: int = 0, batch_size: int = 4) -> DataLoader:
        images = torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        data = [{"image": image, "label": 0, "index": 100 * seed + i} for i, image in enumerate(images)]
        return DataLoader(data, batch_size)

    return make


class Hand:
    """The task `Linear` in NumPy; weights and bias are one matrix theta [2, 3]: ``W x + b = theta (x, 1)``."""

    start = np.array([[0.5, -1.0, 0.125], [0.25, 2.0, -0.5]])

    @staticmethod
    def theta(state) -> np.ndarray:
        """Theta of a state or message of the task."""
        return np.column_stack([state["layer.weight"].numpy(), state["layer.bias"].numpy()])

    @staticmethod
    def batches(loader) -> list[tuple[np.ndarray, np.ndarray]]:
        """The loader's batches: (x, 1) [B, 3] and y [B, 2]."""
        return [(np.column_stack([b["x"].numpy(), np.ones(len(b["x"]))]), b["y"].numpy()) for b in loader]

    @staticmethod
    def gradient(theta, x, y) -> np.ndarray:
        """Of the loss, in theta [2, 3]."""
        return (x @ theta.T - y).T @ x / len(x)


@pytest.fixture
def hand():
    """Plays the task `Linear` by hand: its start, batches and gradient."""
    return Hand


@pytest.fixture
def points_by_hand():
    """Client 0 has three points, in a batch of two and one of one; client 1 has two, in one batch."""
    points = {
        0: [((1.0, 0.0), (1.0, 2.0)), ((0.0, 1.0), (-1.0, 0.5)), ((2.0, 1.0), (0.0, 3.0))],
        1: [((-1.0, 0.5), (2.0, 0.0)), ((0.5, -2.0), (1.0, -4.0))],
    }
    return {
        client: DataLoader(
            [{"x": torch.tensor(x).double(), "y": torch.tensor(y).double()} for x, y in pairs], batch_size=2
        )
        for client, pairs in points.items()
    }


@pytest.fixture
def federate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Plays a federation and returns it: see ``.history`` (reports), ``.server``, ``.pool.get(client)``.

    Keyword arguments of the method are `client` and `server`. Each call has a folder of its own unless one is
    named: a second call on the same `folder` goes on from its last checkpoint, in a new federation; without a name
    nothing is saved, which takes a quarter of the time. `question` is
    what evaluation asks every client; the answers are ``.history[-1].metrics[client]``. `after_round` is called
    with federation and report, before the checkpoint.
    """
    folders = (str(number) for number in count())
    # Else, waiting for the disk takes most of the time.
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def play(
        client_class,
        server_class=FedAvgServer,
        *,
        task,
        data,
        rounds=3,
        client=None,
        server=None,
        shuffle=False,
        fraction=1.0,
        question=state_that_predicts,
        folder=None,
        seed=0,
        after_round=lambda federation, report: None,
        **overrides,
    ) -> Federation:
        home = tmp_path / (folder or next(folders))
        torch.manual_seed(seed)
        live = client_class(task, **(client or {}))
        parts = {
            "server": server_class(live, **(server or {})),
            "client": live,
            "data": Data(data, shuffle),
            "evaluator": Asker(question),
            "fabric": Fabric(
                accelerator="cpu", devices=1, callbacks=[SimpleNamespace(on_round_end=after_round)]
            ),
            "rounds": rounds,
            "seed": seed,
            "sampler": ClientSampler(fraction=fraction),
        }
        federation = federation_of(folder=home, **{**parts, **overrides})
        if folder is None:
            monkeypatch.setattr(federation, "save", lambda round: None)
        federation.run()
        return federation

    return play
