"""What one client does in an exchange: it reads the received bytes, trains, and returns the bytes to send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context, Exchange, Message, Server, Sums
from lit_fedad.contracts.state import load_state
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.client_pool import State

Scale = dict[str, Any]


@contextmanager
def own_scale(fabric: Fabric | None, state: Scale | None = None) -> Iterator[torch.amp.GradScaler | None]:
    """Replaces the Fabric's gradient scaler by a copy for a block, so that the block does not change the original.

    Args:
        fabric: The Fabric with the original scaler; None where Fabric was not launched.
        state: State of the scaler at the end of an earlier block, to continue from; None for the initial scale.

    Yields:
        The copy, whose ``state_dict`` is the `state` of the next block; None where losses are not scaled.
    """
    precision = fabric.strategy.precision if fabric else None
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        yield None
        return
    original, scaler = precision.scaler, deepcopy(precision.scaler)
    if state is not None:
        scaler.load_state_dict(state)
    precision.scaler = scaler
    try:
        yield scaler
    finally:
        precision.scaler = original


def fit(client: Client, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
    """Trains a client locally for E epochs of its ``training_step``.

    Of Lightning's hooks, the client's ``on_train_start``, ``on_train_epoch_start``, ``on_before_optimizer_step`` and
    ``on_train_end`` are called; hooks of the task are called only by a plain ``Trainer``. When
    ``on_before_optimizer_step`` is called, the gradients of the optimiser's parameters are no longer scaled. It is not
    called in a step that the gradient scaler of ``16-mixed`` skips because gradients have overflowed.

    Returns:
        Means of the loss and the other scalars that ``training_step`` returned, each over the steps that returned it;
        empty where the task has no trainable parameters.

    Raises:
        UserError: If the loss is not finite.
    """
    task = client.task
    if not any(parameter.requires_grad for parameter in task.parameters()):
        return {}
    configured = begun_optimizer(client)
    module, optimizer = fabric.setup(client, configured, move_to_device=False)
    module.mark_forward_method("training_step")
    totals: dict[str, float] = {}
    steps: Counter[str] = Counter()
    task.train()
    client.on_train_start()
    for _ in range(client.local_epochs):
        client.on_train_epoch_start()
        for index, batch in enumerate(loader):
            batch = fabric.to_device(batch)
            outputs = module.training_step(batch, index)
            _check_step(client, outputs)
            if not torch.isfinite(outputs["loss"]):
                raise UserError("the loss is not finite: training has diverged; lower the learning rate")
            optimizer.zero_grad()
            fabric.backward(outputs["loss"])
            if _unscaled(configured, fabric):
                client.on_before_optimizer_step(configured)
            optimizer.step()
            for name, value in outputs.items():
                totals[name] = totals.get(name, 0.0) + float(value.detach())
                steps[name] += 1
    client.on_train_end()
    task.eval()
    if client.keep_optimizer:
        client.optimizer_state = configured.state_dict()
    return {name: total / steps[name] for name, total in totals.items()}


def _check_step(client: Client, outputs: Any) -> None:
    """Refuses what is no dictionary with a loss, such as the loss alone, which Lightning would take."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"training_step of {type(client).__name__} and {type(client.task).__name__}: give a dictionary of scalars"
            " with 'loss', a tensor"
        )


def begun_optimizer(client: Client) -> torch.optim.Optimizer:
    """Builds the optimiser of a client's round, which goes on from the state that the client has kept, if any."""
    optimizer = client.optimizer_of_round()
    if client.optimizer_state is not None:
        resume_optimizer(optimizer, client.optimizer_state)
    return optimizer


def resume_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads an optimiser's state of an earlier round, but keeps the learning rates and other settings of this round.

    The state is not loaded if the optimiser is of another kind or has other parameters, as a task may build it after a
    warm-up.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if settings[0].keys() != state["param_groups"][0].keys() - {"params"}:
        return
    sizes = [
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, state["param_groups"])
    ]
    if sizes[0] != sizes[1]:
        return
    optimizer.load_state_dict(state)
    for group, group_settings in zip(optimizer.param_groups, settings, strict=True):
        group.update(group_settings)


