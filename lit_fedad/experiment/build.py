"""Builds the parts of an experiment from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning.fabric import Fabric
from torch import Tensor

from lit_fedad.contracts import Client, Exchanges, Method, Server, Task
from lit_fedad.contracts.randomness import seeded
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import build, locate, takes
from lit_fedad.core.config import Config
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import Images, LabelledDataset, LabelledSet, read_images
from lit_fedad.data.partition import Partition, checked
from lit_fedad.data.public import refuse_overlap
from lit_fedad.data.stream import StreamDataModule
from lit_fedad.experiment.datasets import (
    build_datasets,
    check_form,
    check_geometry,
    data_digest,
    frozen_encoder,
    frozen_public,
    hashes_file,
    image_transform,
    pooled_folder,
    tiled,
)
from lit_fedad.experiment.run_data import Data
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.models.convnets import BatchNorm
from lit_fedad.models.large_images import Backbone
from lit_fedad.report.console import Display
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.patches import PatchTask

T = TypeVar("T")

_NO_BACKBONE = {"name": "none", "weights": "none", "sha256": "", "taken": "none"}


@dataclass
class Model:
    """Backbone, task and the two sides of the method.

    Attributes:
        backbone: Frozen feature extractor; None for tasks that train from pixels.
    """

    backbone: Backbone | None
    task: Task
    method: Method

    @property
    def client(self) -> Client:
        """The method's client side."""
        return self.method.client

    @property
    def server(self) -> Server:
        """The method's server side."""
        return self.method.server

    @property
    def provenance(self) -> dict[str, Any]:
        """Returns the backbone's name and the source of its weights."""
        return _NO_BACKBONE if self.backbone is None else self.backbone.provenance

    @property
    def fingerprint(self) -> str:
        """Returns a text that changes whenever the frozen features change."""
        return "none" if self.backbone is None else self.backbone.fingerprint


def build_images(config: Config) -> Images:
    """Reads the image set.

    Raises:
        UserError: If the method does not support the task, the task does not support the images, or none are returned.
    """
    # The task is checked before images are read: a method's settings for its own task and data do not fit others.
    task = _class_of(config["task"], "task", Task)
    _class_of(config["method"]["client"], "method.client", Client).check_task(task)
    if task.kind == "anomaly" and config["image"]["channels"] != 3:
        raise UserError(
            f"image.channels={config['image']['channels']}: task {task.__name__} looks at three channels, as all tasks"
            " but classifiers do; give image.channels=3"
        )
    check_geometry(config)
    if "_target_" not in config["data"]:
        raise UserError("the images of this run are at its sites, and none are here: this needs them")
    images = build(config["data"], "data")
    if not isinstance(images, Images):
        raise UserError(
            f"data._target_={config['data']['_target_']} returns a {type(images).__name__}, no ImageSet or LabelledSet"
        )
    if images.kind != task.kind:
        raise UserError(
            f"task {task.__name__} learns labels, and data {images.name} has none; give data=cifar10"
            if task.kind == "classification"
            else f"task {task.__name__} looks for anomalies, and data {images.name} has only classes;"
            " give task=classifier, or other data, such as data=motifs"
        )
    return images


def _class_of(section: Mapping[str, Any], key: str, base: type[T]) -> type[T]:
    """Returns the class that a section names.

    Raises:
        UserError: If it is no subclass of `base`.
    """
    located = locate(section["_target_"])
    if not (isinstance(located, type) and issubclass(located, base)):
        raise UserError(f"{key}._target_={section['_target_']} is no {base.__name__} (lit_fedad.contracts)")
    return located


def build_public(config: Config, images: Images) -> Tensor | None:
    """Reads the public images [P, 3, S, S], uint8, if the method's server uses any.

    Raises:
        UserError: If a public image is also a client's image or a test image, or the run uses grey images.
    """
    if not takes(config["method"]["server"], "public") or config.get("public") is None:
        return None
    if config["image"]["channels"] != 3:
        raise UserError(
            f"image.channels={config['image']['channels']}: public images have three channels; give image.channels=3"
        )
    public: Tensor = build(config["public"], "public")
    if isinstance(images, LabelledSet):
        private = [images.train_images, images.test_images]
    else:  # at the public images' size, as `public=folder` would have read them
        private = [read_images([sample.path for sample in (*images.train, *images.test)], public.shape[-1])]
    for part in private:
        refuse_overlap(public, part, images.name)
    return public


def build_partition(config: Config, images: Images) -> Partition:
    """Partitions the training images to clients, and to their stages where data come in stages; see `checked`."""
    dealt = build(config["partition"], "partition")(images, config["seed"])
    return checked(dealt, images, f"partition._target_={config['partition']['_target_']}")


def build_server_labelled(config: Config, images: Images, partition: Partition) -> LabelledDataset | None:
    """Selects the labelled images that the partition reserves for the method's server, if the server uses any.

    Raises:
        UserError: If the partition reserves none.
    """
    if not takes(config["method"]["server"], "server_labelled"):
        return None
    assert isinstance(images, LabelledSet)
    reserved = list(partition.reserved)
    if not reserved:
        raise UserError(
            f"method {config['method']['name']} trains its server with labelled images that no client holds:"
            " give partition=task_stream partition.server_labelled=100 (of each class)"
        )
    pixels, labels = images.train_images[reserved], images.train_labels[reserved]
    return LabelledDataset(pixels, labels, images.mean, images.std)


