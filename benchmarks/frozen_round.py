"""Frozen features of 60,000 images, and rounds of GLDP and FADngs on kept ones: seconds, memory, equal figures.

Processor seconds stand beside seconds, which other processes disturb.
"""

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._runs import run
from lit_fedad.data.frozen_features import frozen_features
from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.encoders import FrozenEncoder

IMAGES = 60_000

SMALL = ["rounds=3", "backbone=own", "features.size=32"]
"""Features of small images: how long they take to compute is measured apart."""

GLDP = [
    *SMALL, "method=gldp", "data.train_per_class=300", "partition=task_stream", "partition.stages=1",
    "partition.imbalance=10",
]  # fmt: skip
"""20 clients of some 60 images, as many as in a stage of [20, 4, 5] on 20,000 of CIFAR-10, and 30 epochs."""

FADNGS = [
    *SMALL, "method=fadngs", "features.views=8", "partition=dominant", "data.train_per_class=1050",
    "data.train_per_set=50", "public.count=1000", "distillation.queue=4096", "warmup=0", "~callbacks.capacities",
    "~callbacks.density_privacy",
]  # fmt: skip
"""Ten clients of 1,000 images, of which 800 are trained on, and 1,000 public ones."""


def extract(file: Path) -> None:
    """Prints what 60,000 images at 64 pixels take: seconds, the process's memory, bytes kept, seconds to read them."""
    encoder = FrozenEncoder(create_backbone("resnet10t", weights="own"), size=64)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, 32, 32), generator=draw, dtype=torch.uint8)

    def read(places: range) -> torch.Tensor:
        return images[places.start : places.stop] / 255

    before = _peak()
    for way in ("computed", "read again"):
        began, busy = time.perf_counter(), time.process_time()
        frozen_features(IMAGES, read, encoder.features, nn.Identity(), (), file)
        print(
            f"{IMAGES:,} images {way}: {time.perf_counter() - began:.1f} s, of the processor"
            f" {time.process_time() - busy:.1f} s",
            flush=True,
        )
    print(
        f"kept: {file.stat().st_size / 2**20:.0f} MiB; at the most {_peak() - before:.0f} MiB more memory",
        flush=True,
    )


def rounds(name: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Prints the seconds of rounds on kept features, the first left out; returns the run's result."""
    began = time.process_time()
    result = run(*overrides, f"cache.folder={folder}/cache", folder=folder)
    busy = time.process_time() - began
    taken = dict.fromkeys(result["exchanges"], 0.0)  # a round of FADngs has two exchanges
    for number, seconds in zip(result["exchanges"], result["seconds_per_round"], strict=True):
        taken[number] += seconds
    listed = " ".join(f"{seconds:.1f}" for number, seconds in taken.items() if number > 1)
    print(f"a round of {name}: {listed} s; of the processor, the whole run {busy:.0f} s", flush=True)
    return result


def _peak() -> float:
    """The largest memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Prints all of it, and whether features that are computed anew give the figures of kept ones."""
    with tempfile.TemporaryDirectory() as folder:
        extract(Path(folder) / "features.safetensors")
        kept = rounds("GLDP, 20 clients", GLDP, Path(folder))
        rounds("FADngs without distillation", [*FADNGS, "method.server.distillation=null"], Path(folder))
        rounds("FADngs, queue 4,096", FADNGS, Path(folder))
        anew = run(*GLDP, "cache.enabled=false", folder=Path(folder))
        equal = (kept["last"], kept["scalars"]) == (anew["last"], anew["scalars"])
        print(f"kept features and such that are computed anew: {'equal' if equal else 'DIFFERENT'} figures")


if __name__ == "__main__":
    main()
