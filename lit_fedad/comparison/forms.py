"""What messages of a configuration hold, by their declared forms: no image is read, nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import chain

from lit_fedad.config import Config
from lit_fedad.contracts import Free, MessageSpec, TensorSpec
from lit_fedad.errors import UserError
from lit_fedad.experiment.build import Model, build_model
from lit_fedad.methods.parts.condensed_images import IMAGES
from lit_fedad.report.tables import Setting

_MIB = 1024**2


def upload_mib(config: Config, setting: Setting) -> float:
    """Computes the size of what all clients send in a round, in MiB, without headers (FedVCK, Table 5).

    Condensed images are `share` times the training images; that each class of a client has a fewest number of them,
    and is rounded up, is not counted. Lists of classes are counted as if each client had all.

    Args:
        config: Configuration of a run on all clients.
        setting: Its published numbers of training images and of classes.

    Returns:
        The size.

    Raises:
        UserError: If the sender chooses another size, which only a run can tell.
    """
    model, clients = _model(config, setting), config["partition"]["clients"]
    image = config["image"]
    share = config["method"]["client"].get("share", 0.0)
    sizes = {
        IMAGES: share * setting.images / clients,
        "classes": setting.classes,
        "channels": image["channels"],
        "height": image["size"],
        "width": image["size"],
    }
    tensors = chain.from_iterable(
        exchange.upload_spec(model.client).items() for exchange in model.client.exchanges.rounds
    )
    of_client = sum(_bytes(name, tensor, sizes, config["method"]["name"]) for name, tensor in tensors)
    return clients * of_client / _MIB


def messages(config: Config, setting: Setting) -> dict[str, str]:
    """Lists what crosses before round 1 and in a round, each way (FedVCK, Table 10).

    Args:
        config: Configuration of a run.
        setting: Its number of classes.

    Returns:
        By heading: ``weights`` for parameters and buffers of the task, and the names of other tensors.
    """
    model = _model(config, setting)
    found = {}
    for when, exchanges in (
        ("before round 1", model.client.exchanges.setup),
        ("a round", model.client.exchanges.rounds),
    ):
        for way in ("up", "down"):
            specs = [
                exchange.upload_spec(model.client) if way == "up" else exchange.broadcast_spec(model.client)
                for exchange in exchanges
            ]
            found[f"{way}, {when}"] = ", ".join(_contents(specs, model)) or "-"
    return found


def _model(config: Config, setting: Setting) -> Model:
    return build_model(config, [str(number) for number in range(setting.classes)])


def _bytes(name: str, tensor: TensorSpec, sizes: Mapping[str, float], method: str) -> float:
    lengths = []
    for size in tensor.shape:
        if isinstance(size, Free) and size.name not in sizes:
            raise UserError(f"method={method}: only a run can tell how many {size.name} of '{name}' are sent")
        lengths.append(sizes[size.name] if isinstance(size, Free) else size)
    return math.prod(lengths) * tensor.dtype.itemsize


def _contents(specs: Iterable[MessageSpec], model: Model) -> list[str]:
    """Names what messages hold; tensors of a module by the module's name."""
    weights = {name for name, _ in chain(model.task.named_parameters(), model.task.named_buffers())}
    names = ["weights" if name in weights else name.partition(".")[0] for spec in specs for name in spec]
    return list(dict.fromkeys(names))
