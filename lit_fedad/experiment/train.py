"""Trains one run from its configuration to its result, with clients in this process, in Ray workers or at sites."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.core.building import build, call
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import disk_full_in_one_line
from lit_fedad.core.identity import judgement
from lit_fedad.data.partition import Partition
from lit_fedad.experiment.build import build_images, build_partition
from lit_fedad.experiment.claim import begun, launches
from lit_fedad.experiment.console import Console
from lit_fedad.experiment.datasets import data_digest, hashes_file
from lit_fedad.experiment.local_clients import Participants
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_files import plain, refused_if_malformed, save_json, there, write_settings
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.track import Tracking
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.processes import gather, launched, make_fabric
from lit_fedad.federation.round_report import RoundReport
from lit_fedad.privacy.image_privacy import KEY_FILE
from lit_fedad.report.console import Display
from lit_fedad.report.plain_warnings import plain_warnings

_HERE = Participants()


def train(
    config: Config, participants: Participants = _HERE, quiet: bool = False, callbacks: Sequence[object] = ()
) -> dict[str, Any]:
    """Runs an experiment, or its remaining rounds.

    Args:
        config: The configuration, as `lit_fedad.core.config.compose` returns it.
        participants: The clients of the run.
        quiet: Whether only warnings are printed.
        callbacks: Callbacks (`RunCallback`) in addition to those of the configuration; may raise `RunStoppedError`.

    Raises:
        UserError: If the input is invalid, another command is at work in the folder, the disk is full, or a client
            cannot be reached and the run does not continue without it; also if the images of a complete run, or the
            file of their partition, were replaced.
        RunStoppedError: If a callback raised it; the tracked run then ends as killed, with the cause as its tag.
    """
    folder, display = RunFolder.of(config), Display(quiet=quiet)
    _keep_start(config, folder.path)
    # If several processes run this command, only one of them holds the folder.
    with (
        disk_full_in_one_line(folder.path),
        begun(folder.path, config) if launches(config) else nullcontext(),
    ):
        earlier = None if config["fresh"] else folder.result()
        as_before = earlier is not None and judgement(earlier["config"]) == judgement(config)
        if not as_before:
            if earlier is not None:
                display.note(
                    "complete, but judged by other keys: decisions, figures and result are made anew"
                )
            chosen = [_callback(name, node) for name, node in config["callbacks"].items()]
            hooks = [_KeepSettings(), Console(), *participants.callbacks, *chosen, Tracking(), *callbacks]
            settings = {**config["fabric"], **participants.fabric, "callbacks": hooks}
            launched(call(make_fabric, settings, "fabric"), _play)(config, participants, quiet)
        else:
            # The key is left over if the run was killed just after its result was written.
            (folder.path / KEY_FILE).unlink(missing_ok=True)
            _compare_images(config, folder.path, display)
            display.note(f"complete already; {participants.anew}: {folder.path}")
        result = folder.result()
    assert result is not None
    # Of a run that was complete already it may be anybody's.
    with refused_if_malformed(str(folder.path / "result.json")) if as_before else nullcontext():
        display.closing_table(result)
    return result


def _keep_start(config: Config, folder: Path) -> None:
    """Refuses to delete the run from whose weights this run starts."""
    if not (config["fresh"] and config["start"]):
        return
    if RunFolder.find(config["start"], "start").path.resolve().is_relative_to(folder.resolve()):
        raise UserError(
            f"start={config['start']}: this run would be deleted to begin anew, and its weights are needed; give"
            " another out=DIR"
        )


def _callback(name: str, section: Config) -> object:
    """Builds a callback of the configuration; refuses an object that has no hook of a run."""
    callback = build(section, f"callbacks.{name}")
    # `on_exception` does not count: Lightning's callbacks have it too, but no other hook that a run calls.
    hooks = {hook for hook in dir(RunCallback) if hook.startswith("on_")} - {"on_exception"}
    if not any(hasattr(callback, hook) for hook in hooks):
        raise UserError(
            f"callbacks.{name}._target_={section['_target_']}: a run calls no {type(callback).__name__}; give a"
            " subclass of lit_fedad.experiment.run.RunCallback"
        )
    return callback


def _compare_images(config: Config, folder: Path, display: Display) -> None:
    """Refuses a complete run whose images, or the file of their partition, were replaced since it was trained.

    If the images cannot be read, they are not compared, and a line says so.
    """
    latest = Checkpoints(folder / "checkpoints").latest()
    if latest is None or "_target_" not in config["data"]:  # the images are at their sites
        return
    try:
        with plain_warnings(display):
            images = build_images(config)
            built = build_partition(config, images)
        stored = Partition.load(folder / "partition.json")
        digest = data_digest(images, stored if built.deals(stored) else built, hashes_file(config), display)
    except UserError as error:
        display.note(f"its images were not compared with those it was trained on: {error}")
        return
    Checkpoints(folder / "checkpoints", images=digest).check_images(latest)


class _KeepSettings(RunCallback):
    """Writes the settings again after a round if the run's folder was moved or removed while the run is at work.

    Checkpoints go into a new folder then, and without settings no later command would take it for that of a run.
    """

    _run: Run

    def on_run_start(self, run: Run) -> None:
        """Takes note of the run."""
        self._run = run

    def on_checkpoint(self, federation: Federation, report: RoundReport) -> None:
        """Writes what is missing."""
        _write_missing_settings(self._run)


def _write_missing_settings(run: Run) -> None:
    if not there(run.folder.path / "config.yaml"):
        write_settings(run.folder.path, run.config)
        run.data.save(run.folder.path)


def _play(fabric: Fabric, config: Config, participants: Participants, quiet: bool) -> None:
    """Runs all rounds in every process; processes other than the first print nothing."""
    display = Display(quiet=quiet or not fabric.is_global_zero)
    folder = RunFolder.of(config).path
    with plain_warnings(display, ignore=not fabric.is_global_zero), disk_full_in_one_line(folder):
        run = participants.build(fabric, config, display)
        try:
            fabric.call("on_run_start", run)
            if fabric.is_global_zero:
                run.data.save(folder)
            run.federation.run()
            conclude(run, participants)
        except BaseException as error:
            fabric.call("on_exception", run, error)
            raise


def conclude(run: Run, participants: Participants = _HERE) -> None:
    """Calibrates and judges a run's decisions after its last round, and writes its result."""
    fabric = run.fabric
    if fabric.is_global_zero:
        # If a run is judged again, its old result is removed first: if the command ends early, old and new files would
        # otherwise be mixed.
        (run.folder.path / "result.json").unlink(missing_ok=True)
        _write_missing_settings(run)
    if run.model.task.kind == "anomaly":
        participants.judge(run)
    fabric.call("on_rounds_end", run)
    peaks = gather(fabric, {fabric.global_rank: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
    if fabric.is_global_zero:
        result = summarise_run(run, max(peaks.values()))
        save_json(run.folder.path, "result.json", result)
        (run.folder.path / KEY_FILE).unlink(missing_ok=True)  # with the key, the noise could be removed again
        fabric.call("on_run_end", run, result)


def summarise_run(run: Run, peak_rss_bytes: int) -> dict[str, Any]:
    """Summarises a run after its last round.

    Raises:
        TypeError: If a callback has put into `Run.extras` what JSON cannot hold.
    """
    config = run.config
    for name, value in run.extras.items():
        try:
            json.dumps(plain(value))
        except TypeError as error:
            raise TypeError(
                f"run.extras[{name!r}] does not fit into result.json ({error}); give numbers, texts, lists and"
                " dictionaries"
            ) from error
    return {
        "method": config["method"]["name"],
        "task": type(run.model.task).__name__,
        **run.data.section(config),
        "models_stay": not run.federation.evaluator.common and not run.model.client.predictors.shared,
        "backbone": run.model.provenance,
        "seed": config["seed"],
        "rounds": config["rounds"],
        "milestones": sorted(run.data.module.milestones),
        **summarise_history(run.federation, run.rates),
        "peak_rss_bytes": peak_rss_bytes,
        "config": config,
        "tracking_run_id": None,
        "privacy": None,
        "differential_privacy": run.federation.privacy,
        **run.extras,
    }


def summarise_history(federation: Federation, rates: Mapping[str, Any]) -> dict[str, Any]:
    """Summarises the rounds of a federation: metrics of the first, last and best round, traffic, scalars, failures."""
    history, names = federation.history, federation.evaluator.metrics
    evaluated = [report for report in history if report.metrics is not None]

    def first_metric(report: RoundReport) -> float:
        value: float = (report.metrics or {})[names[0]]["mean"]
        return -math.inf if math.isnan(value) else value

    undefined: dict[str, Any] = {"mean": None, "worst": None, "pooled": None, "per_client": {}}

    def metrics_of(report: RoundReport) -> dict[str, Any]:
        return {"round": report.round} | {name: (report.metrics or {}).get(name, undefined) for name in names}

    constants = {report.round: federation.evaluator.constants(report) for report in evaluated}
    return {
        "first": metrics_of(evaluated[0]),
        "last": {**metrics_of(evaluated[-1]), **rates},
        "best": metrics_of(max(evaluated, key=first_metric)),
        "exchanges": [r.round for r in history],
        "exchange_names": [r.exchange for r in history],
        "bytes_up": [sum(r.bytes_up.values()) for r in history],
        "bytes_down": [sum(r.bytes_down.values()) for r in history],
        "elements_up": [sum(r.elements_up.values()) for r in history],
        "seconds_per_round": [r.seconds for r in history],
        "scalars": [r.scalars for r in history],
        "client_losses": [
            {str(client): scalars["loss"] for client, scalars in r.per_client.items() if "loss" in scalars}
            for r in history
        ],
        "metrics": {
            r.round: {name: r.metrics[name]["mean"] for name in r.metrics} for r in evaluated if r.metrics
        },
        "constants": {
            name: {round: by_name[name] for round, by_name in constants.items()}
            for name in constants[evaluated[-1].round]
        },
        "failures": {r.round: r.failures for r in history if r.failures},
        "unscored": {r.round: r.unscored for r in history if r.unscored},
        "refused": {r.round: r.refused for r in history if r.refused},
    }
