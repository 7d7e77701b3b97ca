"""A run's record in MLflow: parameters, data, metrics by round, and its files as artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.evaluation.decisions import promised_rates
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Record, RunData
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.report.closing import closing_rows, in_words
from lit_fedad.report.html import markdown_table
from lit_fedad.report.naming import METRIC_TITLES
from lit_fedad.tracking.server import RUN_ID
from lit_fedad.tracking.tracker import Tracker


class RunStoppedError(Exception):
    """An intended early end of a run; its checkpoint is kept, and the same configuration resumes it.

    Attributes:
        at_once: Whether the same command continues the run at once.
    """

    at_once = False


class Tracking(RunCallback):
    """A callback that tracks a run on the first process, where the configuration enables it."""

    _tracker: Tracker | None = None
    _data: RunData

    def on_run_start(self, run: Run) -> None:
        """Begins a record, or continues the record of a resumed run."""
        if run.fabric.is_global_zero:
            config, self._data, data = run.config, run.data, run.data.record(run.config)
            self._tracker = open_tracker(run, data)  # `on_exception` ends the record from here on
            untracked = ("out", "tracking", "fresh", "callbacks")
            self._tracker.params({key: value for key, value in config.items() if key not in untracked})
            self._tracker.dataset(data.name, data.source, data.digest, data.profile, context="training")

    def on_round_end(self, federation: Federation, report: RoundReport) -> None:
        """Records the round's numbers."""
        if self._tracker is not None:
            spent = federation.privacy
            private = {"epsilon": spent["epsilon"]} if spent is not None else {}
            flat = flat_metrics(report, federation.names) | private
            self._tracker.metrics(flat | self._data.measures(federation.history), step=report.round)

    def on_rounds_end(self, run: Run) -> None:
        """Records the rates of the shipped decisions, the mean promise, and privacy measures of other callbacks."""
        if self._tracker is None:
            return
        if run.rates:
            promised = promised_rates(run.decisions[run.alphas[0]])["mean"]
            rates = flat_summaries(run.rates, run.federation.names)
            self._tracker.metrics({**rates, "false_alarm_rate/promised": promised}, run.federation.rounds)
        # A run of seconds ends before a new database is created.
        run.extras["tracking_run_id"] = self._tracker.wait_for_id()
        if privacy := run.extras.get("privacy"):
            values = {f"privacy/{name}": value for name, value in privacy.items()}
            self._tracker.metrics(values, run.federation.rounds)

    def on_run_end(self, run: Run, result: dict[str, Any]) -> None:
        """Records the run's files, and ends the record."""
        if self._tracker is not None:
            track_files(self._tracker, run.folder.path)
            self._tracker.tags({"mlflow.note.content": _described(run, result)})
        self._close(run, "FINISHED")

    def on_exception(self, run: Run, error: BaseException) -> None:
        """Ends the record: as killed if the run was stopped intentionally, else as failed.

        If the same command does not continue a stopped run, the cause becomes a tag.
        """
        stopped = error if isinstance(error, RunStoppedError) else None
        if stopped is not None and not stopped.at_once and self._tracker is not None:
            self._tracker.tags({"stopped": str(error)})
        self._close(run, "FAILED" if stopped is None else "KILLED")

    def _close(self, run: Run, status: str) -> None:
        if self._tracker is None:
            return
        tracker, self._tracker = self._tracker, None  # so that a status is written only once
        try:
            tracker.close(status)
        finally:
            run.display.unsent(tracker.close().kept, run.folder.path)


def open_tracker(run: Run, data: Record) -> Tracker:
    """Opens a run's record, with its tags."""
    config, path, backbone = run.config, run.folder.path, run.model.provenance
    settings = config["tracking"]
    return Tracker(
        path,
        experiment=settings["experiment"] or data.name,
        run_name=data.run_name or path.name,
        tags={
            "method": config["method"]["name"],
            "paper": config["method"]["paper"],
            "task": type(run.model.task).__name__,
            "data": data.name,
            "backbone": backbone["name"],
            "weights": backbone["taken"],
            "seed": str(config["seed"]),
            "mlflow.source.name": f"lit-fedad train method={config['method']['name']}",
            "mlflow.source.type": "LOCAL",
        },
        uri=settings["uri"],
        enabled=settings["enabled"],
        parent_run_id=settings["parent"],
    )


def _described(run: Run, result: Mapping[str, Any]) -> str:
    """Describes a complete run in Markdown: its closing lines and table, and the heatmaps if they were drawn."""
    rows = closing_rows(result)
    lines = [*in_words(result), markdown_table(list(rows[0]), [list(row.values()) for row in rows])]
    if (run.folder.path / "figures" / "heatmaps.png").exists():
        lines.append(f"![heatmaps](get-artifact?path=figures%2Fheatmaps.png&run_uuid={RUN_ID})")
    return "\n\n".join(lines)


def flat_metrics(report: RoundReport, names: ClientNames = NUMBERS) -> dict[str, float]:
    """Flattens a round's report into numbers for the tracker, by name; names of clients are part of the names."""
    flat = {name if "_" in name else f"{name}/mean": value for name, value in _of_training(report.scalars)}
    for client, scalars in report.per_client.items():
        flat |= {f"clients/{name}/{names.label(client)}": value for name, value in _of_training(scalars)}
    flat |= flat_summaries(report.metrics or {}, names)
    traffic = {
        "bytes/up": report.bytes_up,
        "bytes/down": report.bytes_down,
        "elements/up": report.elements_up,
    }
    flat |= {name: float(sum(by_client.values())) for name, by_client in traffic.items()}
    return {**flat, "participants": len(report.participants), "seconds": report.seconds}


def _of_training(scalars: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yields what training measured, under another name than what evaluation measures, such as the accuracy."""
    for name, value in scalars.items():
        yield (f"training_{name}" if name in METRIC_TITLES else name), value


def flat_summaries(summaries: Mapping[str, Any], names: ClientNames = NUMBERS) -> dict[str, float]:
    """Flattens metrics, each with its values over clients and products, into numbers for the tracker.

    MLflow shows a section for each prefix before a slash: the means of a metric share a section, and values by client
    are in other sections.
    """
    flat: dict[str, float] = {}
    for name, values in summaries.items():
        flat |= {f"{name}/{kind}": values[kind] for kind in ("mean", "worst", "pooled")}
        flat |= {f"clients/{name}/{names.label(c)}": value for c, value in values["per_client"].items()}
        if "per_product" in values:
            flat[f"{name}/mean_of_products"] = values["product_mean"]
            for product, value in values["per_product"].items():
                flat[f"products/{name}/{product.replace('/', '_')}"] = value
    return flat


def track_files(tracker: Tracker, folder: Path) -> None:
    """Records a run's files as artifacts, with the last checkpoint, which holds the trained model and its memory."""
    for name in ("config.yaml", "partition.json", "calibration.json", "result.json", "status.json"):
        if (folder / name).exists():
            tracker.artifact(folder / name)
    for name in ("figures", "checkpoints"):
        if (folder / name).exists():
            tracker.artifact(folder / name, folder=name)
