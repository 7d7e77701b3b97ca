"""Frozen features of 60,000 images, and FADngs rounds on kept ones: seconds and bytes."""

import tempfile
import time
from pathlib import Path

import torch

from benchmarks._runs import run
from lit_fedad.data.frozen_features import frozen_features
from lit_fedad.models.backbones import create_backbone
from lit_fedad.models.frozen_encoder import FrozenEncoder

IMAGES = 60_000
PART = 1_920
"""Images that are extracted; the time of the others follows from theirs."""

ROUNDS = [
    "method=fadngs", "partition=dominant", "data.train_per_class=1050", "data.train_per_set=50", "public.count=1000",
    "distillation.queue=4096", "rounds=3", "task.warmup=0", "~callbacks.capacities", "~callbacks.density_privacy",
]  # fmt: skip


def main() -> None:
    """Prints what is kept of images at 64 pixels (own backbone), and seconds of rounds of ten clients of 800 images."""
    encoder = FrozenEncoder(create_backbone("resnet10t", weights="own"), size=64)
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (PART, 3, 32, 32), generator=draw, dtype=torch.uint8)

    def read(places: range) -> torch.Tensor:
        return images[places.start : places.stop] / 255

    began = time.perf_counter()
    found = frozen_features(PART, read, encoder.features, torch.nn.Identity(), (), None).plain
    seconds = (time.perf_counter() - began) * IMAGES / PART
    size = found[0].numel() * found.element_size() * IMAGES / 2**20
    print(f"{IMAGES:,} images, once: {seconds:.0f} s, {size:.0f} MiB kept", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cache = f"cache.folder={folder}/cache"
        for name, own in {"with SED": [], "without": ["method.server.distillation=null"]}.items():
            result = run(*ROUNDS, *own, cache, folder=Path(folder))
            rounds = [
                s
                for r, s in zip(result["exchanges"], result["seconds_per_round"], strict=True)
                if r in (2, 3)
            ]
            print(f"a round of FADngs {name}: {' '.join(f'{s:.1f}' for s in rounds)} s", flush=True)


if __name__ == "__main__":
    main()