def _unscaled(optimizer: torch.optim.Optimizer, fabric: Fabric) -> bool:
    """Divides gradients by the scale of the loss, if there is one; returns whether the optimiser will take its step."""
    precision = fabric.strategy.precision
    precision.unscale_gradients(optimizer)
    if getattr(precision, "scaler", None) is None:
        return True
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


class Train(Exchange[Client, Server]):
    """The exchange of most methods: clients receive the server's message, train, and send their own message."""

    name = "train"
    trains = True

    def __init__(self, sums: Sums | None = None) -> None:
        self.sums = sums

    train = staticmethod(fit)  # type: ignore[assignment]


class ClientData(Protocol):
    """The training data of all clients."""

    @property
    def milestones(self) -> frozenset[int]:
        """Rounds after which clients change to another stage of their data; these rounds are evaluated."""

    @property
    def stages(self) -> Mapping[int, int]:
        """Current stage of each client, from 0, where its data come in several stages."""

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of training images by client."""

    def client_loader(self, client: int, generator: torch.Generator, shuffle: bool = True) -> DataLoader:
        """Returns training batches of a client."""

    def at(self, round: int) -> ClientData:
        """Returns the data that the clients hold in a round."""


class Mask(Protocol):
    """The mask that hides a client's message where uploads are summed securely."""

    def pack(self, message: Message, exchange: Exchange, client: Client) -> bytes:
        """Masks a message and serialises it."""


@dataclass
class ClientResult:
    """The result of a client's part in an exchange.

    Attributes:
        blob: The serialised upload; empty if the client sends nothing.
        scalars: Loss and other scalars of training.
        trained: Value of `Evaluator.score` directly after training; None where the client was not scored.
    """

    blob: bytes = b""
    scalars: dict[str, float] = field(default_factory=dict)
    trained: Any = None


@dataclass(frozen=True)
class ClientRunner:
    """Plays the live client's part in exchanges, independently of the server and of other clients.

    Attributes:
        channel: Encodes and checks messages in both directions.
    """

    client: Client
    channel: Channel
    fabric: Fabric

    def activate(self, exchange: Exchange, context: Context, state: State, blob: bytes) -> Message:
        """Loads one client's state and the server's message into the live client.

        Raises:
            UserError: If the message differs from the declared form.
        """
        client = self.client
        client.context, client.task.round = context, context.round
        load_state(client, state)
        message = self.channel.down.unpack(blob, exchange.broadcast_spec(client), "the server")
        exchange.receive(client, message)
        if self.fabric.device.type != "cpu":  # states and messages were loaded on the CPU
            client.to(self.fabric.device)
        client.eval()
        return message

    def play(self, exchange: Exchange, data: ClientData, mask: Mask | None = None) -> ClientResult:
        """Trains the activated client where the exchange includes training, and serialises its upload.

        The caller stores the client's new state (`state_of`).

        Raises:
            UserError: If training diverges, or the upload differs from the declared form.
        """
        client, context, result = self.client, self.client.context, ClientResult()
        assert context.client is not None
        if exchange.trains:
            client.refresh(ordered_loader(data, context.client))
            loader = data.client_loader(context.client, context.generator("batches"))
            with context.seeded("fit"), own_scale(self.fabric, client.loss_scale) as scaler:
                result.scalars = exchange.train(client, loader, self.fabric)
            client.loss_scale = scaler.state_dict() if scaler else None
        with context.seeded("send"):
            message = exchange.send(client, ordered_loader(data, context.client))
        if mask is not None:
            result.blob = mask.pack(message, exchange, client)
        else:
            result.blob = self.channel.up.pack(message, exchange.upload_spec(client), context, "the client")
        return result


def ordered_loader(data: ClientData, client: int) -> DataLoader:
    """Returns a client's training batches in a fixed order."""
    return data.client_loader(client, torch.Generator(), shuffle=False)


def pose_client(client: Client, which: Literal["own", "server"], lent: Message, data: ClientData) -> None:
    """Prepares the activated client for predictions.

    Args:
        client: The live client, which has received the server's message.
        which: Whether it predicts with its own model or with the server's.
        lent: Entries that replace those of the task's state (`Predictors.lent`).
        data: The clients' training data.
    """
    assert client.context.client is not None
    client.deploy(which)
    if lent:
        client.task.load_state_dict(lent, strict=False)
    client.refresh(ordered_loader(data, client.context.client), predicts=True)