def tells_products(config: Config) -> bool:
    """Returns whether the task gets the products from the data, to fit a subspace for each: if its settings name none.

    Not with secure sums: the sum for a product that only one client holds would be this client's message.
    """
    task, secure = config["task"], config["federation"].get("secure_sum") is not None
    unnamed = takes(task, "products") and task["products"] is None and task.get("subspace", True) is not None
    return unnamed and not secure


def build_model(
    config: Config,
    categories: Sequence[str],
    public: Tensor | None = None,
    server_labelled: LabelledDataset | None = None,
    backbone: Backbone | None = None,
) -> Model:
    """Builds backbone, task, client and server, with initial weights drawn from the seed.

    Without `public` or `server_labelled` images a server that uses such images can predict, but not train.
    `backbone` is the backbone of another model of the same configuration, to be reused; None builds a new one.

    Raises:
        UserError: If parts do not fit each other, or a network with batch normalisation gets batches of one image.
    """
    with seeded(config["seed"], "initial weights"):
        given: dict[str, Any] = {}
        if takes(config["task"], "backbone"):
            if config.get("backbone") is None:
                raise UserError("this task looks at images through a backbone: give backbone=resnet18")
            given["backbone"] = backbone or tiled(config, build(config["backbone"], "backbone"))
        if takes(config["task"], "tile"):
            given["tile"] = config["image"].get("tile")
        if takes(config["task"], "classes"):
            given["classes"] = len(categories)
        section = dict(config["task"])
        if tells_products(config):
            section["products"] = list(categories)
        task = build(section, "task", **given)
        if (
            task.trains
            and config["batch_size"] == 1
            and any(isinstance(m, BatchNorm) for m in task.modules())
        ):
            raise UserError(
                "batch_size=1: batch normalisation, by which every prediction is made, learns nothing of single images;"
                " give at least 2"
            )
        if config["start"]:
            start_from(task, config["start"])
        client = build(config["method"]["client"], "method.client", task=task)
        client.decay_rounds = config["rounds"] if config.get("learning_rate_decay") else None
        if public is not None and frozen_encoder(task) is not None and isinstance(task, Contrastive):
            public = frozen_public(public, task, pooled_folder(config))
        server_images = {"public": public, "server_labelled": server_labelled}
        server = build(
            config["method"]["server"],
            "method.server",
            client=client,
            **{key: value for key, value in server_images.items() if takes(config["method"]["server"], key)},
        )
        if not config["method"].get("exchanges"):
            raise UserError(
                f"method {config['method']['name']}: its YAML names no method.exchanges; give the function that lists"
                " them, such as {_target_: lit_fedad.methods.fedavg.exchanges}"
            )
        exchanges = build(config["method"]["exchanges"], "method.exchanges", client=client)
        if not isinstance(exchanges, Exchanges):
            raise UserError(
                f"method.exchanges gives a {type(exchanges).__name__}, not Exchanges(setup, rounds)"
            )
    client.eval()
    frozen = frozen_encoder(task)
    seen = task.backbone if isinstance(task, PatchTask) else given.get("backbone")
    return Model(frozen.backbone if frozen else seen, task, Method(client, server, exchanges))


def start_from(task: Task, run: str) -> None:
    """Loads the final weights of another run's server into a task, where names and shapes are equal.

    Raises:
        UserError: If there is no such run, its server holds no weights, or no weight fits.
    """
    folder = RunFolder.find(run, "start")
    checkpoints = Checkpoints(folder.path / "checkpoints")
    latest, result = checkpoints.latest(), folder.result()
    if result and "own_client" in result:
        raise UserError(f"start={run}: a site's own detector has no server's weights; give a run of train")
    if result is None or latest is None:
        raise UserError(f"start={run}: the run is not complete; the command that began it continues it")
    server = checkpoints.load(latest)[1]["server"]
    weights = server.get("weights", {}) if isinstance(server, dict) else {}
    state = learned_state(task)
    fitting = {
        name: entry
        for name, entry in (weights.items() if isinstance(weights, dict) else ())
        if name in state and isinstance(entry, Tensor) and entry.shape == state[name].shape
    }
    if not fitting:
        raise UserError(
            f"start={run}: its server holds no weights that fit this task; start from a run of the same"
        )
    task.begin_with(fitting)


def build_data(
    config: Config, images: Images, partition: Partition, model: Model, fabric: Fabric, display: Display
) -> Data:
    """Builds the loaders of the images, and computes frozen features that are not cached yet."""
    check_form(config, images)
    transform = image_transform(config, model.task)
    train, test = build_datasets(config, images, transform, model.task, model.backbone, fabric, display)
    module = build_module(config, train, test, partition)
    digest = data_digest(images, partition, hashes_file(config), display)
    return Data(images, partition, transform, module, digest)


def build_module(config: Config, train: Any, test: Any, partition: Partition) -> FederatedDataModule:
    """Builds the loaders of training and test images; ranges of equal lengths suffice where nothing is loaded.

    Raises:
        UserError: If images come in more stages than there are rounds.
    """
    sizes = config["batch_size"], config["evaluation"]["batch_size"]
    if partition.stages is None:
        return FederatedDataModule(train, test, partition.clients, *sizes)
    return StreamDataModule(train, test, partition.stages, config["rounds"], partition.schedule, *sizes)
