"""Fixtures for all tests."""

import copy
import functools
import gc
import importlib
import io
import warnings

import hypothesis
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lit_fedad  # noqa: F401  (makes torchvision importable beside a CPU-only torch, before anything imports it)
from lit_fedad.core import config
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.models.memory_generator import MemoryGenerator
from lit_fedad.tasks.memory_bank import MemoryBank
from lit_fedad.tasks.slot_distances import HingeLoss, NearestDistance

# How long an example takes is up to the machine and its load.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_finish():
    """Keeps the modules, which stay, out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def packaged_configurations_are_composed_once():
    """Many tests compose the same configuration, and every debug preset is fitted to one without it."""
    compose_anew, folder, composed = config.hydra_compose, config.conf_folder(), {}

    def compose(name, overrides=(), **options):
        if config.conf_folder() != folder:
            return compose_anew(name, overrides, **options)
        key = (name, *overrides, *options.items())
        if key not in composed:
            composed[key] = compose_anew(name, overrides, **options)
        return copy.deepcopy(composed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "hydra_compose", compose)
        yield


@pytest.fixture(scope="session", autouse=True)
def configuration_files_are_parsed_once():
    """Hydra parses some thirty files anew for each of the hundreds of configurations that tests compose."""
    parse, parsed = OmegaConf.load, {}

    def load(file):
        text = file.read()
        if text not in parsed:
            parsed[text] = parse(io.StringIO(text))
        return copy.deepcopy(parsed[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load))
        yield


@pytest.fixture(scope="session", autouse=True)
def callbacks_of_other_packages_are_looked_for_once():
    """Fabric reads the metadata of all installed packages whenever it is built."""
    with pytest.MonkeyPatch.context() as patch:
        fabric = importlib.import_module("lightning.fabric.fabric")
        look = functools.cache(fabric._load_external_callbacks)
        patch.setattr(fabric, "_load_external_callbacks", lambda group: list(look(group)))
        yield


class TinyPyramid(nn.Module):
    """Two frozen layers: 3 channels at a quarter of the image's side, 5 at an eighth."""

    channels = (3, 5)
    fingerprint = "tiny"
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(3, 5, 1).requires_grad_(False)

    def forward(self, images):
        return [F.avg_pool2d(images, 4), self.mix(F.avg_pool2d(images, 8))]


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


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Folder of a complete two-client run of the federated bank on textures; the textures lie beside it in ``data``."""
    from lit_fedad.core.config import compose
    from lit_fedad.experiment.train import train

    home = tmp_path_factory.mktemp("tiny")
    settings = ["method=federated_bank", "debug=seconds", "tracking=off", "cache.enabled=false"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*RANDOM weights")
        train(compose([*settings, f"data.root={home / 'data'}", f"out={home / 'run'}"]), quiet=True)
    return home / "run"
