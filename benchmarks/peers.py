"""This library beside others: ``python -m benchmarks peers cache=DIR [data=DIR] [images=20] [pairs=3] [tasks=...]``.

Installs anomalib and Flower into environments of their own in ``cache``, and runs each pair in turn: PatchCore and
PaDiM (fit and test; ResNet-18 with the same random weights, 224 pixels, a coreset of 10 %), pixel metrics, `predict`
of 100 images, export to ONNX and its latency, the start of the command; FedAvg's round beside a bare PyTorch loop,
beside Flower's simulation and, with ``pfllib=DIR``, a clone of PFLlib, beside its loop. ``data`` is a product in the
layout of MVTec AD; without it images are drawn. Of ``tasks``, predict and export need patchcore, and latency export.
``client_images=992`` is the number of images of each of FedAvg's ten clients. Seconds are the processor's, user and
system, and the clock's. With ``accelerator=cuda`` detectors, pixel metrics and FedAvg's round are computed on a GPU,
and ratios are the clock's; Flower's and PFLlib's rounds are measured on the processor alone.
"""

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import timm
import torch

from benchmarks import fedavg_round
from benchmarks._peers.environments import python_of, versions
from benchmarks.pixel_metrics import synthetic_maps
from lit_fedad.core.errors import UserError
from lit_fedad.data.textures import textures


class Seconds(NamedTuple):
    """Of the processor and of the clock; beside them the most megabytes that were held on a GPU at once."""

    cpu: float
    wall: float
    gpu: float = 0.0


Work = Callable[[], Seconds]

MAPS = 60
ANOMALIB = ("patchcore", "padim", "pixel metrics", "predict", "export", "latency", "help")
FEDAVG = ("fedavg", "flower", "pfllib")
KEYS = {"cache", "data", "images", "pairs", "tasks", "pfllib", "client_images", "accelerator"}


def prepare(folder: Path, data: Path | None, images: int) -> None:
    """Writes what both sides read: images, weights and maps."""
    if data is None:
        drawn = textures(folder / "drawn", train_per_product=images, test_per_product=20)
        data = drawn.train[0].path.parents[2]
    product = folder / "data" / "product"
    for split in sorted(path for path in [*data.glob("test/*"), data / "train" / "good"] if path.is_dir()):
        files = sorted(split.iterdir())[: images if split.parent.name == "train" else 10]
        (product / split.relative_to(data)).mkdir(parents=True)
        for file in files:
            shutil.copy(file, product / split.relative_to(data))
            if (mask := data / "ground_truth" / split.name / f"{file.stem}_mask.png").exists():
                (product / "ground_truth" / split.name).mkdir(parents=True, exist_ok=True)
                shutil.copy(mask, product / "ground_truth" / split.name)
    (folder / "hundred").mkdir()
    for number, file in enumerate(islice(cycle(sorted(product.glob("test/*/*"))), 100)):
        shutil.copy(file, folder / "hundred" / f"{number:03d}{file.suffix}")
    torch.manual_seed(0)
    torch.save(timm.create_model("resnet18").state_dict(), folder / "resnet18.pth")
    maps, masks = synthetic_maps(MAPS)
    np.savez(folder / "maps.npz", maps=maps.numpy(), masks=masks.numpy())


