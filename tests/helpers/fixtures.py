"""Fixtures for all tests: a small task, its images, a complete run."""

import functools
import shutil
import warnings

import pytest
import torch
from filelock import FileLock
from torch.utils.data import DataLoader

from helpers.forking import Forking
from helpers.tiny_pyramid import TinyPyramid
from lit_fedad.core import config, config_groups, config_schema
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.models.memory_generator import MemoryGenerator
from lit_fedad.tasks.memory_bank import MemoryBank
from lit_fedad.tasks.slot_distances import HingeLoss, NearestDistance


@pytest.fixture
def make_task():
    """Builds a small memory-bank task of 8 channels; keyword arguments override its parts."""

    def make(residual: bool = True, seed: int = 0, **overrides) -> MemoryBank:
        torch.manual_seed(seed)
        parts = {
            "backbone": TinyPyramid(),
            "head": functools.partial(MemoryGenerator, hidden=6, grid_size=3, residual=residual),
            "loss": HingeLoss(threshold=0.01, neighbours=2),
            "score": NearestDistance(),
            "reduce": SlotReduce(),
            "grid": 4,
            "image_size": 32,
            "standardise": False,
            "average_pool": False,
        }
        return MemoryBank(**{**parts, **overrides})

    return make


@pytest.fixture
def make_loader():
    """Loader of random images [n, 3, 32, 32] in batches of 4, as the data module's batches look."""

    def make(images: int = 6, seed: int = 0, batch_size: int = 4) -> DataLoader:
        draw = torch.Generator().manual_seed(seed)
        data = [{"image": torch.randn(3, 32, 32, generator=draw), "label": 0} for _ in range(images)]
        return DataLoader(data, batch_size=batch_size)

    return make


@pytest.fixture
def own_conf(tmp_path, monkeypatch):
    """A copy of the packaged configuration, which is composed from then on."""
    copy = tmp_path / "conf"
    shutil.copytree(config_groups.conf_folder(), copy)
    for module in (config, config_groups, config_schema):
        monkeypatch.setattr(module, "conf_folder", lambda: copy)
    return copy


@pytest.fixture(scope="session")
def tiny_run(of_all_workers):
    """Folder of a complete two-client run of the federated bank on textures; the textures lie beside it in ``data``.

    Workers share it: a test that changes the images, or files that another reads, takes a copy.
    """
    from lit_fedad.core.config import compose
    from lit_fedad.experiment.train import train

    home = of_all_workers / "tiny"
    with FileLock(f"{home}.lock"):
        if not home.exists():
            settings = ["method=federated_bank", "debug=seconds", "tracking=off", "cache.enabled=false"]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*RANDOM weights")
                train(compose([*settings, f"data.root={home / 'data'}", f"out={home / 'run'}"]), quiet=True)
    return home / "run"


@pytest.fixture
def copied_run(tiny_run, tmp_path):
    """A copy of the tiny run, which a test may change, as ``run`` in the test's own folder."""
    return shutil.copytree(tiny_run, tmp_path / "run")


@pytest.fixture(scope="session")
def forking():
    """Starts commands that need not import anything."""
    server = Forking()
    yield server
    server.close()
