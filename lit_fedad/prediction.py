"""A finished run, used: metrics recomputed, new images scored."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric import Fabric

from lit_fedad.assembly import build_data, build_federation, build_model
from lit_fedad.config import Config
from lit_fedad.data.datamodule import ImageDataset
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform
from lit_fedad.errors import UserError
from lit_fedad.evaluation import predict_batch
from lit_fedad.federation.processes import make_fabric
from lit_fedad.report.console import Display
from lit_fedad.report.heatmaps import save_heatmap
from lit_fedad.runs import RunFolder

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"}


def evaluate(run: str, overrides: dict[str, str]) -> dict[str, Any]:
    """Recomputes a run's metrics from its last checkpoint, and writes ``evaluation.json``.

    Args:
        run: MLflow run id, or the run's folder.
        overrides: Values that differ on this machine: ``data.root``, ``backbone.weights``.

    Returns:
        Metrics as in ``result.json``.
    """
    folder = RunFolder.find(run)
    config = _adapted(folder.config(), overrides)
    display, fabric = Display(), _one_process(config)
    model = build_model(config)
    data = build_data(config, model.backbone, fabric, display)
    federation = build_federation(folder.config(), folder.path, model, data, fabric)
    last = federation.resume() - 1
    if last < 0:
        raise UserError(f"{folder.path}: no round is complete yet; train first")
    metrics = federation.evaluate(last)
    assert metrics is not None
    path = folder.save_json("evaluation.json", {"round": last, **metrics})
    display.metrics_table(metrics, f"After round {last}")
    display.where_next([("written", str(path))])
    return metrics


def predict(
    run: str, images: str, client: str | None = None, out: str | None = None, overrides: dict[str, str] | None = None
) -> Path:
    """Scores new images with a trained client, and writes a CSV and one heatmap an image.

    Args:
        run: MLflow run id, or the run's folder.
        images: Folder of images, searched through; or one image.
        client: Whose detector; None for the client with most training images.
        out: Where to write; None for ``predictions`` in the run's folder.
        overrides: Values that differ on this machine: ``backbone.weights``.

    Returns:
        The CSV: path, score, threshold, decision. The threshold is a quantile of the client's own normal training
        images' scores; test labels were never looked at.

    Raises:
        UserError: If there is no such run, client or image, or the backbone differs from the run's.
    """
    folder = RunFolder.find(run)
    config = _adapted(folder.config(), overrides or {})
    samples = [Sample(path, product="new") for path in _image_files(Path(images))]
    display, fabric = Display(), _one_process(config)
    model = build_model(config)
    result, thresholds = folder.result(), _thresholds(folder)
    if result and result["backbone"]["sha256"] != model.backbone.provenance["sha256"]:
        raise UserError(
            f"the run's backbone weights differ from those loaded now ({model.backbone.provenance['weights']});"
            " give backbone.weights=FILE"
        )
    number = _choose_client(client, thresholds, result)
    threshold = thresholds[number]
    model.restore(folder.path, folder.config(), number)
    model.client.to(fabric.device)
    destination = Path(out) if out else folder.path / "predictions"
    (destination / "heatmaps").mkdir(parents=True, exist_ok=True)
    transform = ImageTransform(**config["image"])
    dataset = ImageDataset(samples, transform, with_masks=False)
    size = config["evaluation"]["batch_size"]
    rows = []
    with display.progress(f"Client {number}") as progress:
        for start in range(0, len(samples), size):
            indices = list(range(start, min(start + size, len(samples))))
            prediction = predict_batch(model.client, dict(dataset.__getitems__(indices)), fabric)
            for place, index in enumerate(indices):
                score = float(prediction.image_score[place])
                heatmap = ""
                if prediction.anomaly_map is not None:
                    heatmap = f"heatmaps/{index:05d}_{samples[index].path.stem}.png"
                    save_heatmap(
                        destination / heatmap,
                        transform.raw(samples[index].path).numpy(),
                        prediction.anomaly_map[place].cpu().numpy(),
                        0.0,
                        2 * threshold,
                    )
                decision = "anomalous" if score > threshold else "normal"
                rows.append([str(samples[index].path), f"{score:.6g}", f"{threshold:.6g}", decision, heatmap])
            progress(len(rows), len(samples))
    with (destination / "scores.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "score", "threshold", "decision", "heatmap"])
        writer.writerows(rows)
    anomalous = sum(row[3] == "anomalous" for row in rows)
    display.note(f"{anomalous} of {len(rows)} images are anomalous to client {number} (threshold {threshold:.4g})")
    display.where_next([("scores", str(destination / "scores.csv")), ("heatmaps", str(destination / "heatmaps"))])
    return destination / "scores.csv"


def _one_process(config: Config) -> Fabric:
    fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1})
    fabric.launch()
    return fabric


def _adapted(config: Config, overrides: dict[str, str]) -> Config:
    for key, value in overrides.items():
        *path, leaf = key.split(".")
        section: Any = config
        for name in path:
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict) or leaf not in section:
            raise UserError(f"the run's configuration has no key '{key}'")
        section[leaf] = yaml.safe_load(value)
    return config


def _image_files(root: Path) -> list[Path]:
    if not root.exists():
        raise UserError(f"{root}: no such file or folder")
    files = [root] if root.is_file() else sorted(root.rglob("*"))
    found = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")]
    if not found:
        raise UserError(f"{root}: holds no image ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return found


def _thresholds(folder: RunFolder) -> dict[int, float]:
    path = folder.path / "thresholds.json"
    if not path.exists():
        raise UserError(f"{folder.path}: the run is not complete; the command that began it continues it")
    return {int(client): value for client, value in json.loads(path.read_text()).items()}


def _choose_client(client: str | None, thresholds: dict[int, float], result: dict[str, Any] | None) -> int:
    if client is None:
        sizes = result["partition"]["sizes"] if result else []
        return max(thresholds, key=lambda c: (sizes[c] if c < len(sizes) else 0, -c))
    if not client.isdigit() or int(client) not in thresholds:
        raise UserError(f"client={client}: the run has clients {', '.join(map(str, sorted(thresholds)))}")
    return int(client)
