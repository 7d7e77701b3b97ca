"""Folds new normal images into a trained detector that is made of sums, as a new version of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.core.text import shell_word
from lit_fedad.data.additions import Addition, grow, grown_digest
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.deployment.new_images import NewImages
from lit_fedad.deployment.new_rate import save_rate
from lit_fedad.deployment.update_check import Judged, judge_new, refuse_foreign
from lit_fedad.evaluation.calibration import noised_run, with_calibration
from lit_fedad.experiment.build import Model, build_partition, tells_products
from lit_fedad.experiment.claim import claim, locked
from lit_fedad.experiment.console import Progress
from lit_fedad.experiment.datasets import data_digest, hashes_file
from lit_fedad.experiment.federations import build_evaluator, build_federation, open_checkpoints
from lit_fedad.experiment.finished_run import (
    build_grown_data,
    built_of,
    complete_run,
    images_of_run,
    one_process,
    same_model,
)
from lit_fedad.experiment.run import Run
from lit_fedad.experiment.run_files import refused_if_malformed
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.track import flat_metrics, flat_summaries
from lit_fedad.experiment.train import conclude
from lit_fedad.methods.parts.pooled_moments import MomentsServer
from lit_fedad.report.console import Display
from lit_fedad.report.naming import metric_title
from lit_fedad.tasks.patches import PatchTask
from lit_fedad.tracking.tracker import amend


@dataclass(frozen=True)
class UpdateOptions:
    """Options of ``lit-fedad update``.

    Attributes:
        run: MLflow run id, or the run's folder.
        images: Folder of new normal images: with a folder for each client, named by its number, or of one client.
        client: Client whose images all are; None where there is a folder for each.
        product: Product that all images show; None where a client's images lie in a folder for each product.
        reviews: File of reviews (`lit-fedad ui`): only images that it calls false alarms are taken; None for all.
        force: Whether images are taken that look anomalous, and new products. Images that a review calls false alarms
            may always look so.
        alpha: Promised rate of false alarms of a new version, which is otherwise the default one, instead of an update.
        default: Number of the version that other commands use from now on, instead of an update.
    """

    run: str
    images: str | None = None
    client: int | None = None
    product: str | None = None
    reviews: str | None = None
    force: bool = False
    alpha: float | None = None
    default: int | None = None

    def __post_init__(self) -> None:
        if [self.images, self.alpha, self.default].count(None) != 2:
            raise UserError(
                "update needs images=FOLDER, alpha=RATE of a new version, or default=NUMBER of one; one of the three"
            )
        of_images = (self.client, self.product, self.reviews, self.force or None)
        if self.images is None and of_images.count(None) < len(of_images):
            raise UserError("update: client, product, reviews and force are of images=FOLDER alone")


def update(options: UpdateOptions, overrides: Mapping[str, str] | None = None) -> Path:
    """Adds normal images, a folder for each client, to a detector made of sums: a new version beside the old.

    One more round of the method is played: clients with new images send the sums of these, as at the beginning of a
    stage. It begins where the default version ended; then the detector is evaluated and calibrated, as at the end of
    the run. The run's own images must be there. The default stays what it is.

    Args:
        options: Options of the command.
        overrides: Values that differ on this machine, such as ``data.root``.

    Returns:
        Folder of the new version, a run's folder of its own in ``versions``; older ones stay as they are. With
        `UpdateOptions.alpha` no round is played. With `UpdateOptions.default`, the folder of that version.

    Raises:
        UserError: If there is no such complete run or version, its method or images cannot be updated, there is no new
            image, one looks anomalous, or a client fails or is left out. Nothing has changed then.
    """
    home, display = RunFolder.find(options.run).home, Display()
    with locked(home.path):
        if options.default is not None:
            chosen = home.choose_version(options.default).path
            display.note(f"version {options.default} is the default: {chosen}")
            return chosen
        if options.alpha is not None:
            number = save_rate(home, options.alpha)
            display.note(
                f"version {number}: at most {options.alpha:g} of normal images, and otherwise the default one"
            )
            display.where_next(_next(home, number))
            return home.version_folder(number).path
        folder, result, config = complete_run(str(home.path), overrides, None)
        with built_of(folder, overrides):
            model, images = same_model(config, result), images_of_run(config, result)
            _check(folder, config, model, images)
            assert isinstance(images, ImageSet)
            partition = with_calibration(config, images, build_partition(config, images), model.method)
        additions = folder.additions()
        clients = sorted(folder.calibration().clients)
        grown_images, grown_partition = grow(images, partition, additions)
        new = NewImages(
            folder=Path(str(options.images)),
            client=options.client,
            product=options.product,
            reviews=options.reviews,
            force=options.force,
            clients=clients,
            images=grown_images,
            partition=grown_partition,
            memo=hashes_file(config),
            display=display,
            page=config["image"].get("page"),
        ).find()
        # A model of its own: loading a client changes it, and the round begins with one as built.
        judge = same_model(config, result)
        before = judge_new(folder, config, judge, new)
        if not (options.force or options.reviews):
            refuse_foreign(before)
        with home.new_version() as (number, made):
            run = _play(
                folder, made, config, model, images, partition, [*additions, new], display, options.force
            )
            run.extras["version"] = number
            conclude(run)
        version = home.version_folder(number)
        after = judge_new(version, config, judge, new)
        _report(home, version, run, new, result["last"], before, after)
    return version.path


def _check(folder: RunFolder, config: Config, model: Model, images: Images) -> None:
    """Refuses a detector that images cannot be added to, telling why."""
    if model.method.exchanges.leave_out is None:
        method = config["method"]["name"]
        cause = f"a detector of {method} with these settings is not made of sums that images can be added to"
    elif noised_run(config):
        cause = "its sums are noised, and an update's would not be"
    elif config["federation"].get("secure_sum") is not None:
        cause = "its sums are of all clients, and an update's would be of those with new images alone"
    elif not isinstance(images, ImageSet):
        cause = f"{images.name} is no set of image files"
    else:
        return
    raise UserError(f"{folder.path}: {cause}; train again with all images")


def _play(
    folder: RunFolder,
    made: RunFolder,
    config: Config,
    model: Model,
    images: ImageSet,
    partition: Partition,
    additions: Sequence[Addition],
    display: Display,
    forced: bool,
) -> Run:
    """Plays the round that follows a version's last one, with the last of the additions; returns the run after it."""
    stored = folder.config()
    # All clients take part, and none may fail: what one does not send now would be missing from the detector.
    sampler = {**stored["federation"]["sampler"], "fraction": 1.0, "on_failure": "fail"}
    # A user who forces an update has looked at the images, and a new product lies far from all others. So robust
    # aggregation is switched off, for this update alone.
    robust = None if forced else folder.home.config()["federation"].get("robust")
    stored |= {
        "rounds": stored["rounds"] + 1,
        "federation": {**stored["federation"], "sampler": sampler, "robust": robust},
    }
    if tells_products(stored):
        # The products of the sums so far: a new product is none of them, although the result lists it too.
        stored["task"] = {**stored["task"], "products": list(cast("PatchTask", model.task).products)}
    claim(made.path, stored)
    memo = hashes_file(config)
    digest = grown_digest(data_digest(images, partition, memo, display), additions[:-1], memo)
    before = open_checkpoints(folder.path, folder.config(), model, digest)
    progress = Progress()
    fabric = one_process(config, [progress])
    data = build_grown_data(config, images, partition, additions, model, fabric, display)
    evaluator = build_evaluator(stored, data, model.method, fabric)
    federation = build_federation(stored, made.path, model, data.module, evaluator, fabric, data.digest)
    _, state = federation.checkpoints.adopt(before)
    with refused_if_malformed(str(folder.path / "checkpoints")):
        measured_before = sum(state["server"]["measured"].values())
    progress.start(display, "Clients that send their sums, and are scored")
    try:
        report = federation.run()[-1]
    finally:
        progress.stop()
    measured = cast("MomentsServer", model.server).measured  # all methods that have sums use this server
    added = sum(measured.values()) - measured_before
    if report.refused or added != additions[-1].total:
        cause = next(iter(report.lines(federation.names)), "a client sent nothing")
        advice = (
            ""
            if report.refused or forced
            else "; look at its new images, then force=true adds them all the same"
        )
        raise UserError(f"{folder.path}: not updated, for a client was left out: {cause}{advice}")
    made.save_additions(additions)
    data.partition.save(made.path / "partition.json")
    return Run(stored, made, model, data, federation, fabric, display)


