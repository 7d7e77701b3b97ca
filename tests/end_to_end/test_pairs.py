"""Every method on every task: half of the clients a round, one that fails, an interruption, and a use of the result."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from lit_fedad.config import conf_folder, options
from lit_fedad.contracts import Client
from lit_fedad.deployment.predict import predict
from lit_fedad.errors import UserError
from lit_fedad.federation.loop import Federation

ANY_TASK = [
    "local",
    "fedavg",
    "fedprox",
    "fedphp",
    "apple",
    "fedbn",
    "scaffold",
    "dbe",
    "apfl",
    "moon",
    "centralised",
]
BANKS_ONLY = ["feddymem", "feddymem_close", "feddymem_literal", "federated_patchcore", "nearest_neighbour"]
CONTRASTIVE_ONLY = ["fadngs", "fadngs_code", "fadngs_literal"]
CLASSIFIER_ONLY = [
    name
    for name in options("method")
    if "override /task: classifier" in (conf_folder() / "method" / f"{name}.yaml").read_text()
]
# Of these, those that play in rounds, not in tasks that come one after another.
SHARES_IMAGES = ["feddm", "fedvck"]
TASKS = ["memory_bank", "classifier", "autoencoder", "contrastive"]
PAIRS = {
    **{(method, task): None for method in [*ANY_TASK, "fedrep"] for task in TASKS},
    **{(method, "memory_bank"): None for method in BANKS_ONLY},
    **{(method, task): "works with task MemoryBank" for method in BANKS_ONLY for task in TASKS[1:]},
    **{(method, "contrastive"): None for method in CONTRASTIVE_ONLY},
    **{(method, task): "works with task Contrastive" for method in CONTRASTIVE_ONLY for task in TASKS[:-1]},
    **{(method, "classifier"): None for method in CLASSIFIER_ONLY},
    **{
        (method, task): "works with task Classifier"
        for method in CLASSIFIER_ONLY
        for task in TASKS
        if task != "classifier"
    },
    ("fedrep", "memory_bank"): "keeps heads personal",
}
OWN = {
    **{m: ["public.count=8", "method.server.distillation.queue=64"] for m in CONTRASTIVE_ONLY},
    "gldp": ["method.client.base_epochs=1", "method.client.head_epochs=2"],
    "creff": ["method.client.local_epochs=1", "method.server.retraining_epochs=2"],
    "fedic": [
        "method.client.local_epochs=1",
        "method.server.steps=2",
        "public.count=8",
        "partition.server_labelled=2",
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
# Classes that come task after task, for methods that are about them.
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
            "task=contrastive", "encoder=resnet18_narrow", "encoder.channels=4", "task.projection=8", "warmup=1",
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
        stream = STREAM if method in CLASSIFIER_ONLY and method not in SHARES_IMAGES else []
        own = [*stream, *OWN.get(method, [])]
        return [
            f"method={method}", *task_words[task], *clients, *rounds, *own, "federation=partial",
            "federation.participation.fraction=0.75", "federation.participation.min_clients=1",
            "evaluation.pictures=0",
        ]  # fmt: skip

    return make


def test_every_method_and_task_is_enumerated():
    assert {method for method, _ in PAIRS} == set(options("method"))
    assert {task for _, task in PAIRS} <= set(options("task"))


@pytest.mark.parametrize(
    ("method", "task"),
    [
        pytest.param(method, task, marks=[] if (method, task) in QUICK else pytest.mark.slow)
        for (method, task), refusal in PAIRS.items()
        if refusal is None
    ],
)
def test_pair(lab, words, method, task, tmp_path, monkeypatch, differences, outcome):
    given = words(method, task)
    fit = Client.fit

    def fit_but_for_one(client, loader, fabric):
        if client.context.round == 2 and client.context.client == 1:
            raise RuntimeError("out of memory")
        return fit(client, loader, fabric)

    monkeypatch.setattr(Client, "fit", fit_but_for_one)
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
    given = [*words("fedavg", "memory_bank"), "federation.participation.fraction=1.0"]
    fit = Client.fit

    def fit_but_for_one(client, loader, fabric):
        if client.context.client == 1:
            raise RuntimeError("out of memory")
        return fit(client, loader, fabric)

    with monkeypatch.context() as patch:
        patch.setattr(Client, "fit", fit_but_for_one)
        result = lab.train(tmp_path, *given)
    whole = result["elements_up"][-1] // 3
    assert result["elements_up"][-2:] == [3 * whole, 3 * whole]
    assert all(torch.isfinite(torch.tensor(s["loss"])) for s in result["scalars"][-2:])


@pytest.mark.parametrize(("method", "task"), [pair for pair, refusal in PAIRS.items() if refusal])
def test_a_pair_that_makes_no_sense_says_why_in_one_line(lab, task_words, method, task, tmp_path):
    # Sizes of the small tasks meet no key where the method comes with the settings of its own.
    data = [
        word for word in task_words[task if method not in SHARES_IMAGES else "classifier"] if "data" in word
    ]
    data += STREAM if method in CLASSIFIER_ONLY and method not in SHARES_IMAGES else []
    with pytest.raises(UserError, match=PAIRS[method, task]) as error:
        lab.train(tmp_path, f"method={method}", f"task={task}", *data)
    assert "\n" not in str(error.value)
