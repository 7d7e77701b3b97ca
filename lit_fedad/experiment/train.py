"""One run from configuration to result."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.core.config import Config, build, call, judgement
from lit_fedad.experiment.build import build_parts
from lit_fedad.experiment.console import Console
from lit_fedad.experiment.decisions import judge
from lit_fedad.experiment.disk_full import disk_full_in_one_line
from lit_fedad.experiment.figures.history import History
from lit_fedad.experiment.figures.predictions import Predictions
from lit_fedad.experiment.lock import launches
from lit_fedad.experiment.run import Run
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.summary import summarise_run
from lit_fedad.experiment.track import Tracking
from lit_fedad.federation.processes import launch, make_fabric
from lit_fedad.privacy.image_privacy import KEY_FILE
from lit_fedad.report.console import Display, plain_warnings


def train(config: Config, quiet: bool = False, callbacks: Sequence[object] = ()) -> dict[str, Any]:
    """Runs an experiment, or its remaining rounds.

    Args:
        config: From `lit_fedad.core.config.compose`.
        quiet: Whether only warnings are printed.
        callbacks: Callbacks (`RunCallback`) in addition to those of the configuration; may raise `RunStoppedError`.

    Returns:
        The content of ``result.json``.

    Raises:
        UserError: If the input is invalid, another command is at work in the folder, or the disk is full.
        RunStoppedError: If a callback raised it; the tracked run then ends as killed, with the cause as its tag.
    """
    run, display = RunFolder.of(config), Display(quiet=quiet)
    # Of several processes that each run the command only one may hold the folder.
    with disk_full_in_one_line(run.path), run.locked() if launches(config) else nullcontext():
        if launches(config):
            if config["fresh"]:
                run.clear()
            run.claim(config)
        before = run.result()
        if before is None or judgement(before["config"]) != judgement(config):
            if before is not None:
                display.note(
                    "complete, but judged by other keys: decisions, figures and result are made anew"
                )
            own = [build(node) for node in config["callbacks"].values()]
            given = [Console(), History(), Predictions(), *own, Tracking(), *callbacks]
            fabric = call(make_fabric, {**config["fabric"], "callbacks": given}, "fabric")
            launch(fabric, _play, config, quiet)
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


def _play(fabric: Fabric, config: Config, quiet: bool) -> None:
    """Runs all rounds in every process; processes other than the first print nothing."""
    display = Display(quiet=quiet or not fabric.is_global_zero)
    folder = RunFolder.of(config).path
    with plain_warnings(display, ignore=not fabric.is_global_zero), disk_full_in_one_line(folder):
        run = build_run(fabric, config, display)
        fabric.call("on_run_start", run)
        try:
            _play_all_rounds(run)
        except BaseException as error:
            fabric.call("on_exception", run, error)
            raise


def build_run(fabric: Fabric, config: Config, display: Display) -> Run:
    """Builds a run, whose arguments are those of `build_parts`."""
    model, data, federation = build_parts(fabric, config, display)
    return Run(config, RunFolder.of(config), model, data, federation, fabric, display)


def _play_all_rounds(run: Run) -> None:
    if run.fabric.is_global_zero:
        run.data.partition.save(run.folder.path / "partition.json")
    run.federation.run()
    conclude(run)


def conclude(run: Run) -> None:
    """Calibrates and judges a run's decisions after its last round, and writes its result."""
    fabric = run.fabric
    if run.model.task.kind == "anomaly":
        judge(run)
    fabric.call("on_rounds_end", run)
    peaks = run.federation.over_processes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if fabric.is_global_zero:
        result = summarise_run(run, max(peaks))
        run.folder.save_json("result.json", result)
        (run.folder.path / KEY_FILE).unlink(missing_ok=True)  # with it the noise could be taken away again
        fabric.call("on_run_end", run, result)
