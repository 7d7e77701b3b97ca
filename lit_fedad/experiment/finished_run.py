"""Reopens complete runs: with their images and all clients, or as a single trained client for new images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Context
from lit_fedad.contracts.state import detached, load_state, state_of
from lit_fedad.core.bounds import pair
from lit_fedad.core.building import build
from lit_fedad.core.config import Config
from lit_fedad.core.errors import ANEW, UserError, first_line, is_out_of_memory, lies_elsewhere
from lit_fedad.core.files import atomic, sha256
from lit_fedad.data.additions import Addition, grow, grown_digest
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.stream import LastStages
from lit_fedad.evaluation.calibration import with_calibration
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.build import Model, build_data, build_images, build_model, build_partition
from lit_fedad.experiment.datasets import data_digest, hashes_file
from lit_fedad.experiment.federations import build_evaluator, build_federation, open_checkpoints
from lit_fedad.experiment.run import Run
from lit_fedad.experiment.run_data import Data
from lit_fedad.experiment.run_files import MALFORMED, file_named_in_errors, refused_if_malformed
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.checkpoint import Checkpoints, read_state, write_state
from lit_fedad.federation.client_pool import ClientPool, State
from lit_fedad.federation.client_runner import ClientRunner
from lit_fedad.federation.processes import make_fabric
from lit_fedad.report.console import Display

# Keys whose values may be overridden, because they may differ between machines; other keys would change the detector.
_MACHINE_KEYS = ("data.root", "backbone.weights", "cache.folder", "fabric.accelerator")


@dataclass
class FinishedRun(Run):
    """A run after its last round, on this machine.

    Attributes:
        data: Images, partition and loaders.
        federation: The federation, restored from the last checkpoint.
        fabric: A Fabric of one process.
        result: Content of ``result.json``.
    """

    data: Data
    result: dict[str, Any] = field(default_factory=dict)


def reopen(
    run: str,
    overrides: Mapping[str, str] | None = None,
    callbacks: Sequence[object] = (),
    version: int | None = 0,
) -> FinishedRun:
    """Builds a run's parts as they were at its end, without further rounds.

    Args:
        run: Folder or tracked id of the run.
        overrides: Values of `_MACHINE_KEYS` for this machine, by key.
        callbacks: Callbacks of the Fabric.
        version: Number of the version; 0 for the run as it was trained, None for its default version.

    Raises:
        UserError: If there is no such complete run, or its data or backbone is not available; also if it is a site's
            own detector, which has no server and no history.
    """
    folder, result, config = complete_run(run, overrides, version)
    if "own_client" in result:
        raise UserError(
            f"{folder.path}: a site's own detector: predict, watch and export take it, nothing else does"
        )
    with built_of(folder, overrides):
        return _rebuilt(folder, result, config, callbacks)


def _rebuilt(
    folder: RunFolder, result: dict[str, Any], config: Config, callbacks: Sequence[object]
) -> FinishedRun:
    """Builds all parts of a complete run, and restores its last checkpoint."""
    display, fabric = Display(), one_process(config, callbacks)
    model = same_model(config, result)
    images = images_of_run(config, result)
    partition = with_calibration(config, images, build_partition(config, images), model.method)
    additions = folder.additions()
    data = (
        build_grown_data(config, images, partition, additions, model, fabric, display)
        if additions
        else build_data(config, images, partition, model, fabric, display)
    )
    if data.partition.counts(data.images).tolist() != result["partition"]["counts"]:
        raise UserError(
            f"{data.images.name}: not the images that the run was made with; give their data.root=DIR"
        )
    stored, evaluator = folder.config(), build_evaluator(config, data, model.method, fabric)
    federation = build_federation(stored, folder.path, model, data.module, evaluator, fabric, data.digest)
    _check_last(federation.checkpoints, stored)
    federation.resume()
    return FinishedRun(config, folder, model, data, federation, fabric, display, result=result)


def images_of_run(config: Config, result: Mapping[str, Any]) -> Images:
    """Builds the images of a run under the names that they have in it.

    A set, and a product alone, may be called after their folder, which may have another name now, or on this machine.
    Splits and subsets are drawn by these names.

    Args:
        config: The run's configuration on this machine.
        result: Content of its ``result.json``.
    """
    data, products = config["data"], result["partition"]["products"]
    if data.get("name", "") is None:
        data = {**data, "name": result["data"]}
    images = build_images({**config, "data": data})
    if isinstance(images, ImageSet) and len(images.categories) == len(products) == 1:
        images = images.renamed(lambda _: products[0])
    return images


@contextmanager
def built_of(folder: RunFolder, overrides: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns errors of a block that builds parts from a run's folder into one line; the folder may come from anybody.

    Args:
        folder: The folder.
        overrides: Values that do not come from the folder, by key.

    Raises:
        UserError: If the block raises an error that wrong values in the configuration may cause; it names the file.
    """
    try:
        with file_named_in_errors(folder.path / "config.yaml", overrides or ()):
            yield
    except (RuntimeError, *MALFORMED) as error:
        if is_out_of_memory(error):
            raise
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{folder.path / 'config.yaml'}: no detector can be built of it ({cause:.300})"
        ) from error


