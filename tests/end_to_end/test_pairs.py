"""Every method on every task: half of the clients a round, one that fails, an interruption, and a use of the result."""

from __future__ import annotations

import csv
import functools
import re

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lit_fedad.config import choices, conf_folder, locate
from lit_fedad.deployment.predict import predict
from lit_fedad.errors import UserError
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.turn import Turn
from lit_fedad.methods.feddm import FedDMClient


def target(group, name, *keys):
    """The class that a file of the configuration names, or the file that it builds on; composing would take seconds."""
    content = yaml.safe_load((conf_folder() / group / f"{name}.yaml").read_text())
    node = content
    for key in (*keys, "_target_"):
        node = node.get(key, {}) if isinstance(node, dict) else {}
    if node:
        return locate(node)
    return target(group, next(base for base in content["defaults"] if isinstance(base, str) and base != "_self_"), *keys)


TASKS = {name: target("task", name) for name in ("memory_bank", "classifier", "autoencoder", "contrastive")}


@functools.cache
def client_class(method):
    return target("method", method, "method", "client")


def refusal(method, task):
    """Why a method does not work with a task, as its client says; None where it does."""
    try:
        client_class(method).check_task(TASKS[task])
    except UserError as error:
        return str(error)
    return None


# Derived from what methods and tasks declare: a new method is played through all of its pairs by being there.
PAIRS = {(method, task): refusal(method, task) for method in choices("method") for task in TASKS}
SHARES_IMAGES = [name for name in choices("method") if issubclass(client_class(name), FedDMClient)]
# Classifiers' own methods play in stages, but for those that share images.
IN_STAGES = [
    name
    for name in choices("method")
    if client_class(name).needs is TASKS["classifier"] and name not in SHARES_IMAGES
]
CONTRASTIVE_ONLY = [name for name in choices("method") if client_class(name).needs is TASKS["contrastive"]]
OWN = {
    **{m: ["public.count=8", "method.server.distillation.queue=64"] for m in CONTRASTIVE_ONLY},
    "gldp": ["method.client.base_epochs=1", "method.client.head_epochs=2"],
    "creff": ["method.client.local_epochs=1", "method.server.retraining_epochs=2"],
    "fedic": [
        "method.client.local_epochs=1",
        "method.server.steps=2",
        "public.count=8",
        "partition.teaching=2",
    ],
    **{
        m: [
            "partition=iid",
            "method.client.least=1",
            "method.client.minimum=2",
            "method.client.condensation.steps=2",
            "method.client.condensation.batch=4",
            "method.server.training.epochs=2",
        ]
        for m in SHARES_IMAGES
    },
}
# Classes that come stage after stage, for methods that are about them.
STREAM = ["partition=task_stream", "partition.classes=2", "partition.stages=2", "partition.imbalance=1"]
# All pairs in the slow tests.
QUICK = {("moon", "classifier")}


@pytest.fixture(scope="module")
def task_words(tmp_path_factory):
    """Small forms of the tasks, with data that suit them."""
    folder = tmp_path_factory.mktemp("labelled")
    draw = np.random.default_rng(0)
    labels = np.arange(24) % 3
    images = (draw.integers(0, 60, (24, 32, 32, 3)) + 60 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "train.npz", images=images, labels=labels)
    np.savez(folder / "test.npz", images=images[:9], labels=labels[:9])
    return {
        "memory_bank": ["task=memory_bank", "data=textures", "data.size=64", "data.train_per_product=8"],
        "classifier": [
            "task=classifier_convnet", "task.encoder.channels=8", "data=packed", f"data.root={folder}",
            "data.train=train.npz", "data.test=test.npz", "~data.train_per_product", "~data.test_per_product",
        ],
        "autoencoder": [
            "task=autoencoder", "task.encoder._target_=lit_fedad.models.convnet.ConvNet", "~task.encoder.depth",
            "~task.encoder.stem", "+task.encoder.image_size=32", "+task.encoder.channels=8",
            "task.decoder.channels=8", "data=textures", "data.size=64", "data.train_per_product=8",
        ],
        "contrastive": [
            "task=contrastive", "encoder=resnet18_narrow", "encoder.channels=4", "task.projection=8", "task.warmup=1",
            "data=motifs", "~data.train_per_product", "~data.test_per_product", "data.train_per_class=4",
            "data.test_per_class=1", "data.train_per_set=1", "data.test_per_set=5", "data.size=16",
            "image.size=16",
        ],
    }  # fmt: skip


