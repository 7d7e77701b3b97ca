"""Clients that Ray plays end with the digits of one process, also where a worker ends or a node is killed."""

import os
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray
from helpers.on_ray import HOLD, NOTES, NotingWorker
from ray.cluster_utils import Cluster

from lit_fedad.experiment import ray_transport

pytestmark = pytest.mark.slow
SMALL = ("data=textures", "data.size=64", "data.train_per_product=8", "partition.clients=4", "batch_size=2")
WORKERS = "simulation.workers=2"
DIES = ("method=fedavg", "task=memory_bank", "federation.sampler.on_failure=skip",
        "method.client._target_=helpers.on_ray.DyingClient")  # fmt: skip
SCAFFOLD = ("method=scaffold", "task=memory_bank", "federation=partial", "federation.sampler.fraction=0.5")
ON_CLUSTER = (WORKERS, "simulation.address=auto")


@pytest.fixture(scope="module", autouse=True)
def ended():
    """Ray, whose workers find the tests' helpers, for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        yield
    ray.shutdown()


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Two nodes that have room for a worker each, and a head that has none; notes of turns are in ``notes``."""
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv(NOTES, str(notes))
    monkeypatch.setattr(ray_transport, "Worker", NotingWorker)
    # Otherwise Ray takes the machine's own address for that of the loopback device.
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    node = {"node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    for _ in range(2):
        made.add_node(**node, num_cpus=1)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def turns(folder):
    """Lists the turns (round, client) by node."""
    found = {}
    for note in folder.glob("*.*.*"):
        node, round, client = note.name.split(".")
        found.setdefault(node, []).append((int(round), int(client)))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("method=fedavg", "task=memory_bank"),
        SCAFFOLD,
        ("method=federated_subspace",),
    ],
    ids=lambda words: words[0],
)
def test_two_nodes_and_one_process_end_alike(cluster, lab, tmp_path, differences, outcome, words):
    one = lab.train(tmp_path / "one", *SMALL, *words)
    there = lab.train(tmp_path / "there", *SMALL, *words, *ON_CLUSTER)
    assert differences(outcome(there), outcome(one)) == []
    assert differences(lab.state(tmp_path / "there"), lab.state(tmp_path / "one")) == []
    by_node = turns(tmp_path / "notes")
    assert len(by_node) == 2
    assert sum(map(len, by_node.values())) == len({turn for own in by_node.values() for turn in own})


def test_a_killed_node_is_the_failure_of_the_client_whose_turn_it_played(cluster, lab, tmp_path, differences):
    """All other turns are played on the node that is left."""
    given = [*SMALL, *DIES, "rounds=3"]
    one = lab.train(tmp_path / "one", *given)
    notes, killed = tmp_path / "notes", []
    (notes / HOLD).write_text("2.1")

    def kill():
        while not (held := [path.name.split(".")[0] for path in notes.glob("*.2.1")]):
            time.sleep(0.1)
        (node,) = (node for node in cluster.worker_nodes if node.node_id == held[0])
        cluster.remove_node(node, allow_graceful=False)
        killed.extend(held)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    there = lab.train(tmp_path / "there", *given, *ON_CLUSTER)
    killer.join()
    assert {round: list(causes) for round, causes in there["failures"].items()} == {"2": ["1"]}
    assert {round: list(causes) for round, causes in one["failures"].items()} == {"2": ["1"]}
    assert there["failures"]["2"]["1"].startswith("its worker ended")
    assert differences(there["last"], one["last"]) == []
    assert differences(lab.state(tmp_path / "there")["server"], lab.state(tmp_path / "one")["server"]) == []
    by_node = turns(notes)
    assert max(by_node[killed[0]]) == (2, 1)
    (left,) = set(by_node) - set(killed)
    assert {(3, client) for client in range(4)} < set(by_node[left])


@pytest.mark.parametrize(
    "words",
    [
        SCAFFOLD,
        ("method=federated_subspace",),
        ("method=gldp", "features=train", "task=classifier_convnet", "encoder.channels=4"),
    ],
    ids=lambda words: words[0],
)
def test_workers_and_one_process_end_alike(lab, small_tasks, tmp_path, differences, outcome, words):
    """Personal states, exchanges before round 1, and clients that are scored right after training."""
    given = [*SMALL, *words]
    if "method=gldp" in words:
        data = [word for word in small_tasks["classifier"] if "data" in word]
        given = [*words, *data, "partition=task_stream", "partition.classes=2", "partition.stages=2",
                 "partition.imbalance=1", "partition.clients=3"]  # fmt: skip
    one = lab.train(tmp_path / "one", *given)
    there = lab.train(tmp_path / "there", *given, WORKERS)
    assert differences(outcome(there), outcome(one)) == []
    assert differences(lab.state(tmp_path / "there"), lab.state(tmp_path / "one")) == []


def test_a_worker_that_ends_is_the_failure_of_its_client(lab, tmp_path, differences):
    one = lab.train(tmp_path / "one", *SMALL, *DIES)
    there = lab.train(tmp_path / "there", *SMALL, *DIES, WORKERS)
    assert list(one["failures"]["2"]) == list(there["failures"]["2"]) == ["1"]
    assert there["failures"]["2"]["1"].startswith("its worker ended")
    assert differences(there["last"], one["last"]) == []
    assert differences(lab.state(tmp_path / "there")["server"], lab.state(tmp_path / "one")["server"]) == []
