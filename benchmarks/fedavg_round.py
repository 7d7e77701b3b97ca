"""A round of FedAvg beside a bare PyTorch loop over the same batches: ten clients with 31 batches of 32 images each.

ResNet-18 with torchvision's stem, images of CIFAR's size; ``images=992`` is the number of a client's images. Seconds
are the processor's, which other processes disturb less; of ``accelerator=cuda`` the clock's. The two in turn, SGD
without momentum, no augmentation.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from itertools import count
from pathlib import Path

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.core.config import compose
from lit_fedad.experiment.local_clients import build_run
from lit_fedad.experiment.run import Run
from lit_fedad.report.console import Display
from lit_fedad.tasks.classifier import Classifier

CLIENTS, IMAGES, PAIRS, LEARNING_RATE = 10, 992, 5, 0.01


def build(folder: Path, images_each: int, accelerator: str) -> Run:
    """Builds a federation of noise images in a folder."""
    total = CLIENTS * images_each
    images = np.random.default_rng(0).integers(0, 256, (total, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(total) % 10)
    (folder / "owned.json").write_text(json.dumps(np.arange(total).reshape(CLIENTS, images_each).tolist()))
    words = [
        "experiment=cifar10",
        "task=classifier_resnet18_224",
        "method=fedavg",
        "data=packed",
        f"data.root={folder}",
        "data.train=images.npz",
    ]
    words += [
        "data.test=images.npz",
        "partition=file",
        f"partition.path={folder}/owned.json",
        "batch_size=32",
    ]
    words += [
        f"task.learning_rate={LEARNING_RATE}",
        "task.momentum=0",
        "task.weight_decay=0",
        "task.augment=false",
    ]
    words += ["rounds=1000", f"out={folder}/run", "tracking=off"]
    run = build_run(Fabric(accelerator=accelerator, devices=1), compose(words), Display(quiet=True))
    run.federation.server.register_clients(run.data.module.sizes)
    run.federation.play(1)  # to warm up
    return run


def bare_round(model: nn.Module, run: Run, round: int) -> dict[str, Tensor]:
    """Trains the model by each client's batches in turn, and returns the mean of the trained weights."""
    began = deepcopy(model.state_dict())
    total: dict[str, Tensor] = {}
    for client in range(CLIENTS):
        model.load_state_dict(began)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        for batch in run.data.module.client_loader(client, torch.Generator().manual_seed(round)):
            optimizer.zero_grad()
            batch = run.fabric.to_device(batch)
            F.cross_entropy(model(batch["image"]), batch["label"]).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            total[name] = total[name].add_(value) if name in total else value.clone()
    return {name: (value / CLIENTS).to(value.dtype) for name, value in total.items()}


def contestants(
    folder: Path, images_each: int = IMAGES, accelerator: str = "cpu"
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns what plays the next round of either, from the same weights at first; images are drawn in a folder."""
    run = build(folder, images_each, accelerator)
    task = deepcopy(run.model.task)
    assert isinstance(task, Classifier)
    model = nn.Sequential(task.encoder, task.classifier).to(run.fabric.device)
    rounds, bare_rounds = count(2), count(2)

    def bare() -> None:
        model.load_state_dict(bare_round(model, run, next(bare_rounds)))

    def ours() -> None:
        run.federation.play(next(rounds))

    return ours, bare


def main() -> None:
    """Prints processor seconds of both, their ratio (median of pairs, least and largest)."""
    keys = dict(word.partition("=")[::2] for word in sys.argv[1:])
    images_each, accelerator, pairs = int(keys.get("images", IMAGES)), keys.get("accelerator", "cpu"), []
    now = time.process_time if accelerator == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        ours, bare = contestants(Path(folder), images_each, accelerator)
        for _ in range(PAIRS):
            began = now()
            ours()
            middle = now()
            bare()
            pairs.append((middle - began, now() - middle))
            print(f"{pairs[-1][0]:.2f} {pairs[-1][1]:.2f}", flush=True)
    own, other = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratios = sorted(one / another for one, another in pairs)
    print(f"{CLIENTS} clients of {images_each} images: round {own:.2f} s, bare loop {other:.2f} s")
    print(
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) in {PAIRS} pairs",
        flush=True,
    )


if __name__ == "__main__":
    main()