@pytest.fixture
def words(task_words):
    def make(method, task):
        clients = ["partition.clients=4"] if method not in ("centralised", "nearest_neighbour") else []
        rounds = ["rounds=2", "partition=pooled", "~partition.clients"] if not clients else ["rounds=2"]
        stream = STREAM if method in IN_STAGES else []
        own = [*stream, *OWN.get(method, [])]
        return [
            f"method={method}", *task_words[task], *clients, *rounds, *own, "federation=partial",
            "federation.sampler.fraction=0.75", "federation.sampler.min_clients=1",
            "evaluation.pictures=0",
        ]  # fmt: skip

    return make


def test_pairs_are_what_methods_and_tasks_declare():
    """A few of them by hand: what is derived is not empty, nor everything."""
    assert PAIRS["fedavg", "memory_bank"] is PAIRS["moon", "classifier"] is PAIRS["fadngs", "contrastive"] is None
    assert "works with task MemoryBank" in PAIRS["feddymem", "classifier"]
    assert "works with task Classifier" in PAIRS["gldp", "contrastive"]
    assert "keeps heads personal" in PAIRS["fedrep", "memory_bank"]
    assert all(None in {PAIRS[method, task] for task in TASKS} for method in choices("method"))


@pytest.mark.parametrize(
    ("method", "task"),
    [
        pytest.param(method, task, marks=[] if (method, task) in QUICK else pytest.mark.slow)
        for (method, task), why in PAIRS.items()
        if why is None
    ],
)
def test_pair(lab, words, method, task, tmp_path, monkeypatch, differences, outcome):
    given = words(method, task)
    play = Turn.play

    def play_but_for_one(turn, exchange, data):
        if exchange.trains and (turn.client.context.round, turn.client.context.client) == (2, 1):
            raise RuntimeError("out of memory")
        return play(turn, exchange, data)

    monkeypatch.setattr(Turn, "play", play_but_for_one)
    straight = lab.train(tmp_path / "straight", *given)

    save = Federation.save

    def save_and_stop(federation, round):
        save(federation, round)
        if round == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Federation, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            lab.train(tmp_path / "resumed", *given)
    resumed = lab.train(tmp_path / "resumed", *given)
    assert differences(outcome(resumed), outcome(straight)) == []
    assert differences(lab.state(tmp_path / "resumed"), lab.state(tmp_path / "straight")) == []
    assert straight["exchanges"][-2:] == [1, 2]

    (tmp_path / "new").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "new" / f"{number}.png")
    with predict(str(tmp_path / "straight"), str(tmp_path / "new")).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    judged = {row["class"] for row in rows} if task == "classifier" else {row["decision"] for row in rows}
    assert judged <= ({"0", "1", "2"} if task == "classifier" else {"normal", "anomalous"})


def test_a_failed_client_is_left_out_of_its_round(lab, words, tmp_path, monkeypatch):
    given = [*words("fedavg", "memory_bank"), "federation.sampler.fraction=1.0"]
    play = Turn.play

    def play_but_for_one(turn, exchange, data):
        if exchange.trains and turn.client.context.client == 1:
            raise RuntimeError("out of memory")
        return play(turn, exchange, data)

    with monkeypatch.context() as patch:
        patch.setattr(Turn, "play", play_but_for_one)
        result = lab.train(tmp_path, *given)
    whole = result["elements_up"][-1] // 3
    assert result["elements_up"][-2:] == [3 * whole, 3 * whole]
    assert all(torch.isfinite(torch.tensor(s["loss"])) for s in result["scalars"][-2:])


@pytest.mark.parametrize(("method", "task"), [pair for pair, why in PAIRS.items() if why])
def test_a_pair_that_makes_no_sense_says_why_in_one_line(lab, task_words, method, task, tmp_path):
    # Sizes of the small tasks meet no key where the method comes with the settings of its own.
    data = [
        word for word in task_words[task if method not in SHARES_IMAGES else "classifier"] if "data" in word
    ]
    data += STREAM if method in IN_STAGES else []
    with pytest.raises(UserError, match=re.escape(PAIRS[method, task])) as error:
        lab.train(tmp_path, f"method={method}", f"task={task}", *data)
    assert "\n" not in str(error.value)
