"""This library's side: ``python -m benchmarks._peers.own_side TASK FOLDER ACCELERATOR``."""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks._peers.stopwatch import report
from lit_fedad.core.config import compose
from lit_fedad.deployment.export import export
from lit_fedad.experiment.train import train
from lit_fedad.metrics.anomaly import AnomalyMetrics

LAYERS = {"patchcore": "[2,3]", "padim": "[1,2,3]"}
GRIDS = {"patchcore": 28, "padim": 56}


def detect(method: str, folder: Path) -> None:
    """Builds a detector of one client's images, scores the test images and measures it."""
    images = len(list((folder / "data" / "product" / "train" / "good").iterdir()))
    words = [f"out={folder}/own_{method}", "fresh=true", f"method=federated_{method}", "data=mvtec_mixture"]
    words += [f"data.root={folder}/data", "partition=pooled", "image.size=224", f"grid={GRIDS[method]}"]
    words += [
        f"backbone.weights={folder}/resnet18.pth",
        f"backbone.layers={LAYERS[method]}",
        "evaluation.alone=false",
    ]
    words += [
        "tracking=off",
        "evaluation.pictures=0",
        f"cache.folder={folder}/cache",
        f"fabric.accelerator={sys.argv[3]}",
    ]
    words += ["calibration.share=0"]  # trains on all images, as the other side does
    if method == "patchcore":
        words += [f"task.slots={images * 28 * 28 // 10}"]
    config = compose(words)
    shutil.rmtree(folder / "cache", ignore_errors=True)  # every run computes its features
    report(lambda: train(config, quiet=True))


def pixel_metrics(folder: Path) -> None:
    """Computes AUROC, AUPRO and AUPIMO of given maps, and the image values beside them."""
    given = np.load(folder / "maps.npz")
    maps, masks = (torch.from_numpy(given[name]).to(sys.argv[3]) for name in ("maps", "masks"))

    def measure() -> None:
        metrics = AnomalyMetrics().to(sys.argv[3])
        for scores, truth in zip(maps.split(16), masks.split(16), strict=True):
            metrics.update(scores.amax(dim=(1, 2)), truth.flatten(1).any(1), scores, truth)
        metrics.compute()

    report(measure)


def main() -> None:
    """Runs the task that the first argument names."""
    task, folder = sys.argv[1], Path(sys.argv[2])
    if task in LAYERS:
        detect(task, folder)
    elif task == "pixel metrics":
        pixel_metrics(folder)
    elif task == "export":
        report(lambda: export(f"{folder}/own_patchcore", format=("onnx",), out=f"{folder}/own_export"))


if __name__ == "__main__":
    main()
