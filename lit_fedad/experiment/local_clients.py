"""Runs with clients whose images are on this machine, and which are played by processes of one Fabric or of Ray."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.fabric import Fabric

from lit_fedad.contracts import Context
from lit_fedad.core.building import call
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.subset import require_known
from lit_fedad.evaluation.calibration import with_calibration
from lit_fedad.experiment.alone import alone, check_alone
from lit_fedad.experiment.build import (
    Model,
    build_data,
    build_images,
    build_model,
    build_module,
    build_partition,
    build_public,
    build_server_labelled,
)
from lit_fedad.experiment.claim import claim_anew
from lit_fedad.experiment.datasets import check_form, image_transform
from lit_fedad.experiment.decisions import judge
from lit_fedad.experiment.federations import build_evaluator, build_federation, shared_key
from lit_fedad.experiment.ray_transport import RayTransport, Simulation
from lit_fedad.experiment.run import Run, RunCallback
from lit_fedad.experiment.run_data import Data
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.processes import on_first
from lit_fedad.federation.transport import Transport
from lit_fedad.privacy.protection import is_protected
from lit_fedad.report.console import Display


def build_run(fabric: Fabric, config: Config, display: Display) -> Run:
    """Builds all parts of a run whose images are on this machine, on a launched Fabric.

    Raises:
        UserError: If the input is invalid.
    """
    transport = workers(config, fabric)  # refuses what Ray cannot play, before features are computed
    images = build_images(config)
    _check_test_images(images)
    partition = build_partition(config, images)
    public = build_public(config, images)
    server_labelled = build_server_labelled(config, images, partition)
    model = build_model(config, images.categories, public, server_labelled)
    check_alone(config, model.task)
    for product in config["task"].get("products") or ():
        require_known(product, images.categories, f"task.products: no product '{product}'")
    partition = with_calibration(config, images, partition, model.method)
    _check_rounds(config, images, partition, model, fabric)
    data = build_data(config, images, partition, model, fabric, display)
    folder = RunFolder.of(config)
    if config["fresh"]:  # only now: if the new run cannot be built, the earlier one is kept
        on_first(fabric, lambda: claim_anew(folder.path, config))
    federation = build_federation(
        config,
        folder.path,
        model,
        data.module,
        build_evaluator(config, data, model.method, fabric),
        fabric,
        data.digest,
        transport=transport,
        key=shared_key(folder.path, config, data.digest, fabric),
    )
    return Run(config, folder, model, data, federation, fabric, display)


def _check_test_images(images: Images) -> None:
    """Refuses sets without training images, and tests that judge nothing: none, training images, or of both labels."""
    if not len(images.train):
        raise UserError(f"data: {images.name} has no training images; give some")
    if not len(images.test):
        raise UserError(
            f"data: {images.name} has no test images, by which a run is judged; give some (of data=folders: test_normal"
            " and test_anomalous, or a train_share below 1)"
        )
    if isinstance(images, ImageSet):
        both = {sample.path for sample in images.train} & {sample.path for sample in images.test}
        if both:
            raise UserError(f"{min(both)}: is given for training and for testing; remove it from one")
        # The same image may be normal for one product and a defect for another.
        by_label = [{(s.path, s.category) for s in images.test if s.label == label} for label in (0, 1)]
        if twice := set.intersection(*by_label):
            path, category = min(twice)
            raise UserError(
                f"{path}: is given as a normal and as an anomalous test image of {category}; remove it from one"
            )


def _check_rounds(config: Config, images: Images, partition: Partition, model: Model, fabric: Fabric) -> None:
    """Refuses a configuration of rounds that cannot be played or judged, before features are computed for hours."""
    check_form(config, images)
    module = build_module(config, range(len(images.train)), range(len(images.test)), partition)
    data = Data(images, partition, image_transform(config, model.task), module, digest="")
    with warnings.catch_warnings(action="ignore"):  # the run itself will give these warnings
        evaluator = build_evaluator(config, data, model.method, fabric)
        federation = build_federation(
            config, RunFolder.of(config).path, model, module, evaluator, fabric, images=None
        )
    federation.sampler.sample(federation.holders, Context(config["seed"], 0))


def workers(config: Config, fabric: Fabric) -> Callable[[LocalTransport], Transport] | None:
    """Returns a function that builds the transport to Ray workers; None where the Fabric's processes play clients.

    Raises:
        UserError: If the run has several processes, or sums that are masked or noised, which workers do not support.
    """
    settings = config.get("simulation") or {}
    if not settings.get("workers"):
        return None
    if fabric.world_size > 1:
        raise UserError(
            "simulation.workers: Ray starts the processes; give fabric.devices=1 fabric.num_nodes=1"
        )
    if is_protected(config):
        raise UserError(
            "simulation.workers: Ray workers neither mask nor noise sums yet; leave federation=secure and"
            " federation/privacy out, or simulation.workers=0"
        )
    simulation: Simulation = call(Simulation, settings, "simulation")
    return partial(RayTransport, config, simulation, build_run)


class Participants:
    """The clients of a run: those on this machine, or, in a subclass, others.

    Attributes:
        fabric: Settings of ``fabric`` that these clients need.
        anew: Advice on how to run a complete run again, for a message.
        build: Builds all parts of a run with these clients.
    """

    fabric: Mapping[str, Any] = {}
    anew = "fresh=true runs it anew"
    build = staticmethod(build_run)

    @property
    def callbacks(self) -> Sequence[RunCallback]:
        """Callbacks of runs with these clients: they draw figures.

        They are imported here, because the libraries that draw may be missing where clients are sites.
        """
        from lit_fedad.experiment.figures.history import History
        from lit_fedad.experiment.figures.predictions import Predictions

        return [History(), Predictions()]

    def judge(self, run: Run) -> None:
        """Calibrates a run's decisions after its last round and judges them; sets `Run.calibration` and later fields.

        Raises:
            UserError: If no client answers.
        """
        judge(run)
        if found := alone(run):
            run.extras["alone"] = found
