"""Uses a finished run: recomputes its metrics, and scores new images with one of its clients."""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Client
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.core.text import csv_cell, printable
from lit_fedad.data.image_files import SOME, LeftOut, find_images
from lit_fedad.data.transform import ImageTransform
from lit_fedad.deployment.detector import decision_rule
from lit_fedad.evaluation.decisions import summarise_rates
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.console import Progress
from lit_fedad.experiment.decisions import decisions
from lit_fedad.experiment.finished_run import complete_run, one_process, reopen, same_model
from lit_fedad.experiment.geometry import image_transform
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.trained_client import load_client
from lit_fedad.metrics.conformal import Calibration, DecisionRule
from lit_fedad.report.console import Display
from lit_fedad.report.naming import p_value_text, promised_text
from lit_fedad.report.overlay import colour_ends, save_heatmap

NORMAL, ANOMALOUS, UNREADABLE = "normal", "anomalous", "unreadable"
COLUMNS = ("path", "score", "p_value", "threshold", "decision", "heatmap")
CLASS_COLUMNS = ("path", "class", "probability")

_LONGEST_NAME = (
    180  # bytes of a heatmap's name; what writes it adds some of its own, and file systems take 255
)


def evaluate(
    run: str, overrides: Mapping[str, str] | None = None, version: int | None = None
) -> dict[str, Any]:
    """Recomputes a run's metrics from its last checkpoint, and writes ``evaluation.json``.

    Args:
        run: MLflow run id, or the run's folder.
        overrides: Values that differ on this machine, such as ``data.root``.
        version: Number of the version: 0 for the run as it was trained, None for the default.

    Returns:
        Metrics as ``last`` in ``result.json``.

    Raises:
        UserError: If there is no such complete run, or its data or backbone are not available or not the same.
    """
    progress = Progress()
    with RunFolder.find(run).locked():
        finished = reopen(run, overrides, [progress], version)
        federation, folder, display = finished.federation, finished.folder, finished.display
        last = finished.config["rounds"]
        progress.start(display, "Evaluation")
        metrics = federation.evaluate(last)
        progress.stop()
        assert metrics is not None
        if finished.model.task.kind == "anomaly":
            alpha = folder.alpha()
            predictions = federation.predictions(last)
            judged = decisions(predictions, finished.config, finished.data, folder.calibration(), [alpha])
            metrics |= summarise_rates(judged[alpha])
            rates = promised_text(own["promised"] for own in judged[alpha].values())
            display.note(f"promised false alarms: at most {rates}")
        path = folder.save_json("evaluation.json", {"round": last, **metrics})
    display.note(f"round {last} of {folder.path}")
    display.metrics_table(metrics)
    display.where_next([("written", str(path))])
    return metrics


