"""Watches a folder of images as it grows: scores what is new, and says when images drift from those of calibration."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.data.image_files import snapshot
from lit_fedad.deployment.live_detector import OpenedClient, open_client, warn_of_product
from lit_fedad.deployment.predict import UNREADABLE, check_exists, listed, readable, score_cells
from lit_fedad.deployment.watch_log import KEY_COLUMNS, Key, WatchLog, key_of
from lit_fedad.experiment.claim import ELSEWHERE, locked
from lit_fedad.experiment.run_files import save_json
from lit_fedad.metrics.conformal import DecisionRule, ScoreCounts
from lit_fedad.metrics.drift import DriftTest, Stability, Step, uniformity
from lit_fedad.report.console import Display
from lit_fedad.tracking.tracker import amend

_P_VALUE_BINS = 20
_ANY_ALPHA = 0.5
"""Alpha that one calibration image can promise: a test of drift takes the most specific images, however few."""

_MOST_SCORES = 10_000_000
"""Most calibration images: the test of drift keeps each one's score, and their number may be anybody's claim."""

_RECENT = 10
"""Number of last images that the line of an alarm tells about."""

_MIN_NEW = 10
"""Fewest new images between two records in MLflow, so that no two records differ by a single image."""


def watch(
    run: str,
    images: str,
    client: int | str | None = None,
    product: str | None = None,
    alpha: float | None = None,
    run_length: float = 10_000,
    window: int = 200,
    interval: float = 10,
    once: bool = False,
    version: int | None = None,
    out: str | None = None,
    overrides: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Scores a folder as it grows, and raises an alarm when images drift; the same command continues.

    Drift is tested by `DriftTest`. Images are taken in the order of their last change. Each is scored once: what was
    scored stands in ``images.csv``. Files that cannot be read are looked at again when they have changed.

    The run's record in MLflow gets counts and statistics, after ten new images at the earliest; neither paths nor
    scores of single images.

    Args:
        run: MLflow run id, or the run's folder.
        images: The folder, with all folders in it.
        client: Whose detector scores them; None for the client with most training images.
        product: Product that all images show, where it is known.
        alpha: Promised rate of false alarms of single images; None for the run's.
        run_length: Smallest mean number of images between false alarms of drift.
        window: Number of last images for the uniformity of p-values and for the stability index.
        interval: Seconds between two looks at the folder.
        once: Whether to look once, and end.
        version: Number of the detector's version: 0 as it was trained, None for the default.
        out: Folder of the log; None for ``watch/client_N`` or ``watch/client_N_PRODUCT`` in the run's folder.
        overrides: Values that differ on this machine, such as ``backbone.weights``.

    Returns:
        The content of ``summary.json``, at the end of a single look.

    Raises:
        UserError: If there is no such complete run, client, product or folder, the run detects no anomalies or holds no
            calibration scores, or the folder of the log holds another watch, such as that of other images.
    """
    at_least("watch", 1, run_length=run_length, window=window)
    above("watch", 0, interval=interval)
    opened = open_client(run, client, version, overrides)
    folder, number = opened.folder, opened.number
    if opened.classifies:
        raise UserError(f"{folder.path}: a classifier has no scores of anomalies to watch")
    rule = opened.rule(alpha, product)
    calibration_scores = opened.calibration.rule(number, _ANY_ALPHA, product).scores
    if not calibration_scores.total:
        raise UserError(f"{folder.path}: {opened.title} holds no calibration scores to compare with")
    if calibration_scores.total > _MOST_SCORES:
        raise UserError(
            f"{folder.path / 'calibration.json'}: counts {calibration_scores.total} images, more than any run has;"
            " restore it from a copy"
        )
    check_exists(Path(images))  # before the log names it
    label = ClientNames.of(opened.result).label(number)
    name = f"watch/client_{label}" + (f"_{product}" if product else "").replace("/", "_")
    destination = Path(out) if out else folder.path / name
    with locked(destination, advice="" if out else ELSEWHERE):
        settings = {
            "images": str(Path(images).absolute()),
            "client": number,
            "product": product,
            "alpha": rule.alpha,
            "run_length": run_length,
            "calibration": calibration_scores.to_json(),
        }
        log = WatchLog.open(destination, settings)
        test = DriftTest(calibration_scores, run_length, opened.config["seed"])
        stream, display = _Stream(rule, calibration_scores, test, window), Display()
        if math.isinf(rule.threshold):
            display.warn(f"no image is called anomalous: {rule}")
        watcher = _Watcher(Path(images), log, stream, opened, display, name, product)
        watcher.look(report=True)
        while not once:
            time.sleep(interval)
            watcher.look()
    return stream.summary()


