"""PFLlib's side, in its environment: ``python -m benchmarks._peers.pfllib_side PFLLIB FOLDER``.

A round of its FedAvg without evaluation, over the images that `benchmarks.fedavg_round` wrote.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lit_fedad  # noqa: F401  (before anything imports torchvision)
from benchmarks._peers.stopwatch import report


class Arguments(Namespace):
    """Arguments of PFLlib's ``main.py``; those that are not given are switched off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return 0


def write_images(folder: Path) -> int:
    """Writes each client's images where PFLlib looks for a data set `drawn`, and returns the number of clients."""
    owned = json.loads((folder / "owned.json").read_text())
    for part in ("train", "test"):
        (folder / "dataset" / "drawn" / part).mkdir(parents=True, exist_ok=True)
    with np.load(folder / "images.npz") as held:
        for client, own in enumerate(owned):
            images = held["images"][own].transpose(0, 3, 1, 2).astype(np.float32) / 255
            for part in ("train", "test"):
                file = folder / "dataset" / "drawn" / part / f"{client}.npz"
                np.savez(file, data=np.array({"x": images, "y": held["labels"][own]}, dtype=object))
    return len(owned)


def main() -> None:
    """Plays a round to warm up, and one that is measured."""
    program, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    clients = write_images(folder)
    (folder / "system").mkdir(exist_ok=True)
    os.chdir(folder / "system")  # PFLlib looks for ../dataset
    sys.path.insert(0, str(program / "system"))
    from flcore.servers.serveravg import FedAvg  # type: ignore[import-not-found]
    from torchvision.models import resnet18

    torch.set_num_threads(1)
    given: dict[str, Any] = {
        "algorithm": "FedAvg",
        "dataset": "drawn",
        "device": "cpu",
        "model": resnet18(num_classes=10),
    }
    given |= {
        "num_classes": 10,
        "num_clients": clients,
        "join_ratio": 1.0,
        "batch_size": 32,
        "local_epochs": 1,
    }
    given |= {
        "local_learning_rate": 0.01,
        "learning_rate_decay_gamma": 1.0,
        "time_threthold": 1e9,
        "global_rounds": 1,
    }
    server = FedAvg(Arguments(**given), 0)

    def play() -> None:
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.train()
        server.receive_models()
        server.aggregate_parameters()

    play()
    report(play)


if __name__ == "__main__":
    main()
