"""anomalib's side, in its environment: ``python -m benchmarks._peers.anomalib_side TASK FOLDER ACCELERATOR``."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from anomalib.data import Folder
from anomalib.engine import Engine
from anomalib.metrics.aupro import _AUPRO
from anomalib.metrics.auroc import _AUROC
from anomalib.metrics.pimo.pimo import _AUPIMO
from anomalib.models import Padim, Patchcore

from benchmarks._peers.stopwatch import report

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
MODELS = {
    "patchcore": lambda: Patchcore(
        "resnet18", ["layer2", "layer3"], pre_trained=False, coreset_sampling_ratio=0.1
    ),
    "padim": lambda: Padim("resnet18", ["layer1", "layer2", "layer3"], pre_trained=False),
}


def built(method: str, folder: Path) -> Any:
    """Builds an untrained model with the given weights, images of 224 pixels."""
    model = MODELS[method]()
    model.pre_processor = type(model).configure_pre_processor((224, 224))
    weights = torch.load(folder / "resnet18.pth", weights_only=True)
    loaded = model.model.feature_extractor.feature_extractor.load_state_dict(weights, strict=False)
    assert not loaded.missing_keys, loaded.missing_keys
    return model


def engine_of(folder: Path, method: str) -> Any:
    """Makes an engine that runs in silence."""
    return Engine(
        accelerator=sys.argv[3],
        devices=1,
        logger=False,
        default_root_dir=folder / f"anomalib_{method}",
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def detect(method: str, folder: Path) -> None:
    """Builds a detector, scores the test images and measures it."""
    product = folder / "data" / "product"
    defects = [path.name for path in sorted((product / "test").iterdir()) if path.name != "good"]
    data = Folder(
        name="product",
        root=product,
        normal_dir="train/good",
        normal_test_dir="test/good",
        abnormal_dir=[f"test/{name}" for name in defects],
        mask_dir=[f"ground_truth/{name}" for name in defects],
        train_batch_size=16,
        eval_batch_size=16,
        num_workers=0,
    )
    model, engine = built(method, folder), engine_of(folder, method)

    def run() -> None:
        engine.fit(model=model, datamodule=data)
        engine.test(model=model, datamodule=data)

    report(run)
    engine.trainer.save_checkpoint(folder / f"anomalib_{method}.ckpt")


def pixel_metrics(folder: Path) -> None:
    """Computes AUROC, AUPRO and AUPIMO of given maps."""
    given = np.load(folder / "maps.npz")
    maps, masks = (torch.from_numpy(given[name]).to(sys.argv[3]) for name in ("maps", "masks"))
    maps = (maps - maps.min()) / (maps.max() - maps.min())

    def measure() -> None:
        for metric in (_AUROC(), _AUPRO(), _AUPIMO(num_thresholds=10_000)):
            metric.to(sys.argv[3])
            for scores, truth in zip(maps.split(16), masks.split(16), strict=True):
                metric.update(scores, truth.int())
            metric.compute()

    report(measure)


def main() -> None:
    """Runs the task that the first argument names."""
    task, folder = sys.argv[1], Path(sys.argv[2])
    if task in MODELS:
        detect(task, folder)
    elif task == "pixel metrics":
        pixel_metrics(folder)
    else:
        engine = engine_of(folder, "patchcore")
        model = Patchcore.load_from_checkpoint(
            folder / "anomalib_patchcore.ckpt", pre_trained=False, weights_only=False
        )
        if task == "predict":
            engine.predict(model=model, data_path=folder / "hundred")
        elif task == "export":
            report(
                lambda: engine.export(
                    model, "onnx", export_root=folder / "anomalib_export", input_size=(224, 224)
                )
            )


if __name__ == "__main__":
    main()