@dataclass
class _Stream:
    """The scores of a stream, and the state of its tests.

    Attributes:
        rule: Rule of the decisions about single images.
        calibration: Calibration scores of images like those of the stream.
        test: Test of drift.
        window: As in `watch`.
        scores: Score of each image that could be read; infinity where it is no number.
        steps: What the test said after each of them.
        unreadable: Number of images that could not be read.
    """

    rule: DecisionRule
    calibration: ScoreCounts
    test: DriftTest
    window: int
    scores: list[float] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    unreadable: int = 0

    def add(self, scores: Sequence[float]) -> list[Step]:
        """Adds the next images' scores; NaN ranks above all others, as in `ScoreCounts.p_values`.

        Scores are rounded to float32, so that a continued watch has the same numbers when it reads them from the log.
        """
        ranked = [math.inf if math.isnan(score) else float(np.float32(score)) for score in scores]
        steps = self.test.add(ranked)
        self.scores += ranked
        self.steps += steps
        return steps

    @property
    def alarms(self) -> list[int]:
        """Numbers of the images, from 1, that raised an alarm of drift."""
        return [number for number, step in enumerate(self.steps, 1) if step.alarm]

    def beyond(self, image: int) -> str:
        """Counts the images beyond the threshold among the last ones up to an image, and says what that hints at."""
        last = self.scores[max(0, image - _RECENT) : image]
        count = sum(score > self.rule.threshold for score in last)
        hint = "; a new product, another light or lens?" if 2 * count > len(last) else ""
        return f"{count} of the last {len(last)} beyond the threshold{hint}"

    def summary(self) -> dict[str, Any]:
        """Returns counts and statistics, and nothing of a single image."""
        p_values = [step.p_value for step in self.steps]
        distance, its_p_value = uniformity(p_values[-self.window :])
        stability = Stability.of(self.calibration, torch.tensor(self.scores[-self.window :]))
        last = self.steps[-1] if self.steps else Step(1.0, 0.0, 0.0, False)
        return {
            "images": len(self.scores),
            "unreadable": self.unreadable,
            "anomalous": sum(score > self.rule.threshold for score in self.scores),
            "alarms": self.alarms,
            "log10_martingale": last.log_martingale,
            "statistic": last.statistic,
            "ks": distance,
            "ks_p_value": its_p_value,
            "psi": stability.index,
            "psi_limit": stability.limit,
            "p_values": np.histogram(p_values, _P_VALUE_BINS, (0, 1))[0].tolist(),
            "scores": {"expected": list(stability.expected), "seen": list(stability.seen)},
        }


