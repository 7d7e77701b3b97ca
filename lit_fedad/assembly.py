"""Builds the parts of an experiment from its configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric import Fabric
from torch.utils.data import Dataset

from lit_fedad.config import Config, build, call, identity
from lit_fedad.contracts import Client, Context, Server, Task
from lit_fedad.data.datamodule import AnomalyDataModule, ImageDataset
from lit_fedad.data.feature_cache import FeatureCache
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet
from lit_fedad.data.transform import ImageTransform
from lit_fedad.errors import UserError
from lit_fedad.evaluation import TestSetEvaluator
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.processes import all_cores
from lit_fedad.models.backbones import FeaturePyramid
from lit_fedad.randomness import seeded
from lit_fedad.report.console import Display


@dataclass
class Model:
    """Backbone, task and the two sides of the method.

    Attributes:
        backbone: Frozen feature extractor.
        task: What a client learns.
        client: The method's client side.
        server: The method's server side.
    """

    backbone: FeaturePyramid
    task: Task
    client: Client
    server: Server

    def restore(self, folder: Path, config: Config, number: int) -> None:
        """Turns the live client into one of a run's trained clients, without the run's data.

        Args:
            folder: The run's folder.
            config: The run's configuration.
            number: Which client.

        Raises:
            UserError: If the run has no complete round.
        """
        checkpoints = open_checkpoints(folder, config, self)
        latest = checkpoints.latest()
        if latest is None:
            raise UserError(f"{folder}: no round is complete yet; train first")
        round, state = checkpoints.load(latest)
        self.server.load_state_dict(state["server"])
        context = Context(config["seed"], round + 1, number)
        self.server.begin(context)
        pool = ClientPool(self.client.personal_state(), folder / "personal")
        pool.restore(latest, {number})
        channel: Channel = build(config["federation"]["channel"])
        letter = channel.pack(
            self.server.broadcast(number), self.server.download_payload(), channel.down, context, "the server"
        )
        self.client.begin(context)
        self.client.load_personal_state(pool.get(number))
        self.client.receive(channel.unpack(letter, channel.down))
        self.client.deploy()
        self.client.eval()


@dataclass
class Data:
    """Images, who holds them, and how they are read.

    Attributes:
        images: Training and test samples.
        partition: Training indices by client.
        transform: From file to tensor.
        module: Loaders.
    """

    images: ImageSet
    partition: Partition
    transform: ImageTransform
    module: AnomalyDataModule


def build_model(config: Config) -> Model:
    """Builds backbone, task, client and server, with initial weights drawn from the seed."""
    with seeded(config["seed"], "initial weights"):
        backbone = build(config["backbone"])
        task = build(config["task"], backbone=backbone)
        client = build(config["method"]["client"], task=task)
        server = build(config["method"]["server"], client=client)
    client.eval()
    return Model(backbone, task, client, server)


def build_data(config: Config, backbone: FeaturePyramid, fabric: Fabric, display: Display) -> Data:
    """Reads the image set, deals it to clients, and computes frozen features that are not cached yet."""
    backbone.to(fabric.device)
    images: ImageSet = build(config["data"])
    partition: Partition = build(config["partition"])(images, config["seed"])
    transform = call(ImageTransform, config["image"], "image")
    train: Dataset = ImageDataset(images.train, transform, with_masks=False)
    test: Dataset = ImageDataset(images.test, transform, with_masks=images.has_masks)
    if config["cache"]["enabled"]:
        cache = FeatureCache(cache_folder(config), transform, backbone, backbone.fingerprint)
        samples = (*images.train, *images.test)
        if fabric.is_global_zero:
            with all_cores(fabric), display.progress("Frozen features") as progress:
                cache.fill(samples, progress=progress, device=fabric.device)
        fabric.barrier()
        if not fabric.is_global_zero:
            cache.fill(samples, device=fabric.device)
        train = cache.dataset(images.train, with_masks=False)
        test = cache.dataset(images.test, with_masks=images.has_masks)
    module = AnomalyDataModule(
        train, test, partition.clients, config["batch_size"], config["evaluation"]["batch_size"]
    )
    return Data(images, partition, transform, module)


def build_federation(config: Config, folder: Path, model: Model, data: Data, fabric: Fabric) -> Federation:
    """Puts server, client, data and metrics into the round loop."""
    pixel = data.images.has_masks
    return Federation(
        server=model.server,
        client=model.client,
        data=data.module,
        evaluator=TestSetEvaluator(data.module.test_dataloader(), pixel, fabric),
        fabric=fabric,
        rounds=config["rounds"],
        seed=config["seed"],
        checkpoints=open_checkpoints(folder, config, model),
        pool=ClientPool(
            model.client.personal_state(), folder / "personal", config["federation"]["pool_bytes"]
        ),
        participation=build(config["federation"]["participation"]),
        channel=build(config["federation"]["channel"]),
        evaluate_every=config["evaluation"]["every"],
    )


def open_checkpoints(folder: Path, config: Config, model: Model) -> Checkpoints:
    """A run's checkpoints, which only the same configuration with the same backbone weights may continue."""
    return Checkpoints(folder / "checkpoints", f"{identity(config)}-{model.backbone.fingerprint[:16]}")


def cache_folder(config: Config) -> Path:
    """Where frozen features are kept: the configured folder, LIT_FEDAD_CACHE, or the user's cache."""
    folder = config["cache"]["folder"] or os.environ.get("LIT_FEDAD_CACHE") or "~/.cache/lit_fedad"
    return Path(folder).expanduser() / "features"
