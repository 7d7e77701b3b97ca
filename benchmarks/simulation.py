"""FedAvg over 1,000 clients, 10 a round, on small images: seconds and memory, in one process and with Ray workers."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks._runs import PLAIN

CLIENTS, A_ROUND, IMAGES, SIDE = 1000, 10, 20, 16

CODE = """
import sys
import psutil
from benchmarks._runs import seconds_a_round
from benchmarks.simulation import settings
from lit_fedad.core.config import compose
from lit_fedad.experiment.train import train

folder, workers = sys.argv[1:]

class Workers:
    most = 0

    def on_round_end(self, federation, report):
        held = [child.memory_info().rss for child in psutil.Process().children(recursive=True)]
        self.most = max(self.most, sum(held))

workers_memory = Workers()
config = compose([*settings(folder), f"out={folder}/{workers}", "rounds=8", f"simulation.workers={workers}"])
result = train(config, quiet=True, callbacks=[workers_memory])
accuracy = result["last"]["accuracy"]["mean"]
print(seconds_a_round(result), result["peak_rss_bytes"] / 2**30, workers_memory.most / 2**30, repr(accuracy))
"""


def settings(folder: str) -> list[str]:
    """Returns the configuration of the images that `write_images` wrote in a folder."""
    words = [*PLAIN, "method=fedavg", "task=classifier_convnet", "encoder.channels=8", "image.size=16"]
    words += [
        "image.resize=null",
        "data=packed",
        f"data.root={folder}",
        "data.train=train.npz",
        "data.test=test.npz",
    ]
    words += ["partition=file", f"partition.path={folder}/parts.json", "federation=partial"]
    return [
        *words,
        f"federation.sampler.fraction={A_ROUND / CLIENTS}",
        f"federation.sampler.min_clients={A_ROUND}",
        "fabric.accelerator=cpu",
    ]


def write_images(folder: Path) -> None:
    """Noise of ten classes, which differ in brightness."""
    draw = np.random.default_rng(0)
    for name, count in (("train", IMAGES * CLIENTS), ("test", 200)):
        labels = np.arange(count) % 10
        images = draw.integers(0, 100, (count, SIDE, SIDE, 3)) + 15 * labels[:, None, None, None]
        np.savez(folder / f"{name}.npz", images=images.astype(np.uint8), labels=labels)
    parts = np.arange(IMAGES * CLIENTS).reshape(CLIENTS, -1)
    (folder / "parts.json").write_text(json.dumps(parts.tolist()))


def main() -> None:
    """Prints seconds a round (median of seven), memory of the process and of its workers, and whether digits agree."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for workers in (0, 2):
            command = [sys.executable, "-c", CODE, folder, str(workers)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seconds, peak, held, found[workers] = out.split()[-4:]
            where = f"{workers} Ray workers" if workers else "one process"
            print(
                f"{where:<14}: {float(seconds):.2f} s a round, peak {float(peak):.2f} GiB, Ray's processes"
                f" {float(held):.2f} GiB, accuracy {found[workers]}",
                flush=True,
            )
    print(f"same accuracy: {len(set(found.values())) == 1}")


if __name__ == "__main__":
    main()