@dataclass
class _Watcher:
    """Looks at a folder again and again.

    Attributes:
        root: The folder of images.
        log: Log of the images that were scored.
        stream: Their scores and tests.
        opened: The client that scores them.
        display: Prints reports and warnings.
        place: Name of the watch in the run's record in MLflow, such as ``watch/client_0``.
        product: As in `watch`.
        left_out: Last line about files that are left out, which is printed when it changes.
        seen: What lay in the folder at the last look; None where that does not tell what is new.
    """

    root: Path
    log: WatchLog
    stream: _Stream
    opened: OpenedClient
    display: Display
    place: str
    product: str | None
    left_out: str | None = None
    seen: set[tuple[str, int, int]] | None = None

    def __post_init__(self) -> None:
        rows = self.log.rows()
        self.known: set[Key] = {(row["path"], row["bytes"], row["modified"]) for row in rows}
        self.stream.add([float(row["score"]) for row in rows if row["score"]])
        self.stream.unreadable = len(rows) - len(self.stream.scores)

    def look(self, report: bool = False) -> None:
        """Scores the images that are new, and reports if there are any, or if it is asked for."""
        new = self._new()
        if not new and not report:
            return
        alarms = len(self.stream.alarms)
        with self.display.progress("Scoring") as progress:
            files, size = list(new.items()), self.opened.config["evaluation"]["batch_size"]
            for start in range(0, len(files), size):
                batch = dict(files[start : start + size])
                self._score(batch)
                progress(start + len(batch), len(files))
        for image in self.stream.alarms[alarms:]:
            self.display.warn(
                f"image {image}: the images drift from those of calibration, {self.stream.beyond(image)} (without drift"
                f" at most one such alarm in {self.stream.test.run_length:g} images)"
            )
        self._report(len(new))

    def _new(self) -> dict[Path, Key]:
        """Lists files that have not been looked at, in the order of their last change."""
        # A full look takes seven times as long as a snapshot, and most looks find nothing.
        before, self.seen = self.seen, snapshot(self.root)
        if self.seen is not None and self.seen == before:
            return {}
        log_folder, new = self.log.folder.resolve(), {}
        paths, left_out = listed(self.root)
        if left_out and left_out != self.left_out:
            self.display.warn(left_out)
        self.left_out = left_out
        for path in paths:
            try:
                key = key_of(path, self.root)
            except OSError:  # it is gone again
                continue
            if key not in self.known and not path.resolve().is_relative_to(log_folder):
                new[path] = key
        return dict(sorted(new.items(), key=lambda item: (int(item[1][2]), item[1][0])))

    def _score(self, files: Mapping[Path, Key]) -> None:
        rule, images = self.stream.rule, readable(list(files), self.opened.transform.image, self.display)
        scored = self.opened.scored(list(images.values()), rule, self.product)
        warn_of_product(self.product, [image.alike for image in scored], self.display)
        steps = self.stream.add([image.score for image in scored])
        cells = {
            path: {**score_cells(image, rule), **_step_cells(step)}
            for path, image, step in zip(images, scored, steps, strict=True)
        }
        self.log.append(
            {**dict(zip(KEY_COLUMNS, key, strict=True)), **cells.get(path, {"decision": UNREADABLE})}
            for path, key in files.items()
        )
        self.known.update(files.values())
        self.stream.unreadable += len(files) - len(scored)

    def _report(self, new: int) -> None:
        summary, folder = self.stream.summary(), self.log.folder
        path = save_json(folder, "summary.json", summary)
        if find_spec("matplotlib"):  # not part of what a site needs to score
            from lit_fedad.report.decision_figures import drift_figure
            from lit_fedad.report.figures import save_figure

            figure = drift_figure(self.stream.steps, self.stream.test.run_length)
            save_figure(figure, folder / "drift.png")
        last = (
            f"; last {min(summary['images'], self.stream.window)}: uniform p-values {summary['ks_p_value']:.2g} (KS),"
            f" PSI {summary['psi']:.2f} (below {summary['psi_limit']:.2f} without drift)"
        )
        self.display.note(
            f"{new} new of {summary['images'] + summary['unreadable']} images: {summary['anomalous']} anomalous,"
            f" {summary['unreadable']} unreadable, alarms of drift: {len(summary['alarms'])}"
            + (last if summary["images"] else "")
        )
        if summary["images"] - self.log.tracked >= _MIN_NEW:
            self._track(summary, path)

    def _track(self, values: Mapping[str, Any], file: Path) -> None:
        """Adds counts and statistics to the run's record in MLflow."""
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        numbers["alarms"], folder = len(values["alarms"]), self.opened.folder
        prefix, home = folder.place(self.place), folder.home.path
        metrics = {f"{prefix}/{name}": value for name, value in numbers.items()}
        try:
            with locked(folder.home.path):
                delivery = amend(home, metrics, values["images"], [file], prefix)
        except UserError as error:
            self.display.warn(f"not tracked before the next images: {error}")
            return
        self.display.unsent(delivery.kept, home)
        self.log.tracked = values["images"]
        self.log.save()


def _step_cells(step: Step) -> dict[str, str]:
    """Writes what the test of drift says after an image as cells of the log."""
    return {
        "stream_p_value": f"{step.p_value:.6g}",
        "log10_martingale": f"{step.log_martingale:.6g}",
        "statistic": f"{step.statistic:.6g}",
        "alarm": str(step.alarm).lower(),
    }
