"""Peak memory of a FedDyMem round at the paper's size (WRN-50-2, 224 px, 56 x 56 x 1792, batch 10)."""

import subprocess
import sys

CODE = """
from benchmarks._runs import run
result = run("method={method}", "backbone=wide_resnet50_2", "backbone.weights=random", "image.size=224",
             "image.fit=crop", "image.resize=256", "grid=56", "rounds=1", "batch_size=10",
             "partition=iid", "partition.clients=2",
             "data.train_per_product=4", "data.test_per_product=4")
up = result["bytes_up"][-1] / 2
print(result["peak_rss_bytes"] / 2**30, result["seconds_per_round"][-1], up / 1e6)
"""


def main() -> None:
    """Prints peak resident memory and seconds of one round over 20 training images, each in a process of its own."""
    for method in ("feddymem", "feddymem_literal"):
        out = subprocess.run(
            [sys.executable, "-c", CODE.format(method=method)], capture_output=True, text=True, check=True
        ).stdout
        peak, seconds, up = map(float, out.split()[-3:])
        print(f"{method:<18} peak {peak:.2f} GiB, {seconds:.0f} s, {up:.2f} MB up a client", flush=True)


if __name__ == "__main__":
    main()
