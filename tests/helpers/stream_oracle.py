"""A stream of small images, and clients whose answers are drawn: oracles that remember whose model they have."""

import functools

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lit_fedad.contracts import Client, Exchanges, Prediction, Predictors, Server, Task, TensorSpec
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.federation.client_runner import Train

KINDS, TESTS = 4, 30
# Images of each class in each task of each client; client 2 has fewer tasks.
COUNTS = [
    np.array([[5, 2, 0, 0], [0, 4, 1, 0], [3, 0, 0, 2]]),
    np.array([[0, 0, 6, 1], [2, 0, 2, 0], [0, 3, 0, 4]]),
    np.array([[1, 0, 0, 8], [0, 2, 5, 0]]),
]
LABELS = torch.randint(KINDS, (TESTS,), generator=torch.Generator().manual_seed(1))
SERVER = -1


class Labelled(Dataset):
    def __init__(self, labels, side=1) -> None:
        self.labels = labels
        noise = torch.randn(len(labels), 1, side, side, generator=torch.Generator().manual_seed(5))
        self.images = noise + labels[:, None, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitems__(self, indices):
        index = torch.tensor(indices)
        return {"image": self.images[index], "label": self.labels[index], "index": index}


def make_module(rounds, counts=COUNTS, schedule="stage_major", side=1) -> StreamDataModule:
    labels, tasks = [], []
    for own in counts:
        tasks.append([])
        for row in own:
            first = len(labels)
            labels += [k for k, number in enumerate(row) for _ in range(number)]
            tasks[-1].append(list(range(first, len(labels))))
    train, test = Labelled(torch.tensor(labels), side), Labelled(LABELS, side)
    return StreamDataModule(train, test, tasks, rounds, schedule, eval_batch_size=7)


@functools.cache
def answers(kind, who, round):
    """The logits of a model: of its round, of a client or of the server, and of its first or second classifier."""
    seed = 1000 * round + 10 * (who + 1) + kind
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(TESTS, KINDS, generator=draw) + 1.2 * nn.functional.one_hot(LABELS, KINDS)


class Remember(Train):
    """Training that remembers its client and round."""

    def train(self, client, loader, fabric):
        client.model = (client.context.client, client.context.round)
        return {}


class Oracle(Client):
    """Its model is its number and the round of its training, or the round of the server's message."""

    alike = False  # whether the server's model is scored once
    own_model = True
    merged_model = False
    differ = False  # whether the server's model predicts otherwise at each client

    def __init__(self):
        super().__init__(Task())
        self.model = (SERVER, 0)

    def receive(self, broadcast):
        self.model = (SERVER, int(broadcast["round"]))

    def deploy(self, which="own"):
        if which == "server" and self.differ:
            self.model = (10 + self.context.client, self.model[1])

    @property
    def predictors(self):
        return Predictors(
            server_shared=self.alike, own=self.own_model, merged=self.merged_model, heads=("second",)
        )

    def broadcast_spec(self):
        return {"round": TensorSpec((), torch.int64)}

    upload_spec = broadcast_spec

    discloses = (TRAINED_WEIGHTS,)

    def send(self, loader):
        return {"round": torch.tensor(self.context.round)}

    def predict_step(self, batch):
        first, second = (answers(kind, *self.model)[batch["index"]] for kind in (0, 1))
        return Prediction(-first.amax(1), logits=first, others={"second": second})


class OracleServer(Server):
    merges_sums = False

    state_names = ("round",)
    round = torch.tensor(0)

    def broadcast(self, client_id):
        return {"round": self.round}

    def aggregate(self, updates):
        self.round = next(iter(updates.values())).message["round"]


def exchanges(client):
    return Exchanges((), (Remember(),))
