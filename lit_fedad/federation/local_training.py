"""Training on a client: the loop over its batches, and the exchange that runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Exchange, Server, Sums
from lit_fedad.core.errors import UserError

Scale = dict[str, Any]


@contextmanager
def own_scale(fabric: Fabric | None, state: Scale | None = None) -> Iterator[torch.amp.GradScaler | None]:
    """Trains with a gradient scaler of its own for a block; the Fabric's stays as it was made.

    Args:
        fabric: Holds the scaler that others are copies of; None where nothing was launched.
        state: State that an earlier block's scaler ended with; None for the first scale.

    Yields:
        The scaler, whose ``state_dict`` is where the next block goes on; None where losses are not scaled.
    """
    precision = fabric.strategy.precision if fabric else None
    if not isinstance(precision, MixedPrecision) or precision.scaler is None:
        yield None
        return
    first, scaler = precision.scaler, deepcopy(precision.scaler)
    if state is not None:
        scaler.load_state_dict(state)
    precision.scaler = scaler
    try:
        yield scaler
    finally:
        precision.scaler = first


def fit(client: Client, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
    """Trains a client locally for E epochs of its ``training_step``.

    Of Lightning's hooks the client's ``on_train_start``, ``on_train_epoch_start``, ``on_before_optimizer_step`` and
    ``on_train_end`` are called; the task's are left to a plain ``Trainer``. Gradients of the optimiser's parameters are
    not scaled when ``on_before_optimizer_step`` sees them. It is not called in a step that the gradient scaler of
    ``16-mixed`` leaves out, because gradients have overflowed.

    Args:
        client: The live client, on the Fabric's device.
        loader: Its training batches.
        fabric: Moves batches, scales precision and runs the backward pass.

    Returns:
        Means of the loss and the other scalars that ``training_step`` returned, each over the steps that returned it;
        empty where the task has no trainable parameters.

    Raises:
        UserError: If the loss is not finite.
    """
    task = client.task
    if not any(parameter.requires_grad for parameter in task.parameters()):
        return {}
    configured = client.configure_optimizers()
    if client.optimizer_state is not None:
        resume_optimizer(configured, client.optimizer_state)
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


def resume_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads the moments of an earlier round; rates are those of this one.

    An optimiser of another kind or of other parameters, which a task may build after a warm-up, begins anew.
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
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _unscaled(optimizer: torch.optim.Optimizer, fabric: Fabric) -> bool:
    """Divides gradients by the loss's scale, if there is one; returns whether the optimiser will take its step."""
    precision = fabric.strategy.precision
    precision.unscale_gradients(optimizer)
    if getattr(precision, "scaler", None) is None:
        return True
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


class Train(Exchange[Client, Server]):
    """The exchange of most methods: clients receive the server's message, train, and answer with theirs."""

    name = "train"
    trains = True

    def __init__(self, sums: Sums | None = None) -> None:
        self.sums = sums

    train = staticmethod(fit)  # type: ignore[assignment]
