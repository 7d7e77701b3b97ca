"""Configuration in, result out: the one place where the parts meet."""

from __future__ import annotations

import hashlib
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.config import Config, call
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.evaluation.thresholds import Thresholds
from lit_fedad.experiment.build import (
    Data,
    Model,
    build_data,
    build_federation,
    build_images,
    build_model,
    build_partition,
    build_public,
    build_server_labelled,
)
from lit_fedad.experiment.figures.anomaly import (
    draw_communication,
    draw_curves,
    draw_heatmaps,
    draw_partition,
)
from lit_fedad.experiment.figures.condensed import draw_knowledge
from lit_fedad.experiment.figures.semantic import draw_semantics
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.loop import Federation, RoundReport
from lit_fedad.federation.processes import launch, make_fabric
from lit_fedad.report.console import Display, plain_warnings
from lit_fedad.report.constant_predictions import constant_predictions
from lit_fedad.tracking.tracker import Tracker


class RunStoppedError(Exception):
    """Ends a run early and on purpose; its checkpoint holds, and the same configuration continues it."""


Watch = Callable[[RoundReport], None]


def unwatched(report: RoundReport) -> None:
    """Lets a run go on; a function with a name, because processes are handed it."""


def train(config: Config, quiet: bool = False, watch: Watch = unwatched) -> dict[str, Any]:
    """Runs an experiment, or what is left of it.

    Args:
        config: From `lit_fedad.config.compose`.
        quiet: Print nothing but warnings.
        watch: Told of each exchange once its checkpoint is complete, in runs of one process; may raise
            `RunStoppedError`.

    Returns:
        The content of ``result.json``.

    Raises:
        UserError: For bad input, in one line.
        RunStoppedError: As `watch` raised it; the tracked run then ends as killed, with the cause as its tag.
    """
    run = RunFolder.of(config)
    if config["fresh"]:
        run.clear()
    run.claim(config)
    display = Display(quiet=quiet)
    if run.result() is None:
        fabric = call(make_fabric, config["fabric"], "fabric")
        launch(fabric, _play, config, quiet, watch)
    else:
        display.note(f"complete already; fresh=true runs it anew: {run.path}")
    result = run.result()
    assert result is not None
    display.closing_table(result)
    display.where_next(
        [
            ("files", str(run.path)),
            ("compare", "mlflow ui"),
            ("new images", f"lit-fedad predict run={run.path} images=FOLDER"),
        ]
    )
    return result


def _play(fabric: Fabric, config: Config, quiet: bool, watch: Watch) -> None:
    """The run itself, in every process; processes other than the first have nothing to say."""
    display = Display(quiet=quiet or not fabric.is_global_zero)
    with plain_warnings(display, ignore=not fabric.is_global_zero):
        _play_all_rounds(fabric, config, display, watch)


def _play_all_rounds(fabric: Fabric, config: Config, display: Display, watch: Watch) -> None:
    run, first = RunFolder.of(config), fabric.is_global_zero
    images = build_images(config)
    partition = build_partition(config, images)
    public = build_public(config, images)
    server_labelled = build_server_labelled(config, images, partition)
    model = build_model(config, images.categories, public, server_labelled)
    data = build_data(config, images, partition, model, fabric, display)
    federation = build_federation(config, run.path, model, data, fabric)
    tracker = _open_tracker(config, run, model, data, first)
    federation.on_round, federation.on_saved = _Reporter(federation, display, tracker), watch
    if first:
        display.header(_describe(config, model, data, run))
        data.partition.save(run.path / "partition.json")
        draw_partition(data, run.path)
    status = "FAILED"
    try:
        with display.progress("Clients trained and scored") as federation.on_visit:
            federation.run()
        privacy = None
        if model.task.kind == "anomaly":
            privacy = _judge_images(config, data, federation, fabric, run)
        elif config["evaluation"]["pictures"]:
            draw_knowledge(federation, data, fabric, run.path)
        peak = federation.over_processes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if first:
            draw_curves(federation.history, run.path)
            draw_communication(federation.history, federation.evaluator.metrics[0], run.path)
            if privacy:
                tracker.metrics(
                    {f"privacy/{name}": value for name, value in privacy.items()}, federation.rounds
                )
            result = _result(config, model, data, federation, max(peak), tracker)
            run.save_json("result.json", {**result, "privacy": privacy})
            _track_files(tracker, run.path)
        status = "FINISHED"
    except RunStoppedError as stop:
        status = "KILLED"
        tracker.tags({"stopped": str(stop)})
        raise
    finally:
        delivery = tracker.close(status)
        if delivery.pending and first:
            display.warn(
                f"{delivery.pending} tracking records are kept; send them: lit-fedad sync run={run.path}"
            )


