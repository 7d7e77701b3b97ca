"""A FedAvg round of ten clients among 10, 100 and 1,000: seconds and memory (ResNet-18, images of CIFAR's size)."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

IMAGES_A_CLIENT = 20
FEDERATIONS = (10, 100, 1000)

CODE = """
import sys
from benchmarks._runs import run, seconds_a_round
folder, clients = sys.argv[1], int(sys.argv[2])
result = run("experiment=cifar10", "method=fedavg", "data=packed", f"data.root={folder}", "data.train=train.npz",
             "data.test=test.npz", "partition=file", f"partition.path={folder}/{clients}.json", "rounds=4",
             "federation=partial", f"federation.sampler.fraction={10 / clients}", "batch_size=20",
             "federation.sampler.min_clients=10")
print(seconds_a_round(result), result["peak_rss_bytes"] / 2**30)
"""


def write_images(folder: Path) -> None:
    """The same noise for every federation, so that only the number of clients differs."""
    draw = np.random.default_rng(0)
    for name, count in (("train", IMAGES_A_CLIENT * max(FEDERATIONS)), ("test", 100)):
        images = draw.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=np.arange(count) % 10)
    for clients in FEDERATIONS:
        owned = np.arange(IMAGES_A_CLIENT * clients).reshape(clients, -1)
        (folder / f"{clients}.json").write_text(json.dumps(owned.tolist()))


def main() -> None:
    """Prints seconds a round (median of three) and peak resident memory, each federation in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for clients in FEDERATIONS:
            command = [sys.executable, "-c", CODE, folder, str(clients)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seconds, peak = map(float, out.split()[-2:])
            print(f"{clients:>5} clients: {seconds:.1f} s a round, peak {peak:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
