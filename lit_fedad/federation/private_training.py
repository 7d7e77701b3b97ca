"""DP-SGD: clients train on clipped gradients of single images, with noise (Abadi et al., CCS 2016), by Opacus.

A step draws each image with probability q, shortens its gradient to a norm C, adds the gradients up, and adds
``N(0, (sigma C)^2)`` to each element (Abadi et al., Algorithm 1). What follows from such steps, the server's average
too, costs nothing more.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context
from lit_fedad.errors import UserError
from lit_fedad.federation.local_training import Train, resume_optimizer

if TYPE_CHECKING:
    from lit_fedad.federation.training_privacy import TrainingPlan


@dataclass(frozen=True)
class Steps:
    """The steps that a client trains in a round.

    Attributes:
        share: Probability q with which a step draws an image.
        number: Steps an epoch.
        noise: Noise multiplier sigma.
    """

    share: float
    number: int
    noise: float


class TrainPrivately(Train):
    """The exchange before which clients train by DP-SGD; of their training they tell nothing but weights.

    Args:
        plan: The noise.
        key: The secret that draws and noise follow from; empty where nothing is trained.
    """

    def __init__(self, plan: TrainingPlan, key: bytes) -> None:
        self.plan, self._key = plan, key

    def train(self, client: Client, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains the client by `fit_privately`; losses are of its images, and stay with it."""
        if not self._key:
            raise ValueError("no secret to draw noise from")
        number = client.context.client
        assert number is not None
        steps = self.plan.steps(self.plan.sizes[number])
        fit_privately(client, loader, fabric, steps, self.plan.settings.clip, self._key)
        return {}


def fit_privately(
    client: Client, loader: DataLoader, fabric: Fabric, steps: Steps, clip: float, key: bytes
) -> None:
    """Trains a client for E epochs of DP-SGD.

    A turn that is played again has the same draws and noise: both follow from the secret, round and client alone.

    Args:
        client: The live client.
        loader: Its training batches, of which images and how they are read are taken.
        fabric: Moves batches and sets precision.
        steps: Share of the images in a step, number of steps and noise.
        clip: Largest norm of an image's gradient.
        key: The secret.

    Raises:
        UserError: If gradients are scaled, or the loss is not finite.
    """
    from opacus.optimizers import DPOptimizer

    if getattr(fabric.strategy.precision, "scaler", None) is not None:
        raise UserError("federation/privacy=dp_sgd: give fabric.precision=32-true or bf16-mixed")
    task, images = client.task, len(loader.dataset)  # type: ignore[arg-type]
    draw, noise = (_generator(key, client.context, what, fabric.device) for what in ("draw", "noise"))
    configured = client.configure_optimizers()
    if client.optimizer_state is not None:
        resume_optimizer(configured, client.optimizer_state)
    task.train()
    with _gradients_by_image(task):
        optimizer = DPOptimizer(
            configured,
            noise_multiplier=steps.noise,
            max_grad_norm=clip,
            expected_batch_size=steps.share * images,  # type: ignore[arg-type]
            generator=noise,
        )
        client.on_train_start()
        for _ in range(client.local_epochs):
            client.on_train_epoch_start()
            drawn = [_places(images, steps.share, draw) for _ in range(steps.number)]
            batches = iter(_loader(loader, [places for places in drawn if places]))
            for index, places in enumerate(drawn):
                optimizer.zero_grad()
                if places:
                    with fabric.autocast():
                        loss = client.training_step(fabric.to_device(next(batches)), index)["loss"]
                    if not torch.isfinite(loss):
                        raise UserError(
                            "the loss is not finite: training has diverged; lower the learning rate"
                        )
                    loss.backward()
                else:  # noise alone
                    for parameter in optimizer.params:
                        parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
                optimizer.step()
        client.on_train_end()
    task.eval()
    if client.keep_optimizer:
        client.optimizer_state = configured.state_dict()


@contextmanager
def _gradients_by_image(task: nn.Module) -> Iterator[None]:
    """Has backward passes keep every image's gradient, and leaves nothing of that behind."""
    from opacus.grad_sample import GradSampleModule

    hooks = GradSampleModule(task)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # images need no gradient
            yield
    finally:
        hooks.to_standard_module()
        for parameter in task.parameters():
            parameter.__dict__.pop("grad_sample", None)
            parameter.__dict__.pop("summed_grad", None)


def _places(images: int, share: float, draw: torch.Generator) -> list[int]:
    """Draws each image with the same probability."""
    chosen = torch.rand(images, generator=draw, device=draw.device) < share
    return chosen.nonzero()[:, 0].tolist()


def _loader(loader: DataLoader, batches: list[list[int]]) -> DataLoader:
    return DataLoader(
        loader.dataset, batch_sampler=batches, collate_fn=loader.collate_fn, generator=torch.Generator()
    )


def _generator(key: bytes, context: Context, what: str, device: Any) -> torch.Generator:
    place = f"{what}/{context.round}/{context.exchange}/{context.client}".encode()
    seed = int.from_bytes(blake2b(place, key=key, digest_size=8).digest(), "big")
    return torch.Generator(device).manual_seed(seed)
