"""A FedDyMem round with cached frozen features against one that extracts them (WRN-50-2, 224 px)."""

import tempfile
from pathlib import Path

from benchmarks._runs import run, seconds_a_round

COMMON = [
    "backbone=wide_resnet50_2", "backbone.weights=random", "image.size=224", "image.fit=crop",
    "image.resize=256", "rounds=3",
    "partition=iid", "partition.clients=2", "data.train_per_product=4", "data.test_per_product=4",
]  # fmt: skip
CASES = {
    "memory only, 28 x 28": ["grid=28", "task.head=null"],
    "with head, 28 x 28": ["grid=28"],
}


def main() -> None:
    """Prints seconds a round over 20 training images, and the ratio."""
    print(f"{'':<22} {'cached':>9} {'extracted':>10} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in CASES.items():
            cache = f"cache.folder={folder}/cache"
            cached = seconds_a_round(run(*COMMON, *overrides, cache, folder=Path(folder)))
            extracted = seconds_a_round(run(*COMMON, *overrides, "cache.enabled=false", folder=Path(folder)))
            print(f"{name:<22} {cached:7.2f} s {extracted:8.2f} s {extracted / cached:6.1f}x", flush=True)


if __name__ == "__main__":
    main()