# Other metrics have their rows in the closing table; a fourth would crowd the bytes out of the line.
_LINE = (
    *("i_auroc", "p_auroc", "pro", "accuracy", "own_accuracy", "auroc", "aupr"),
    *("selection_accuracy", "global_accuracy", "local_accuracy"),
)


def _judge_images(
    config: Config, data: Data, federation: Federation, fabric: Fabric, run: RunFolder
) -> dict[str, float] | None:
    """Sets each client's threshold, and shows what its detector sees, and what shared densities give away."""
    quantile, pictures = config["evaluation"]["threshold_quantile"], config["evaluation"]["pictures"]
    thresholds = federation.ask(federation.rounds, Thresholds(data.module, fabric, quantile))
    privacy = None
    if pictures and isinstance(data.images, SemanticSet):
        privacy = draw_semantics(federation, data, fabric, run.path, thresholds, quantile)
    elif pictures:
        draw_heatmaps(federation, data, fabric, run.path, pictures, thresholds)
    if fabric.is_global_zero:
        run.save_json("thresholds.json", thresholds)
    return privacy


class _Reporter:
    """Tells the person and the tracker about each exchange."""

    def __init__(self, federation: Federation, display: Display, tracker: Tracker) -> None:
        self.federation, self.display, self.tracker = federation, display, tracker
        self.last = time.perf_counter()
        self.durations: list[float] = []

    def __call__(self, report: RoundReport) -> None:
        now = time.perf_counter()
        if report.round > 0:
            self.durations.append(now - self.last)
        self.last = now
        left = self.federation.rounds - max(report.round, 0)
        self.display.round_line(
            round=report.round,
            rounds=self.federation.rounds,
            loss=report.scalars.get("loss"),
            metrics={name: v["mean"] for name, v in (report.metrics or {}).items() if name in _LINE},
            bytes_up=sum(report.bytes_up.values()),
            bytes_down=sum(report.bytes_down.values()),
            seconds=report.seconds,
            eta_s=left * statistics.mean(self.durations) if self.durations else None,
            name=report.phase,
        )
        for line in report.warnings:
            self.display.warn(line)
        if constant := constant_predictions(report.metrics or {}):
            self.display.warn(f"round {report.round}: {constant}")
        self.tracker.metrics(_tracked(report), step=report.round)


def _tracked(report: RoundReport) -> dict[str, float]:
    """One flat batch of numbers for the tracker."""
    flat = {name if "_" in name else f"{name}/mean": value for name, value in report.scalars.items()}
    for client, scalars in report.per_client.items():
        flat |= {f"{name}/client_{client}": value for name, value in scalars.items()}
    for name, values in (report.metrics or {}).items():
        flat |= {f"{name}/{kind}": values[kind] for kind in ("mean", "worst", "pooled")}
        flat |= {f"{name}/client_{client}": value for client, value in values["per_client"].items()}
    traffic = {
        "bytes/up": report.bytes_up,
        "bytes/down": report.bytes_down,
        "elements/up": report.elements_up,
    }
    flat |= {name: float(sum(by_client.values())) for name, by_client in traffic.items()}
    return {**flat, "participants": len(report.participants), "seconds": report.seconds}


def _describe(config: Config, model: Model, data: Data, run: RunFolder) -> dict[str, str]:
    sizes = data.partition.sizes
    return {
        "method": f"{config['method']['name']} ({config['method']['paper']})",
        "task": type(model.task).__name__,
        "data": f"{data.images.name}: {len(data.images.train)} training, {len(data.images.test)} test images",
        "clients": f"{len(sizes)} with {', '.join(map(str, sizes))} images",
        "backbone": f"{model.provenance['name']}, weights {model.provenance['taken']}",
        "rounds": f"{config['rounds']} (seed {config['seed']})",
        "files": str(run.path),
    }


