"""Clients that Ray workers play end with the digits of one process, also where a worker ends."""

import os
from pathlib import Path

import pytest

pytest.importorskip("ray")

import ray

pytestmark = pytest.mark.slow
SMALL = ("data=textures", "data.size=64", "data.train_per_product=8", "partition.clients=4", "batch_size=2")
WORKERS = "simulation.workers=2"


@pytest.fixture(scope="module", autouse=True)
def ended():
    """Ray, whose workers find the tests' helpers, for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        yield
    ray.shutdown()


@pytest.mark.parametrize(
    "words",
    [
        ("method=scaffold", "task=memory_bank", "federation=partial", "federation.sampler.fraction=0.5"),
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
    given = [*SMALL, "method=fedavg", "task=memory_bank", "federation.sampler.on_failure=skip",
             "method.client._target_=helpers.dying_client.DyingClient"]  # fmt: skip
    one = lab.train(tmp_path / "one", *given)
    there = lab.train(tmp_path / "there", *given, WORKERS)
    assert list(one["failures"]["2"]) == list(there["failures"]["2"]) == ["1"]
    assert there["failures"]["2"]["1"].startswith("its worker ended")
    assert differences(there["last"], one["last"]) == []
    assert differences(lab.state(tmp_path / "there")["server"], lab.state(tmp_path / "one")["server"]) == []
