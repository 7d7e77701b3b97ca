"""Flower's side, in its environment: ``python -m benchmarks._peers.flower_side FOLDER``.

FedAvg in Flower's simulation, one Ray worker of one thread, over the images that `benchmarks.fedavg_round` wrote.
Seconds are of a round, of this process and all that it started.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np
import psutil
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F

ROUNDS = 2
FOLDER = sys.argv[1]
client_app, server_app = ClientApp(), ServerApp()


def network() -> torch.nn.Module:
    """Builds the model."""
    from torchvision.models import resnet18

    import lit_fedad  # noqa: F401  (before anything imports torchvision)

    built: torch.nn.Module = resnet18(num_classes=10)
    return built


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Trains the model that the server sent for one pass over the client's images."""
    torch.set_num_threads(1)
    with np.load(f"{FOLDER}/images.npz") as held:
        owned = json.loads(Path(FOLDER, "owned.json").read_text())[context.node_config["partition-id"]]
        images = torch.from_numpy(held["images"][owned]).permute(0, 3, 1, 2).float().div_(255)
        labels = torch.from_numpy(held["labels"][owned])
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in torch.randperm(len(images)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    sent = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(images)}),
    }
    return Message(content=RecordDict(sent), reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Plays rounds, and prints the seconds of one, the first left out."""
    read: list[tuple[float, float]] = []

    def after_round(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        own = psutil.Process()
        times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
        read.append((sum(one.user + one.system for one in times), time.perf_counter()))
        return MetricRecord({"round": server_round})

    strategy = FedAvg(fraction_evaluate=0.0)
    began = ArrayRecord(network().state_dict())
    strategy.start(grid=grid, initial_arrays=began, num_rounds=1 + ROUNDS, evaluate_fn=after_round)
    (cpu, wall), (last_cpu, last_wall) = read[1], read[-1]
    Path(FOLDER, "flower.json").write_text(
        json.dumps({"cpu": (last_cpu - cpu) / ROUNDS, "wall": (last_wall - wall) / ROUNDS})
    )


def main() -> None:
    """Runs the simulation; its seconds are the last line."""
    clients = len(json.loads(Path(FOLDER, "owned.json").read_text()))
    resources = {
        "client_resources": {"num_cpus": 1},
        "init_args": {"num_cpus": 1, "include_dashboard": False},
    }
    run_simulation(server_app, client_app, clients, backend_config=resources)
    print(Path(FOLDER, "flower.json").read_text())


if __name__ == "__main__":
    main()
