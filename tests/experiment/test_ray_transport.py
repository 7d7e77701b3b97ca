"""What Ray is asked for, without Ray: room for all workers, or a refusal where this machine cannot have it."""

import sys
from types import SimpleNamespace

import pytest
from helpers.refusals import refusal

from lit_fedad.experiment.ray_transport import RayTransport


@pytest.fixture
def start(monkeypatch):
    """Starts workers of a Ray that has some GPUs, and returns what Ray was asked for and each worker's share."""

    def started(there=0, **simulation):
        asked, shares = {}, []
        ray = SimpleNamespace(
            is_initialized=lambda: False,
            init=lambda **given: asked.update(given),
            remote=lambda **options: (
                lambda kind: SimpleNamespace(remote=lambda *given: shares.append(options))
            ),
            cluster_resources=lambda: {"CPU": asked["num_cpus"], "GPU": there},
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        transport = RayTransport.__new__(RayTransport)
        transport.config, transport.build = {}, None
        transport.simulation = SimpleNamespace(**{"address": None, "cpus": 1.0, "gpus": 0.0, **simulation})
        transport._start()
        return asked, shares

    return started


@pytest.mark.parametrize(("workers", "cpus"), [(5, 0.5), (3, 0.8), (2, 1.0), (1, 0.1), (3, 0.0)])
def test_ray_has_room_for_all_workers(start, workers, cpus):
    """Ray would wait without end for a core that it lacks."""
    asked, shares = start(workers=workers, cpus=cpus)
    assert asked["num_cpus"] >= max(1, workers * cpus)
    assert [share["num_cpus"] for share in shares] == [cpus] * workers


def test_each_worker_has_its_share_of_the_gpus(start):
    _, shares = start(there=2, workers=4, gpus=0.5)
    assert [share["num_gpus"] for share in shares] == [0.5] * 4


def test_more_gpus_than_the_machine_has_are_refused(start):
    with refusal(r"simulation.workers=2 simulation.gpus=1 need 2 GPUs, and Ray has 0; lower one of them"):
        start(workers=2, gpus=1.0)