def seconds_of(command: list[str]) -> Seconds:
    """Runs a command; returns the seconds that its last line tells, or else those of the whole process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    if outcome.returncode:
        raise UserError(f"{' '.join(command[-3:])}: {(outcome.stderr.strip() or 'failed').splitlines()[-1]}")
    try:
        told = json.loads(outcome.stdout.strip().splitlines()[-1])
        return Seconds(told["cpu"], told["wall"], told.get("gpu", 0.0))
    except (ValueError, TypeError, IndexError):
        return Seconds(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def latency(exported: Path) -> Seconds:
    """Measures one image through a folder's ONNX file, one thread: the mean of twenty, after two."""
    model = next(exported.glob("**/*.onnx"), None)
    if model is None:
        raise UserError(f"{exported}: holds no ONNX file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]
    # A file may take one size of batch alone.
    count = given.shape[0] if isinstance(given.shape[0], int) else 1
    image = np.random.default_rng(0).random((count, 3, 224, 224), dtype=np.float32)
    fed = {given.name: image if given.type == "tensor(float)" else (255 * image).astype(np.uint8)}
    for _ in range(2):
        session.run(None, fed)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(20):
        session.run(None, fed)
    return Seconds((time.process_time() - cpu) / (20 * count), (time.perf_counter() - wall) / (20 * count))


def compare(name: str, ours: Work, theirs: Work, pairs: int, by_clock: bool) -> None:
    """Runs a pair in turn, and prints a line of medians, their ratio (least and largest) and the load."""
    try:
        found = [(ours(), theirs()) for _ in range(pairs)]
    except UserError as error:
        print(f"{name:<14}left out: {error}", flush=True)
        return
    cpu = [statistics.median(one[side][0] for one in found) for side in (0, 1)]
    wall = [statistics.median(one[side][1] for one in found) for side in (0, 1)]
    ratios = sorted(other[by_clock] / own[by_clock] for own, other in found)
    print(
        f"{name:<14}{cpu[0]:9.3f}{cpu[1]:9.3f}{statistics.median(ratios):8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        f"{wall[0]:9.3f}{wall[1]:9.3f}{os.getloadavg()[0]:7.1f}"
        + (f"{found[0][0].gpu:9.0f}{found[0][1].gpu:9.0f}" if by_clock else ""),
        flush=True,
    )


def anomalib_pairs(folder: Path, python: Path, accelerator: str) -> dict[str, tuple[Work, Work]]:
    """Returns what is compared with anomalib, whose programs lie beside its Python; some need earlier files."""
    command = [sys.executable, "-m", "lit_fedad"]
    scoring = [f"run={folder}/own_patchcore", f"images={folder}/hundred", f"out={folder}/scores"]

    def here(task: str) -> Work:
        own = [sys.executable, "-m", "benchmarks._peers.own_side"]
        return lambda: seconds_of([*own, task, str(folder), accelerator])

    def there(task: str) -> Work:
        their = [str(python), "-m", "benchmarks._peers.anomalib_side"]
        return lambda: seconds_of([*their, task, str(folder), accelerator])

    return {
        "patchcore": (here("patchcore"), there("patchcore")),
        "padim": (here("padim"), there("padim")),
        "pixel metrics": (here("pixel metrics"), there("pixel metrics")),
        "predict": (lambda: seconds_of([*command, "predict", *scoring]), there("predict")),
        "export": (here("export"), there("export")),
        "latency": (lambda: latency(folder / "own_export"), lambda: latency(folder / "anomalib_export")),
        "help": (
            lambda: seconds_of([*command, "--help"]),
            lambda: seconds_of([str(python.with_name("anomalib")), "--help"]),
        ),
    }


def fedavg_pairs(
    folder: Path, keys: dict[str, str], tasks: list[str], accelerator: str
) -> dict[str, tuple[Work, Work]]:
    """Returns FedAvg's round beside those of a bare PyTorch loop, of Flower's simulation and of PFLlib's loop."""
    images_each = int(keys.get("client_images", fedavg_round.IMAGES))
    ours, bare = fedavg_round.contestants(folder, images_each, accelerator)
    pairs: dict[str, tuple[Work, Work]] = {"fedavg": (lambda: timed(ours), lambda: timed(bare))}

    def there(name: str, packages: list[str], *words: str) -> None:
        python = python_of(Path(keys["cache"]), name, ["torch", "torchvision", *packages])
        if python:
            print(f"peer: {versions(python, ['torch', 'torchvision'])}")
            command = [str(python), "-m", f"benchmarks._peers.{name}_side", *words, str(folder)]
            pairs[name] = (lambda: timed(ours), lambda: seconds_of(command))

    if "flower" in tasks:
        there("flower", ["flwr[simulation]", "psutil"])
    if "pfllib" in tasks and "pfllib" in keys:
        there("pfllib", ["scikit-learn", "h5py", "ujson"], keys["pfllib"])
    elif "pfllib" in tasks:
        print("pfllib is left out: give pfllib=DIR, a clone of github.com/TsingZ0/PFLlib")
    return pairs


def main() -> None:
    """Prints one table: seconds of both sides, and how many times ours theirs are."""
    keys = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if unknown := keys.keys() - KEYS:
        sys.exit(f"peers has no key {', '.join(sorted(unknown))}")
    if "cache" not in keys:
        sys.exit("peers needs cache=DIR, a folder for the environments of other libraries")
    data = Path(keys["data"]) if "data" in keys else None
    accelerator = keys.get("accelerator", "cpu")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s)"
    )
    print(f"here: {versions(sys.executable, ['torch', 'timm', 'lightning', 'onnxruntime'])}")
    usual = [*ANOMALIB, *(FEDAVG if accelerator == "cpu" else ("fedavg",))]
    tasks = keys["tasks"].split(",") if "tasks" in keys else usual
    if unknown := {*tasks} - {*ANOMALIB, *FEDAVG}:
        sys.exit(f"no task {', '.join(sorted(unknown))}; one of {', '.join([*ANOMALIB, *FEDAVG])}")
    pairs: dict[str, tuple[Work, Work]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, packages = Path(name), ["anomalib", "onnx", "onnxscript", "onnxruntime"]
        if {*tasks} & {*ANOMALIB} and (python := python_of(Path(keys["cache"]), "anomalib", packages)):
            print(f"peer: {versions(python, ['anomalib', 'torch', 'timm', 'lightning'])}")
            prepare(folder, data, int(keys.get("images", 20)))
            pairs |= anomalib_pairs(folder, python, accelerator)
        if {*tasks} & {*FEDAVG}:
            pairs |= fedavg_pairs(folder, keys, tasks, accelerator)
        print(
            f"{'seconds':<14}{'ours':>9}{'theirs':>9}{'ratio':>8}  spread{'clock':>17}{'theirs':>9}{'load':>7}"
            + (f"{'GPU MB':>9}{'theirs':>9}" if accelerator != "cpu" else "")
        )
        for task in (task for task in tasks if task in pairs):
            compare(task, *pairs[task], int(keys.get("pairs", 3)), accelerator != "cpu")


def timed(work: Callable[[], None]) -> Seconds:
    """Runs a piece of work in this process, and returns its seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


if __name__ == "__main__":
    main()