def build_grown_data(
    config: Config,
    images: Images,
    partition: Partition,
    additions: Sequence[Addition],
    model: Model,
    fabric: Fabric,
    display: Display,
) -> Data:
    """Builds the loaders of a run's images and of later additions; each client holds the images of its last stage."""
    assert isinstance(images, ImageSet)
    grown, stages = grow(images, partition, additions)
    data = build_data(config, grown, Partition.of_clients(stages.clients), model, fabric, display)
    sizes = data.module.batch_size, data.module.eval_batch_size
    module = LastStages(data.module.train, data.module.test, stages.by_stage, *sizes)
    memo = hashes_file(config)
    digest = grown_digest(data_digest(images, partition, memo, display), additions, memo)
    return replace(data, partition=stages, module=module, digest=digest)


def complete_run(
    run: str, overrides: Mapping[str, str] | None, version: int | None = 0
) -> tuple[RunFolder, dict[str, Any], Config]:
    """Returns a run's folder and result, and its configuration on this machine.

    Raises:
        UserError: If there is no such complete run or version, or an override is not allowed.
    """
    folder = RunFolder.find(run).version(version)
    result = folder.result()
    if result is None:
        raise UserError(f"{folder.path}: the run is not complete; the command that began it continues it")
    with refused_if_malformed(str(folder.path / "result.json")):
        _check_result(result)
    config = folder.config()
    if (config.get("backbone") or {}).get("weights") == "auto":
        # "auto" is replaced by the backbone that the run used, which may differ from the choice on this machine.
        config["backbone"] |= {key: result["backbone"][key] for key in ("name", "weights")}
    for key, value in (overrides or {}).items():
        section, _, name = key.partition(".")
        if key not in _MACHINE_KEYS or name not in config.get(section, {}):
            raise UserError(f"'{key}' cannot be given for a trained run, only {', '.join(_MACHINE_KEYS)}")
        config[section][name] = value
    return folder, result, config


def _check_result(result: Mapping[str, Any]) -> None:
    """Checks what commands read of a result later; raises an error of `MALFORMED` if it is of another kind."""
    partition, backbone = result["partition"], result["backbone"]
    products, sizes = partition["products"], partition["sizes"]
    texts = [result["method"], result["data"], *products]
    texts += [backbone[name] for name in ("name", "weights", "sha256", "taken")]
    whole = all(type(size) is int and size >= 0 for size in [*sizes, *chain(*partition["counts"])])
    if not (type(products) is list and all(isinstance(text, str) for text in texts) and whole and any(sizes)):
        raise TypeError


def one_process(config: Config, callbacks: Sequence[object] = ()) -> Fabric:
    """Launches a Fabric of one process with the run's other settings, and returns it."""
    fabric = make_fabric(**{**config["fabric"], "devices": 1, "num_nodes": 1, "callbacks": callbacks})
    fabric.launch()
    return fabric


def same_model(config: Config, result: Mapping[str, Any]) -> Model:
    """Builds the run's model, untrained, with the backbone that the run was trained with.

    Raises:
        UserError: If the backbone's weights have changed, or it is a coordinator's run whose sites each have a model
            of their own.
    """
    # Without `start`: training has replaced the initial weights, and the run that they came from may be gone.
    model = build_model({**config, "start": None}, result["partition"]["products"])
    if "sites" in result and "own_client" not in result and not model.client.predictors.shared:
        raise UserError(
            f"method={config['method']['name']}: each site predicts with a model of its own, which stays at the"
            " site; there, predict, watch and export take run=SITE/detectors/RUN"
        )
    then, now = result["backbone"], model.provenance
    if then["sha256"] != now["sha256"]:
        raise UserError(
            f"backbone: the weights taken now ({now['taken']}) differ from the run's ({then['taken']});"
            " give backbone.weights=FILE"
        )
    return model


OWN_CLIENT = "client.pt"
"""File in the folder of a site's own detector that stores the site's client."""


