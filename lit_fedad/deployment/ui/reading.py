"""What the operator's page shows of a run's folder, as plain rows: nothing here knows how it is shown."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template

from lit_fedad.core.client_names import ClientNames
from lit_fedad.core.errors import UserError, one_line
from lit_fedad.core.files import stored_text
from lit_fedad.core.plain_values import plain_json
from lit_fedad.data.input_files import written_rows
from lit_fedad.experiment.run_files import refused_if_malformed
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.conformal import Alpha, Calibration, DecisionRule, ScoreCounts
from lit_fedad.report.naming import human_bytes, metric_text, metric_title
from lit_fedad.sites.status import STATUS, read_status, status_rows

Row = dict[str, Any]

_MAX_ROWS = 200_000
_BINS = 40
_MAX_SCORE = float(np.finfo(np.float32).max)  # detectors give no more, and bins need finite widths


def histogram_svg(rows: Sequence[Row], threshold: float) -> str:
    """Draws shares of scores as bars, and the threshold as a line.

    Args:
        rows: From `histogram`.
        threshold: Score above which images raise an alarm.

    Returns:
        An ``svg`` element.
    """
    if not rows:
        return "<p>No scores yet.</p>"
    limit = threshold if math.isfinite(threshold) else None
    shown = [row["score"] for row in rows] + ([] if limit is None else [limit])
    template = Template(
        (Path(__file__).parent / "histogram.svg").read_text(), autoescape=True, trim_blocks=True
    )
    return template.render(rows=rows, low=min(shown), high=max(shown), threshold=limit)


@dataclass(frozen=True)
class RunView:
    """A run's folder as its operator sees it: that of its default version.

    Attributes:
        path: The folder.
        result: Content of ``result.json``; empty while the run is not complete.
        status: Content of ``status.json``, which a federation of sites writes; empty without one.
        calibration: Scores of normal images; None where there are none.
        page: Page or frame, from 0, that is read of each file; None where files hold one alone.
    """

    path: Path
    result: Mapping[str, Any]
    status: Mapping[str, Any]
    calibration: Calibration | None
    page: int | None = None

    @classmethod
    def open(cls, run: str) -> RunView:
        """Reads a run's folder.

        Args:
            run: MLflow run id, or the folder.

        Raises:
            UserError: If there is no such run, or a file of it cannot be read.
        """
        folder = RunFolder.find(run).version(None)
        home, result = folder.home.path, folder.result() or {}
        status = read_status(home) if (home / STATUS).exists() else {}
        calibrated = (folder.path / "calibration.json").exists()
        calibration = folder.calibration() if calibrated else None
        page = folder.config()["image"].get("page")
        view = cls(folder.path, result, status, calibration, page)
        # A folder may come from anybody: wrong content is told now, not by a traceback of the page.
        with refused_if_malformed(f"{folder.path}: result.json or {STATUS}"):
            _ = view.title, view.curves(), view.rounds(), view.sites(), view.troubles()
        return view

    @property
    def alpha(self) -> Alpha:
        """Reads the rate of false alarms that the default version promises, which the page itself may change."""
        return RunFolder(self.path).home.version(None).alpha()

    def check_default(self) -> None:
        """Refuses a default version with other calibration scores, such as an update: it has other thresholds.

        Raises:
            UserError: If it has such scores, or the run cannot be read any more.
        """
        default = RunFolder(self.path).home.version(None)
        if self.calibration and default.calibration().to_json() != self.calibration.to_json():
            raise UserError(
                f"{default.path}: is the default version now, of other calibration scores than this page shows; begin"
                " lit-fedad ui again"
            )

    @property
    def names(self) -> ClientNames:
        """Returns what the clients are called."""
        return ClientNames.of(self.result)

    @property
    def title(self) -> str:
        """Names method, data and progress."""
        if not self.result:
            done = f"round {self.status['round']} of {self.status['rounds']}" if self.status else "not begun"
            return f"{self.path.name}: {done}"
        rounds = self.result["rounds"]
        return f"{self.result['method']} on {self.result['data']}, {rounds} round{'s' * (rounds != 1)}"

    def curves(self) -> list[Row]:
        """Lists the mean of each metric over clients by round."""
        return [
            {"round": int(number), "metric": metric_title(name), "value": value}
            for number, metrics in self.result.get("metrics", {}).items()
            for name, value in metrics.items()
            if value is not None and math.isfinite(value)
        ]

    def rounds(self) -> list[Row]:
        """Lists the exchanges: bytes, seconds and how many sites failed or were refused."""
        result = self.result
        if not result:
            return []
        causes_of_loss = [result[name] for name in ("failures", "refused", "unscored")]
        keys = ("exchange_names", "exchanges", "bytes_up", "bytes_down", "seconds_per_round")
        return [
            {
                "round": str(number) if number > 0 else f"set-up {name}".rstrip(),
                "up": human_bytes(up),
                "down": human_bytes(down),
                "seconds": round(seconds, 1),
                "sites lost": len(
                    set[str]().union(*(causes.get(str(number), ()) for causes in causes_of_loss))
                ),
            }
            for name, number, up, down, seconds in zip(*(result[key] for key in keys), strict=True)
        ]

    def sites(self) -> list[Row]:
        """Lists the sites: of a federation what its coordinator saw, of another run what its clients hold."""
        if self.status:
            heads = ("site", "rounds", "last round", "up", "down", "false alarms")
            return [{head: row[head] for head in heads} for row in status_rows(self.status["sites"])]
        sizes = self.result.get("partition", {}).get("sizes", [])
        last = self.result.get("last", {})
        shown = [name for name in ("i_auroc", "false_alarm_rate", "miss_rate", "accuracy") if name in last]
        return [
            {
                "site": self.names.title(number),
                "images": size,
                **{
                    metric_title(name): metric_text(last[name]["per_client"].get(str(number)))
                    for name in shown
                },
            }
            for number, size in enumerate(sizes)
        ]

    def troubles(self) -> list[Row]:
        """Lists failures and refusals: round, site and cause."""
        if self.status:
            pairs = [(name, text) for name, site in self.status["sites"].items() for text in site["troubles"]]
            parts = [(name, *text.removeprefix("round ").partition(": ")[::2]) for name, text in pairs]
            return [{"round": number, "site": name, "cause": cause} for name, number, cause in parts]
        return [
            {"round": number, "site": self.names.title(int(client)), "cause": str(cause)}
            for kind in ("failures", "refused", "unscored")
            for number, causes in self.result.get(kind, {}).items()
            for client, cause in (
                causes.items() if isinstance(causes, Mapping) else [(client, kind) for client in causes]
            )
        ]

    def clients(self) -> list[int]:
        """Lists the calibrated clients."""
        return sorted(self.calibration.clients) if self.calibration else []

    def products(self) -> list[str]:
        """Lists the calibrated products."""
        return self.calibration.products if self.calibration else []

    def rules(self) -> dict[int, DecisionRule]:
        """Returns the rules that clients decide by, for images of any product."""
        if self.calibration is None:
            return {}
        alpha = self.alpha
        return {client: self.calibration.rule(client, alpha) for client in self.clients()}

    def shipped(self, client: int, product: str | None) -> DecisionRule:
        """Returns the rule that a client decides by, for images of a product, or of any."""
        assert self.calibration is not None
        return self.calibration.rule(client, self.alpha, product)

    def tables(self) -> dict[str, Path]:
        """Finds the tables of scored images: those of ``predict`` and ``watch``."""
        files = [*self.path.glob("predictions/scores.csv"), *sorted(self.path.glob("watch/*/images.csv"))]
        return {path.parent.relative_to(self.path).as_posix(): path for path in files}


@dataclass(frozen=True)
class ScoredFile:
    """An image that was scored.

    Attributes:
        path: Its path, as the table has it.
        score: Its score.
        p_value: Its p-value.
        decision: ``normal`` or ``anomalous``.
        table: The table.
        drawn: Name of its heatmap, as the table has it; None if there is none.
    """

    path: str
    score: float
    p_value: float
    decision: str
    table: Path | None = None
    drawn: str | None = None

    @property
    def heatmap(self) -> Path | None:
        """File of its heatmap, which must lie beside the table; None if there is none.

        The file is looked for only here: a table may have many thousands of rows, of which few are shown.
        """
        if self.table is None or not self.drawn:
            return None
        path = (self.table.parent / self.drawn).resolve()
        return path if path.is_relative_to(self.table.parent.resolve()) and path.is_file() else None


def read_scored(table: Path) -> list[ScoredFile]:
    """Reads the images of a table that could be scored, the most anomalous first.

    Args:
        table: File that ``predict`` or ``watch`` wrote.

    Raises:
        UserError: If it is no such table.
    """
    try:
        rows = islice(written_rows(table), _MAX_ROWS)
        images = [
            ScoredFile(
                row["path"],
                float(row["score"]),
                float(row["p_value"]),
                row["decision"],
                table,
                row.get("heatmap"),
            )
            for row in rows
            if row["score"]
        ]
    except (OSError, ValueError, TypeError, KeyError, csv.Error) as error:
        raise UserError(f"{table}: is no table of scores ({one_line(error)})") from error
    return sorted(images, key=lambda image: (image.p_value, -image.score))


def histogram(counts: ScoreCounts, seen: Sequence[float], threshold: float) -> list[Row]:
    """Counts calibration scores, and those of new images, in bins of equal width.

    Args:
        counts: Calibration scores.
        seen: Scores of new images.
        threshold: Score above which images raise an alarm: no bin lies on both sides.

    Returns:
        Rows with the middle of a bin, its share of the images, and which images these are.
    """
    edges, weights = counts.edges.double().numpy(), counts.counts.numpy()
    new_scores = np.asarray([score for score in seen if abs(score) <= _MAX_SCORE])
    values = np.concatenate([edges, new_scores])
    if not values.size:
        return []
    bin_edges = np.histogram_bin_edges(values, _BINS)
    if bin_edges[0] < threshold < bin_edges[-1]:
        bin_edges = np.unique(np.append(bin_edges, threshold))
    middles = (bin_edges[:-1] + bin_edges[1:]) / 2
    rows: list[Row] = []
    for name, scores, weight in (("calibration", edges, weights), ("new images", new_scores, None)):
        if scores.size:
            bin_counts, _ = np.histogram(scores, bin_edges, weights=weight)
            rows += [
                {"score": float(middle), "share": float(count / bin_counts.sum()), "images": name}
                for middle, count in zip(middles, bin_counts, strict=True)
                if count
            ]
    return rows


def false_alarm_rate(counts: ScoreCounts, threshold: float) -> float:
    """Computes the largest share of normal images that raise an alarm at a threshold.

    Args:
        counts: Calibration scores.
        threshold: Score above which images raise an alarm.

    Returns:
        The conformal rate, (1 + scores above the threshold) / (n + 1).

    Example:
        >>> import torch
        >>> scores = ScoreCounts.of(torch.arange(1.0, 100.0))
        >>> false_alarm_rate(scores, 95.5)
        0.05
    """
    above = int(counts.counts[counts.edges > threshold].sum())
    return (1 + above) / (counts.total + 1)


def slider_ends(rule: DecisionRule) -> tuple[float, float, float]:
    """Computes the ends of a slider for a threshold, and where it begins: at the shipped threshold.

    Example:
        >>> import torch
        >>> slider_ends(DecisionRule("client 0", ScoreCounts.of(torch.tensor([-0.875, -0.5])), 0.5))
        (-0.875, -0.25, -0.5)
    """
    edges = rule.scores.edges
    low, highest = (float(edges[0]), float(edges[-1])) if len(edges) else (0.0, 1.0)
    high = highest + abs(highest) / 2  # scores may be below 0
    step = slider_step(low, high)
    value = rule.threshold if math.isfinite(rule.threshold) else highest
    # Rounded up to the next step, so that no calibration image below the threshold comes to lie above it.
    low, value, high = math.floor(low / step), math.ceil(value / step), math.ceil(high / step)
    return round(low * step, 10), round(high * step, 10), round(value * step, 10)


def slider_step(low: float, high: float) -> float:
    """Returns a power of ten that divides the range of a slider into a thousand steps or more."""
    return float(10.0 ** (math.floor(math.log10(max(high - low, 1e-9))) - 3))


def drift(table: Path) -> Row | None:
    """Reads what a watch says about drift; None for a table of another kind.

    Args:
        table: Its ``images.csv``.

    Raises:
        UserError: If the summary beside it cannot be read.
    """
    path = table.with_name("summary.json")
    if not path.exists():
        return None
    try:
        summary = plain_json(stored_text(path))
        alarms = [int(number) for number in summary["alarms"]]
        # Without images there are no statistics: they are null.
        statistics = {name: summary[name] for name in ("images", "psi", "psi_limit", "ks_p_value")}
        row = {name: math.nan if value is None else float(value) for name, value in statistics.items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)})") from error
    return {"alarms": alarms, **row}