def _report(
    home: RunFolder,
    version: RunFolder,
    run: Run,
    new: Addition,
    last: Mapping[str, Any],
    before: Sequence[Judged],
    after: Sequence[Judged],
) -> None:
    """Prints the version beside the one before, and adds its metrics to the run's record in MLflow under its name."""
    report, display = run.federation.history[-1], run.display
    metrics = {**(report.metrics or {}), **run.rates}
    for line in report.lines(run.federation.names):
        display.warn(line)
    by_client = ", ".join(
        f"{len(images)} of client {client}" for client, images in sorted(new.images.items())
    )
    display.note(f"version {version.path.name}, with new images: {by_client}")
    beyond = {(now.client, now.product): now.beyond for now in after}
    for then in before:
        display.note(
            f"beyond the threshold, of {then.images} new images of client {then.client}, product {then.product}:"
            f" {then.beyond} before, {beyond[then.client, then.product]} as part of the detector"
        )
    rows = [
        {"test images": metric_title(name), "before": f"{then:.3f}", "now": f"{metrics[name]['mean']:.3f}"}
        for name in ("i_auroc", "p_auroc", "pro", "miss_rate", "false_alarm_rate")
        if None not in (then := last.get(name, {}).get("mean"), metrics.get(name, {}).get("mean"))
    ]
    if rows:
        display.table(rows)
    number = int(version.path.name)
    display.where_next(_next(home, number))
    files = [version.path / name for name in ("calibration.json", "result.json")]
    prefix, values = f"versions/{number}", flat_metrics(report) | flat_summaries(run.rates)
    numbers = {f"{prefix}/{name}": value for name, value in values.items()}
    delivery = amend(home.path, numbers, report.round, files, prefix)
    display.unsent(delivery.kept, home.path)


def _next(home: RunFolder, number: int) -> list[tuple[str, str]]:
    """Says where a new version lies, and what to do with it."""
    return [
        ("written", str(home.version_folder(number).path)),
        ("try it", f"lit-fedad predict {shell_word(f'run={home.path}')} version={number} images=FOLDER"),
        ("use it", f"lit-fedad update {shell_word(f'run={home.path}')} default={number}"),
    ]
