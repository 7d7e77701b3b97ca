"""Uses a finished run: recomputes its metrics, and scores new images with one of its clients."""

from __future__ import annotations

import csv
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import open_to_append, unwritable_in_one_line
from lit_fedad.core.text import csv_cell, printable
from lit_fedad.core.threads import file_threads
from lit_fedad.data.image_files import HEATMAPS, SCORES, SOME, LeftOut, find_images, image_suffixes
from lit_fedad.data.pictures import read_picture
from lit_fedad.data.sample import DICOM_SUFFIXES
from lit_fedad.deployment.live_detector import ANOMALOUS, OpenedClient, Scored, open_client, warn_of_product
from lit_fedad.evaluation.decisions import summarise_rates
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.claim import ELSEWHERE, locked
from lit_fedad.experiment.console import Progress
from lit_fedad.experiment.decisions import decisions
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.conformal import DecisionRule
from lit_fedad.report.console import Display
from lit_fedad.report.naming import named_version, p_value_text, promised_text
from lit_fedad.report.overlay import colour_ends, save_heatmap

UNREADABLE = "unreadable"
COLUMNS = ("path", "score", "p_value", "threshold", "decision", "heatmap")
CLASS_COLUMNS = ("path", "class", "probability")

# Bytes of a heatmap's name: file systems allow 255, and the name of its draft has some more.
_MAX_NAME = 180


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
    with locked(RunFolder.find(run).path):
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
            decisions_by_alpha = decisions(
                predictions, finished.config, finished.data, folder.calibration(), [alpha]
            )
            metrics |= summarise_rates(decisions_by_alpha[alpha])
            rates = promised_text(
                client_decisions["promised"] for client_decisions in decisions_by_alpha[alpha].values()
            )
            display.note(f"promised false alarms: at most {rates}")
        path = save_json(folder.path, "evaluation.json", {"round": last, **metrics})
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
        UserError: If there is no such complete run, client, product or image, the backbone differs from the run's, or
            another command writes to the folder; also if an image could not be read, after all others are scored.
    """
    opened = open_client(run, client, version, overrides)
    opened.check_options(alpha=alpha, product=product)
    destination = Path(out) if out else opened.folder.path / "predictions"
    root, display = Path(images), Display()
    paths = image_files(root, display)
    scorer: _Detect | _Classify
    if opened.classifies:
        scorer = _Classify(opened, display)
    else:
        scorer = _Detect(opened, opened.rule(alpha, product), destination, root, display, product)
    rows: list[dict[str, str]] = []
    scores, size = destination / SCORES, 0
    # Of two calls at the same time, one would write to a file that the other has removed.
    with (
        unwritable_in_one_line(destination, within=True),
        locked(destination, advice="" if out else ELSEWHERE),
    ):
        scores.unlink(missing_ok=True)  # the table of an earlier call
        try:
            with open_to_append(scores) as file, display.progress(f"Scoring with {opened.title}") as progress:
                writer = csv.DictWriter(file, scorer.columns)
                writer.writeheader()
                for start in range(0, len(paths), batch := opened.config["evaluation"]["batch_size"]):
                    scored = scorer(paths[start : start + batch])
                    writer.writerows({key: csv_cell(text) for key, text in row.items()} for row in scored)
                    file.flush()  # an interruption loses nothing that was computed
                    size = os.fstat(file.fileno()).st_size
                    rows += scored
                    progress(len(rows), len(paths))
        except BaseException:
            if size:
                os.truncate(scores, size)  # on a full disk a row may be half written
                display.warn(f"{scores}: holds {len(rows)} of {len(paths)} images")
            raise
    read = sum(row[scorer.decision_column] != UNREADABLE for row in rows)
    display.note(f"{opened.title}{named_version(opened.result)}: {scorer.conclude(rows)}")
    drawn = any(row.get("heatmap") for row in rows)
    display.where_next([("scores", str(scores)), *([("heatmaps", str(destination / HEATMAPS))] * drawn)])
    if read < len(rows):
        others = f"; the others are scored: {scores}" if read else ""
        raise UserError(f"{len(rows) - read} of {len(rows)} images could not be read{others}")
    return scores


def score_cells(image: Scored, rule: DecisionRule) -> dict[str, str]:
    """Writes what a detector says of an image as cells of a table."""
    return {
        "score": f"{image.score:.9g}",  # all digits of a float32
        "p_value": f"{image.p_value:.6g}",
        "threshold": f"{rule.threshold:.9g}",
        "decision": image.decision,
    }


Read = TypeVar("Read")


def readable(paths: Sequence[Path], read: Callable[[Path], Read], display: Display) -> dict[Path, Read]:
    """Reads images in threads, such as by `ImageTransform.image`; warns of those that cannot be read."""

    def attempt(path: Path) -> Read | UserError:
        try:
            return read(path)
        except UserError as error:
            return error

    images = {}
    with file_threads() as pool:
        for path, outcome in zip(paths, pool.map(attempt, paths), strict=True):
            if isinstance(outcome, UserError):
                display.warn(str(outcome))
            else:
                images[path] = outcome
    return images


@dataclass(frozen=True)
class _Classify:
    """Writes rows of the CSV file for a classifier: the likeliest class of each image."""

    opened: OpenedClient
    display: Display

    columns = CLASS_COLUMNS
    decision_column = "class"

    def __call__(self, paths: Sequence[Path]) -> list[dict[str, str]]:
        """Predicts one batch of files, and returns their rows."""
        images = readable(paths, self.opened.transform.image, self.display)
        rows = {path: {"path": str(path), "class": UNREADABLE} for path in paths}
        if images:
            batch = {"image": torch.stack(list(images.values()))}
            logits = predict_batch(self.opened.client, batch, self.opened.fabric).logits
            assert logits is not None
            probabilities, labels = logits.softmax(1).max(1)
            classes = self.opened.result["partition"]["products"]
            for path, probability, label in zip(images, probabilities, labels, strict=True):
                rows[path] |= {"class": classes[int(label)], "probability": f"{float(probability):.6g}"}
        return list(rows.values())

    def conclude(self, rows: Sequence[Mapping[str, str]]) -> str:
        """Counts the images of each class."""
        counts = Counter(row["class"] for row in rows)
        return ", ".join(f"{count} {name}" for name, count in counts.most_common())


@dataclass(frozen=True)
class _Detect:
    """Writes rows of the CSV file for an anomaly detector, and draws heatmaps."""

    opened: OpenedClient
    rule: DecisionRule
    destination: Path
    root: Path
    display: Display
    product: str | None
    alike: list[str | None] = field(default_factory=list)

    columns = COLUMNS
    decision_column = "decision"

    def conclude(self, rows: Sequence[Mapping[str, str]]) -> str:
        """Counts the anomalous images; warns where most images look like another product."""
        warn_of_product(self.product, self.alike, self.display)
        decisions = [row["decision"] for row in rows]
        read = len(rows) - decisions.count(UNREADABLE)
        return f"{decisions.count(ANOMALOUS)} of {read} images are anomalous ({self.rule})"

    def __call__(self, paths: Sequence[Path]) -> list[dict[str, str]]:
        """Predicts one batch of files, and returns their rows; unreadable images have no score and no heatmap."""
        transform = self.opened.transform

        def read(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
            return transform.tensor_and_shown(read_picture(path, transform.page), path)

        images = readable(paths, read, self.display)
        rows = {path: {"path": str(path), "decision": UNREADABLE} for path in paths}
        scored = self.opened.scored([pixels for pixels, _ in images.values()], self.rule, self.product)
        with file_threads() as pool:
            heatmaps = pool.map(self._draw, images, (shown.numpy() for _, shown in images.values()), scored)
            for path, image, heatmap in zip(images, scored, heatmaps, strict=True):
                rows[path] |= {**score_cells(image, self.rule), "heatmap": heatmap}
        self.alike.extend(image.alike for image in scored)
        return list(rows.values())

    def _draw(self, path: Path, image: np.ndarray, scored: Scored) -> str:
        """Draws the heatmap of an image into a folder of the same relative path, so that no two share a name.

        Returns:
            Its path in the destination; empty where the task has no maps.
        """
        if scored.map is None:
            return ""
        folder = path.parent.relative_to(self.root) if self.root.is_dir() else Path()
        shown = f"{path.stem}_{path.suffix[1:]}" if path.suffix else path.name
        suffixes = (*image_suffixes(), *DICOM_SUFFIXES)
        # A file without such a suffix may get the name of one with it, as a_png and a.png do.
        ambiguous = path.suffix.lower() not in suffixes and shown.lower().endswith(
            tuple(f"_{suffix[1:]}" for suffix in suffixes)
        )
        name = Path(HEATMAPS, *map(_named_after, folder.parts), f"{_named_after(shown, ambiguous)}.png")
        ends = colour_ends(scored.map, scored.score, self.rule.colour)
        save_heatmap(self.destination / name, image, scored.map, *ends, p_value_text(scored.p_value))
        return name.as_posix()


def _named_after(name: str, ambiguous: bool = False) -> str:
    """Names a file after another; adds a hash where the name is too long or ambiguous, or browsers refuse it."""
    printed = printable(name)
    if printed == name and len(name.encode()) <= _MAX_NAME and not ambiguous:
        return name
    shortened = printed.encode()[:_MAX_NAME].decode(errors="ignore")
    return f"{shortened}_{hashlib.sha256(os.fsencode(name)).hexdigest()[:12]}"


def image_files(root: Path, display: Display) -> list[Path]:
    """Lists the images in a folder.

    Args:
        root: The folder, or one image.
        display: Shows what is left out.

    Returns:
        Their paths, in alphabetical order.

    Raises:
        UserError: If there is no image.
    """
    paths, left_out = listed(root)
    if left_out:
        display.warn(left_out)
    if not paths:
        raise UserError(f"images={root}: no image there ({SOME})")
    return paths


def listed(root: Path) -> tuple[list[Path], str | None]:
    """Lists the images in a folder, of which there may be none, and those in all folders within it.

    Args:
        root: The folder, or one image.

    Returns:
        Their paths, in alphabetical order; and one line of what is left out, None for nothing.

    Raises:
        UserError: If there is no such folder or file.
    """
    check_exists(root)
    left_out = LeftOut()
    return find_images(root, left_out), left_out.line(root)


def check_exists(root: Path) -> None:
    """Refuses a folder or file of images that is not there.

    Raises:
        UserError: If it is not.
    """
    if not root.exists():
        raise UserError(f"images={root}: no such file or folder")
