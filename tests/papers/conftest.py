"""Folders, configurations and complete runs for tests of tables and of the report."""

import copy

import numpy as np
import pytest
from PIL import Image

from lit_fedad.core.config import compose
from lit_fedad.experiment.run_files import write_settings
from lit_fedad.papers.runs import CompleteRun
from lit_fedad.tracking.reading import TrackedRun

METRICS = ("i_auroc", "p_auroc", "pro", "aupr")


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    """A working directory of its own: runs go to its outputs, tables to its reports."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def configs():
    """Of FedDyMem and FedAvg on textures, and of FedDyMem as its paper's table asks for it."""
    paper = ["experiment=paper", "data=mpdd", "data.root=somewhere", "method=feddymem"]
    return {
        "feddymem": compose(["method=feddymem", "rounds=2"]),
        "fedavg": compose(["method=fedavg", "rounds=2"]),
        "paper": compose(paper),
    }


@pytest.fixture
def make_run(configs, tmp_path):
    """A complete run of two clients: their I-AUROC after the last round is what is given."""

    def make(name, kind, clients, seed=0, parent=None, privacy=None, **changes):
        config = {**copy.deepcopy(configs[kind]), "seed": seed, **changes}
        data = config["data"].get("name", "textures")
        folder = tmp_path / "outputs" / name
        (folder / "figures").mkdir(parents=True)
        write_settings(folder, config)
        Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(folder / "figures" / "partition.png")
        values = {
            "mean": float(np.mean(clients)),
            "worst": min(clients),
            "pooled": 0.5,
            "per_client": {str(number): value for number, value in enumerate(clients)},
        }
        evaluated = {"round": 2, **dict.fromkeys(METRICS, values)}
        result = {
            "method": config["method"]["name"],
            "task": "MemoryBank",
            "data": data,
            "partition": {
                "strategy": "Dirichlet",
                "sizes": [3, 4],
                "counts": [[3, 0], [0, 4]],
                "products": ["a", "b"],
                "stage_sizes": [],
            },
            "backbone": {"name": "resnet18", "taken": "random"},
            "seed": seed,
            "rounds": config["rounds"],
            **dict.fromkeys(("first", "last", "best"), evaluated),
            "milestones": [],
            "exchanges": [0, 1, 2],
            "bytes_up": [1000, 2_000_000, 2_000_000],
            "bytes_down": [0, 0, 0],
            "seconds_per_round": [1.0, 2.0, 3.0],
            "scalars": [{}, {"loss": 1.0}, {"loss": 0.5}],
            "metrics": {"1": {"i_auroc": 0.5}, "2": {"i_auroc": values["mean"]}},
            "tracking_run_id": name,
            "privacy": privacy,
            "config": config,
        }
        tags = {"method": result["method"], "data": data, "seed": str(seed), "lit_fedad.out": str(folder)}
        tags |= {"mlflow.parentRunId": parent} if parent else {}
        metrics = {"clients/i_auroc/0": 1.0, "clients/i_auroc/1": 1.0, "i_auroc/mean": 1.0}
        tracked = TrackedRun(name, "7", data, name, "FINISHED", 0, tags, {"rounds": "2"}, metrics)
        return CompleteRun(tracked, folder, result)

    return make