def predict(
    run: str,
    images: str,
    client: int | str | None = None,
    out: str | None = None,
    alpha: float | None = None,
    product: str | None = None,
    version: int | None = None,
    overrides: Mapping[str, str] | None = None,
) -> Path:
    """Scores new images with a trained client, and writes ``scores.csv`` and one heatmap an image.

    Tasks that do not localise get no heatmaps. Classifiers write the class of each image and its probability instead.

    The run's training images need not exist any more. Colours of heatmaps do not depend on the other images of the
    folder (`colour_ends`).

    Args:
        run: MLflow run id, or the run's folder.
        images: Folder of images, with all folders in it; or one image.
        client: Number of the client, or name of the site; None for the client with most training images.
        out: Folder to write to; None for ``predictions`` in the run's folder.
        alpha: Promised rate of false alarms; None for the run's own.
        product: Product that all images show, where it is known: it chooses the calibration scores.
        version: Number of the detector's version: 0 as it was trained, None for the default.
        overrides: Values that differ on this machine, such as ``backbone.weights``.

    Returns:
        The CSV file with path, score, p-value, threshold, decision and heatmap. P-value and threshold are conformal:
        by scores of normal images that the detector has not seen; no test label was used. Without enough of these the
        threshold is infinite. A name that a spreadsheet would run as a formula begins with a quote.

    Raises:
        UserError: If there is no such complete run, client, product or image, or the backbone differs from the run's;
            also if an image could not be read, after all others are scored.
    """
    folder, result, config = complete_run(run, overrides, version)
    model = same_model(config, result)
    classifies = model.task.kind == "classification"
    calibration = Calibration({}, shared=False) if classifies else folder.calibration()
    number = choose_client(client, result, calibration.clients)
    destination = Path(out) if out else folder.path / "predictions"
    root = Path(images)
    display, fabric = Display(), one_process(config)
    paths = image_files(root, destination, display)
    load_client(model, folder.path, folder.config(), number, fabric, result.get("own_client"))
    transform = image_transform(config, model.task)
    scorer: _Detect | _Classify
    if classifies:
        scorer = _Classify(model.client, fabric, transform, result["partition"]["products"], display)
    else:
        rule = decision_rule(calibration, number, folder.alpha() if alpha is None else alpha, product)
        scorer = _Detect(model.client, fabric, transform, rule, destination, root, display)
    rows: list[dict[str, str]] = []
    scores = destination / "scores.csv"
    try:
        destination.mkdir(parents=True, exist_ok=True)
        with (
            scores.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
            display.progress(f"Scoring with {ClientNames.of(result).title(number)}") as progress,
        ):
            writer = csv.DictWriter(file, scorer.columns)
            writer.writeheader()
            for start in range(0, len(paths), size := config["evaluation"]["batch_size"]):
                scored = scorer(paths[start : start + size])
                writer.writerows({key: csv_cell(text) for key, text in row.items()} for row in scored)
                file.flush()  # an interruption loses nothing that was computed
                rows += scored
                progress(len(rows), len(paths))
    except OSError as error:
        raise UserError(f"{error.filename or destination}: cannot be written ({error.strerror})") from error
    read = sum(row[scorer.decision_column] != UNREADABLE for row in rows)
    display.note(f"{ClientNames.of(result).title(number)}{named_version(result)}: {scorer.summary(rows)}")
    display.where_next([("scores", str(scores)), *scorer.pictures(rows)])
    if read < len(rows):
        raise UserError(
            f"{len(rows) - read} of {len(rows)} images could not be read; the others are scored: {scores}"
        )
    return scores


def readable(paths: Sequence[Path], transform: ImageTransform, display: Display) -> dict[Path, torch.Tensor]:
    """Reads images as input of the task; warns of those that cannot be read."""
    images = {}
    for path in paths:
        try:
            images[path] = transform.image(path)
        except UserError as error:
            display.warn(str(error))
    return images