@dataclass(frozen=True)
class TrainedClient:
    """The message and the personal state from which a trained client can predict.

    Attributes:
        round: Round of the message.
        exchange: Index of the message's exchange in its round.
        blob: The serialised message of the server.
        state: The client's personal state.
    """

    round: int
    exchange: int
    blob: bytes
    state: State

    def write(self, folder: Path) -> str:
        """Writes `OWN_CLIENT`, which is complete or absent; returns its SHA-256."""
        blob = torch.from_numpy(np.frombuffer(bytearray(self.blob), np.uint8))
        content = {"round": self.round, "exchange": self.exchange, "blob": blob, "state": self.state}
        with atomic(folder / OWN_CLIENT, durable=True) as partial:
            write_state(detached(content), partial)
        return sha256(folder / OWN_CLIENT)

    @classmethod
    def read(cls, folder: Path, digest: str) -> TrainedClient:
        """Reads `OWN_CLIENT`.

        Raises:
            UserError: If it is missing or was changed.
        """
        content = read_state(
            folder / OWN_CLIENT, digest, "restore it from a copy, or take part in another run"
        )
        return cls(**{**content, "blob": content["blob"].numpy().tobytes()})


def load_client(
    model: Model, folder: Path, config: Config, number: int, fabric: Fabric, own: str | None = None
) -> None:
    """Loads a trained client into the live client, without images.

    `own` is the SHA-256 of `OWN_CLIENT` in a site's folder, None for a run with checkpoints.

    Raises:
        UserError: If the run lacks the checkpoint of its last round, or a file does not fit its method.
    """
    channel = build(config["federation"]["channel"], "federation.channel")
    file = folder / (OWN_CLIENT if own else "checkpoints")
    try:
        with file_named_in_errors(file):
            trained = (
                TrainedClient.read(folder, own) if own else _of_run(model, folder, config, number, channel)
            )
            context = Context(config["seed"], trained.round, number, trained.exchange)
            exchange = model.method.exchanges.at(context)
            runner = ClientRunner(model.client, channel, fabric)
            runner.activate(exchange, context, trained.state, trained.blob)
            model.client.deploy()
            _check_prediction(model, config, fabric)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        if lies_elsewhere(error, file, model.task, model.client, model.server):
            raise
        raise UserError(f"{file}: its state does not fit the run's method ({first_line(error)})") from error


def _check_prediction(model: Model, config: Config, fabric: Fabric) -> None:
    """Predicts a black image: a client whose parts do not fit each other fails before any image is read.

    Raises:
        ValueError: If its score is no number, or its heatmap is not of the image's size; else what the parts raise.
    """
    size = pair("image.size", config["image"]["size"])
    black = torch.zeros(1, config["image"]["channels"], *size)
    prediction = predict_batch(model.client, {"image": black}, fabric)
    scores, maps = prediction.image_score, prediction.anomaly_map
    if scores is not None and scores.isnan().any():
        raise ValueError("its scores are no numbers")
    if maps is not None and maps.shape[1:] != size:
        raise ValueError(f"heatmaps of {list(maps.shape[1:])}, image.size={list(size)}")


def _of_run(model: Model, folder: Path, config: Config, number: int, channel: Channel) -> TrainedClient:
    """Reads a client from a run's last checkpoint, with the message that the server would send next."""
    checkpoints = open_checkpoints(folder, config, model)
    _check_last(checkpoints, config)
    latest = checkpoints.latest()
    assert latest is not None
    round, state = checkpoints.load(latest)
    pool = ClientPool(state_of(model.client), folder / "personal")
    pool.restore(latest, {number})
    context = Context(config["seed"], round + 1, number)
    load_state(model.server, state["server"])
    model.server.context = context
    exchange = model.method.exchanges.at(context)
    message, spec = exchange.broadcast(model.server, number), exchange.broadcast_spec(model.client)
    blob = channel.down.pack(message, spec, context, "the server")
    return TrainedClient(round + 1, 0, blob, pool.get(number))


def _check_last(checkpoints: Checkpoints, config: Config) -> None:
    """Refuses a complete run without the checkpoint of its last round, for example a run that was copied in part.

    Without this check, the initial model would be taken for the trained one.

    Raises:
        UserError: If there is no checkpoint, or the newest is of another round.
    """
    latest, rounds = checkpoints.latest_round(), config["rounds"]
    if latest != rounds:
        held = "no checkpoint" if latest is None else f"that of round {latest}"
        raise UserError(
            f"{checkpoints.folder}: holds {held}, and not that of the last round, {rounds}; restore it from a copy, or"
            f" {ANEW}"
        )