def _result(
    config: Config, model: Model, data: Data, federation: Federation, peak: int, tracker: Tracker
) -> dict[str, Any]:
    evaluated = [r for r in federation.history if r.metrics is not None]
    names = federation.evaluator.metrics
    best = max(evaluated, key=lambda r: _sortable((r.metrics or {})[names[0]]["mean"]))
    chosen = {"first": evaluated[0], "last": evaluated[-1], "best": best}
    history = federation.history
    return {
        "method": config["method"]["name"],
        "task": type(model.task).__name__,
        "data": data.images.name,
        "partition": {
            "strategy": config["partition"]["_target_"].rpartition(".")[2],
            "sizes": list(data.partition.sizes),
            "counts": data.partition.counts(data.images).tolist(),
            "products": data.images.categories,
            "stage_sizes": [list(map(len, stages)) for stages in data.partition.by_stage],
        },
        "backbone": model.provenance,
        "seed": config["seed"],
        "rounds": config["rounds"],
        **{stage: {"round": r.round, **_metrics(r, names)} for stage, r in chosen.items()},
        "milestones": sorted(data.module.milestones),
        "exchanges": [r.round for r in history],
        "bytes_up": [sum(r.bytes_up.values()) for r in history],
        "bytes_down": [sum(r.bytes_down.values()) for r in history],
        "elements_up": [sum(r.elements_up.values()) for r in history],
        "seconds_per_round": [r.seconds for r in history],
        "scalars": [r.scalars for r in history],
        "metrics": {
            r.round: {name: r.metrics[name]["mean"] for name in r.metrics} for r in evaluated if r.metrics
        },
        "peak_rss_bytes": peak,
        "tracking_run_id": tracker.run_id,
        "config": config,
    }


def _metrics(report: RoundReport, names: Sequence[str]) -> dict[str, Any]:
    undefined: dict[str, Any] = {"mean": None, "worst": None, "pooled": None, "per_client": {}}
    return {name: (report.metrics or {}).get(name, undefined) for name in names}


def _sortable(value: float) -> float:
    return value if value == value else float("-inf")


def _open_tracker(config: Config, run: RunFolder, model: Model, data: Data, first: bool) -> Tracker:
    settings = config["tracking"]
    tags = {
        "method": config["method"]["name"],
        "paper": config["method"]["paper"],
        "task": type(model.task).__name__,
        "data": data.images.name,
        "backbone": model.provenance["name"],
        "weights": model.provenance["taken"],
        "seed": str(config["seed"]),
        "lit_fedad.out": str(run.path.resolve()),
    }
    tracker = Tracker(
        run.path,
        experiment=settings["experiment"] or data.images.name,
        run_name=run.path.name,
        tags=tags,
        uri=settings["uri"],
        enabled=first and settings["enabled"],
        parent_run_id=settings["parent"],
    )
    tracker.params({key: value for key, value in config.items() if key not in ("out", "tracking", "fresh")})
    counts = data.partition.counts(data.images)
    tracker.dataset(
        name=data.images.name,
        source=str(config["data"].get("root") or config["data"]["_target_"]),
        digest=_digest(data),
        profile={"train": len(data.images.train), "test": len(data.images.test), "clients": counts.tolist()},
        context="training",
    )
    return tracker


def _digest(data: Data) -> str:
    """Names the training images and who holds which."""
    names = [[data.images.train[i].name for i in client] for client in data.partition.clients]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def _track_files(tracker: Tracker, folder: Path) -> None:
    """The run's files as artifacts; the last checkpoint is the trained model with its memory."""
    for name in ("config.yaml", "partition.json", "thresholds.json", "result.json"):
        if (folder / name).exists():
            tracker.artifact(folder / name)
    for name in ("figures", "checkpoints"):
        tracker.artifact(folder / name, folder=name)