@dataclass(frozen=True)
class _Classify:
    """Writes rows of the CSV file for a classifier: the likeliest class of each image."""

    client: Client
    fabric: Fabric
    transform: ImageTransform
    classes: Sequence[str]
    display: Display

    columns = CLASS_COLUMNS
    decision_column = "class"

    def __call__(self, paths: Sequence[Path]) -> list[dict[str, str]]:
        """Predicts one batch of files, and returns their rows."""
        images = readable(paths, self.transform, self.display)
        rows = {path: {"path": str(path), "class": UNREADABLE} for path in paths}
        if images:
            batch = {"image": torch.stack(list(images.values()))}
            logits = predict_batch(self.client, batch, self.fabric).logits
            assert logits is not None
            probabilities, labels = logits.softmax(1).max(1)
            for path, probability, label in zip(images, probabilities, labels, strict=True):
                rows[path] |= {"class": self.classes[int(label)], "probability": f"{float(probability):.6g}"}
        return list(rows.values())

    def summary(self, rows: Sequence[Mapping[str, str]]) -> str:
        """Counts the images of each class."""
        counts = Counter(row["class"] for row in rows)
        return ", ".join(f"{count} {name}" for name, count in counts.most_common())

    def pictures(self, rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
        """Returns nothing: a classifier draws no pictures."""
        return []


@dataclass(frozen=True)
class _Detect:
    """Writes rows of the CSV file for an anomaly detector, and draws heatmaps."""

    client: Client
    fabric: Fabric
    transform: ImageTransform
    rule: DecisionRule
    destination: Path
    root: Path
    display: Display

    columns = COLUMNS
    decision_column = "decision"

    def summary(self, rows: Sequence[Mapping[str, str]]) -> str:
        """Counts the anomalous images."""
        decisions = [row["decision"] for row in rows]
        read = len(rows) - decisions.count(UNREADABLE)
        return f"{decisions.count(ANOMALOUS)} of {read} images are anomalous ({self.rule})"

    def pictures(self, rows: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
        """Returns name and folder of the heatmaps, if there are any."""
        drawn = any(row.get("heatmap") for row in rows)
        return [("heatmaps", str(self.destination / "heatmaps"))] if drawn else []

    def __call__(self, paths: Sequence[Path]) -> list[dict[str, str]]:
        """Predicts one batch of files, and returns their rows; unreadable images have no score and no heatmap."""
        images = readable(paths, self.transform, self.display)
        rows = {path: {"path": str(path), "decision": UNREADABLE} for path in paths}
        if images:
            prediction = predict_batch(
                self.client, {"image": torch.stack(list(images.values()))}, self.fabric
            )
            maps = prediction.anomaly_map
            p_values = self.rule.scores.p_values(prediction.image_score)
            for place, path in enumerate(images):
                score = float(prediction.image_score[place])
                rows[path] |= {
                    "score": f"{score:.9g}",  # all digits of a float32
                    "p_value": f"{float(p_values[place]):.6g}",
                    "threshold": f"{self.rule.threshold:.9g}",
                    "decision": NORMAL if score <= self.rule.threshold else ANOMALOUS,
                    "heatmap": ""
                    if maps is None
                    else self._draw(path, maps[place].cpu().numpy(), score, float(p_values[place])),
                }
        return list(rows.values())

    def _draw(self, path: Path, anomaly_map: np.ndarray, score: float, p_value: float) -> str:
        """Draws the heatmap of an image into a folder of the same relative path, so that no two share a name."""
        folder = path.parent.relative_to(self.root) if self.root.is_dir() else Path()
        shown = f"{path.stem}_{path.suffix[1:]}" if path.suffix else path.name
        name = Path("heatmaps", *map(_named_after, folder.parts), f"{_named_after(shown)}.png")
        image = self.transform.raw(path).numpy()
        ends = colour_ends(anomaly_map, score, self.rule.colour)
        save_heatmap(self.destination / name, image, anomaly_map, *ends, p_value_text(p_value))
        return name.as_posix()


def _named_after(name: str) -> str:
    """Names a file after another; where its name is too long, or browsers refuse it, a hash tells it apart."""
    shown = printable(name)
    if shown == name and len(name.encode()) <= _LONGEST_NAME:
        return name
    cut = shown.encode()[:_LONGEST_NAME].decode(errors="ignore")
    return f"{cut}_{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"


def image_files(root: Path, destination: Path, display: Display) -> list[Path]:
    """Lists the images in a folder, without heatmaps of an earlier call.

    Args:
        root: The folder, or one image.
        destination: Folder that the call writes to.
        display: Shows what is left out.

    Returns:
        Their paths, in alphabetical order.

    Raises:
        UserError: If there is no image.
    """
    made = destination.resolve() / "heatmaps"
    paths, left_out = listed(root)
    own = {path for path in paths if made.is_dir() and path.resolve().is_relative_to(made)}
    if left_out:
        display.warn(left_out)
    if len(own) == len(paths):
        raise UserError(f"images={root}: no image there ({SOME})")
    return [path for path in paths if path not in own]


def listed(root: Path) -> tuple[list[Path], str | None]:
    """Lists the images in a folder, of which there may be none, and those in all folders within it.

    Args:
        root: The folder, or one image.

    Returns:
        Their paths, in alphabetical order; and one line of what is left out, None for nothing.

    Raises:
        UserError: If there is no such folder or file.
    """
    if not root.exists():
        raise UserError(f"images={root}: no such file or folder")
    left_out = LeftOut()
    return find_images(root, left_out), left_out.line(root)


def named_version(result: Mapping[str, Any]) -> str:
    """Names the version that a result is of; empty for the run as it was trained."""
    return f", version {result['version']}" if "version" in result else ""


def choose_client(client: int | str | None, result: Mapping[str, Any], calibrated: Collection[int]) -> int:
    """Finds the client that a user names, or chooses the one with most training images.

    Args:
        client: Its number, or the name of a site; None to choose.
        result: Content of the run's ``result.json``.
        calibrated: Clients that were calibrated, without those that were left out of the run; empty for classifiers.

    Raises:
        UserError: If it is no client that holds images and took part in the run.
    """
    names, sizes = ClientNames.of(result), result["partition"]["sizes"]
    holders = [
        number for number, size in enumerate(sizes) if size and (not calibrated or number in calibrated)
    ]
    if client is None:
        return max(holders, key=lambda number: (sizes[number], -number))
    number = names.number(str(client))
    if number not in holders:
        raise UserError(f"client={client}: the run has clients {', '.join(map(names.label, holders))}")
    return number
