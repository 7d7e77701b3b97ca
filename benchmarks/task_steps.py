"""A step of each task in a client's training, beside a bare PyTorch loop over the same batches.

Both loops start from the same weights. Pairs are interleaved; processor seconds are compared, which other processes
disturb less than the clock.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Task
from lit_fedad.core.config import compose
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.client_runner import fit
from lit_fedad.methods.fedavg import FedAvgClient

TASKS = ("reverse_distillation", "efficient_ad", "simplenet", "dinomaly", "autoencoder")
OWN = {
    "dinomaly": [
        "backbone=vit",
        "backbone.name=vit_tiny_patch16_224",
        "backbone.weights=random",
        "image.size=112",
    ]
}
STEPS, BATCH, PAIRS = 2, 8, 5


def bare(task: Task, batches: list[dict[str, Any]]) -> None:
    """Trains without the library: forward, backward, step, and the loss read for a log."""
    optimizer, total = task.configure_optimizers(), 0.0
    task.train()
    for index, batch in enumerate(batches):
        loss = task.training_step(batch, index)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    task.eval()


def measure(name: str) -> None:
    """Prints milliseconds a step of both loops, their ratio, and its spread over pairs."""
    words = [f"task={name}", "method=fedavg", "image.size=96", *OWN.get(name, ["backbone=own"])]
    config = compose(words)
    task = build_model(config, ["product"]).task
    client, fabric = FedAvgClient(task), Fabric(accelerator="cpu", devices=1)
    client.context = Context(0, 1, 0)
    size = config["image"]["size"]
    draw = torch.Generator().manual_seed(0)
    batches = [{"image": torch.randn(BATCH, 3, size, size, generator=draw)} for _ in range(STEPS)]
    task.refresh(cast("DataLoader", batches), client.context, first=True)
    start = copy.deepcopy(task.state_dict())
    ways: dict[str, Callable[[], object]] = {
        "bare": lambda: bare(task, batches),
        "client": lambda: fit(client, batches, fabric),  # type: ignore[arg-type]
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for pair in range(PAIRS + 1):
        for way in ways if pair % 2 else reversed(ways):
            task.load_state_dict(start)
            torch.manual_seed(0)
            began = time.process_time()
            ways[way]()
            if pair:  # the first one warms up
                taken[way].append((time.process_time() - began) / STEPS)
    ratios = sorted(own / other for own, other in zip(taken["client"], taken["bare"], strict=True))
    print(
        f"{name}: bare {1e3 * statistics.median(taken['bare']):.0f} ms, client"
        f" {1e3 * statistics.median(taken['client']):.0f} ms a step; ratio {statistics.median(ratios):.3f}"
        f" ({ratios[0]:.3f} to {ratios[-1]:.3f})",
        flush=True,
    )


def main() -> None:
    """Measures all tasks."""
    torch.set_num_threads(1)
    for name in TASKS:
        measure(name)


if __name__ == "__main__":
    main()
