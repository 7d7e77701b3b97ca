"""Builds the federation of a run from its configuration, wherever its clients are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning.fabric import Fabric

from lit_fedad.contracts.state import state_of
from lit_fedad.core.building import build
from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.config import Config, identity
from lit_fedad.experiment.build import Model
from lit_fedad.federation.checkpoint import Checkpoints
from lit_fedad.federation.client_pool import ClientPool
from lit_fedad.federation.client_runner import ClientData
from lit_fedad.federation.evaluator import Evaluator
from lit_fedad.federation.local_transport import LocalTransport
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.transport import Transport
from lit_fedad.privacy.dp_sgd import TrainingPrivacy
from lit_fedad.privacy.image_privacy import ImagePrivacy, noise_key
from lit_fedad.privacy.protection import protect


def build_federation(
    config: Config,
    folder: Path,
    model: Model,
    data: ClientData,
    evaluator: Evaluator,
    fabric: Fabric,
    images: str | None,
    transport: Callable[[LocalTransport], Transport] | None = None,
    names: ClientNames = NUMBERS,
    key: bytes = b"",
) -> Federation:
    """Builds the federation of server, clients and evaluator.

    `images` is the hash of images and partition, with which alone a checkpoint is resumed, None where they are
    elsewhere; `key` the secret that noise is drawn from, empty where no round is to come, or this machine draws none.
    """
    federation = Federation(
        method=model.method,
        data=data,
        evaluator=evaluator,
        fabric=fabric,
        rounds=config["rounds"],
        seed=config["seed"],
        checkpoints=open_checkpoints(folder, config, model, images),
        pool=ClientPool(state_of(model.client), folder / "personal", config["federation"]["pool_bytes"]),
        sampler=build(config["federation"]["sampler"]),
        channel=build(config["federation"]["channel"]),
        evaluate_every=config["evaluation"]["every"],
        robust=build(config["federation"].get("robust")),
        transport=transport,
        names=names,
    )
    secure_sum, privacy = (build(config["federation"].get(section)) for section in ("secure_sum", "privacy"))
    return protect(federation, secure_sum, privacy, key)


def shared_key(folder: Path, config: Config, images: str, fabric: Fabric) -> bytes:
    """Returns the secret of a run's noise in every process; empty where there is no noise."""
    privacy: ImagePrivacy | TrainingPrivacy | None = build(config["federation"].get("privacy"))
    if privacy is None or privacy.epsilon is None:
        return b""
    key: bytes = fabric.broadcast(noise_key(folder, privacy.seed, images) if fabric.is_global_zero else b"")
    return key


def open_checkpoints(folder: Path, config: Config, model: Model, images: str | None = None) -> Checkpoints:
    """Opens a run's checkpoints.

    Only the same configuration may resume them, with the same backbone weights and, where their `data_digest` is
    given, with the same images.
    """
    return Checkpoints(folder / "checkpoints", f"{identity(config)}-{model.fingerprint[:16]}", images)
