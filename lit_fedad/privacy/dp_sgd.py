"""Differential privacy of training: what noise each client's steps need, and what of its budget is spent."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Context, Exchange, Exchanges, Method, Sums
from lit_fedad.contracts.randomness import seeded
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import ANEW, UserError
from lit_fedad.core.extras import require
from lit_fedad.federation.client_runner import Train, resume_optimizer
from lit_fedad.privacy.image_privacy import Course, terms
from lit_fedad.privacy.noised_sums import secret_generator
from lit_fedad.privacy.secure_aggregation import sending

_HOOKS = ("training_step", "on_train_epoch_start", "on_before_optimizer_step")
"""By which a client would change what is trained, or the gradients."""


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
        sums: How weights add up.
    """

    def __init__(self, plan: TrainingPlan, key: bytes, sums: Sums | None) -> None:
        super().__init__(sums)
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

    An exchange that is played again has the same draws and noise: both follow from the secret, round and client alone.

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
    draw, noise = (_generator(key, client.context, what) for what in ("draw", "noise"))
    batch = steps.share * images
    deviation = steps.noise * clip / batch

    def add_noise(optimizer: DPOptimizer) -> None:
        for parameter in optimizer.params:
            drawn = torch.from_numpy(deviation * noise.standard_normal(tuple(parameter.shape)))
            parameter.grad = (parameter.grad.cpu() + drawn).to(parameter.grad)

    configured = client.optimizer_of_round()
    if client.optimizer_state is not None:
        resume_optimizer(configured, client.optimizer_state)
    task.train()
    # Views and dropout are secret too: they change for all images of a step where one comes or goes.
    views = _generator(key, client.context, "views").integers(1 << 63)
    with _gradients_by_image(task), seeded(int(views), "views"):
        # Opacus shortens gradients; torch's generator on the CPU has 2^32 seeds, and whoever tries all finds its noise.
        optimizer = DPOptimizer(
            configured,
            noise_multiplier=0.0,
            max_grad_norm=clip,
            expected_batch_size=batch,  # type: ignore[arg-type]
        )
        optimizer.attach_step_hook(add_noise)
        client.on_train_start()
        for _ in range(client.local_epochs):
            client.on_train_epoch_start()
            # Each step draws each image with the same probability.
            drawn = [(draw.random(images) < steps.share).nonzero()[0].tolist() for _ in range(steps.number)]
            batches = iter(
                DataLoader(
                    loader.dataset,
                    batch_sampler=[places for places in drawn if places],
                    collate_fn=loader.collate_fn,
                    generator=torch.Generator(),
                )
            )
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
                    # By their lengths in bfloat16 some would be shortened too little.
                    for parameter in optimizer.params:
                        parameter.grad_sample = parameter.grad_sample.to(parameter.dtype)
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

    inplace = [module for module in task.modules() if getattr(module, "inplace", False)]
    for module in inplace:  # which would write over what Opacus looks at
        module.inplace = False  # type: ignore[assignment]
    hooks = GradSampleModule(task)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # images need no gradient
            yield
    finally:
        hooks.to_standard_module()
        for module in inplace:
            module.inplace = True  # type: ignore[assignment]
        for parameter in task.parameters():
            parameter.__dict__.pop("grad_sample", None)
            parameter.__dict__.pop("summed_grad", None)


def _generator(key: bytes, context: Context, what: str) -> np.random.Generator:
    return secret_generator(key, what, context.round, context.exchange, context.client)


@dataclass(frozen=True)
class TrainingPrivacy:
    """The settings of differentially private training, at the level of an image.

    Neighbouring data differ in one image of one client, which is there or not.

    Attributes:
        epsilon: Budget of each client over the whole run; None for infinity, which is a run without clipping and noise.
        delta: Probability with which the promise may fail.
        clip: Largest norm C of an image's gradient.
        batch_size: Images that a step has on average.
        seed: Seed of noise and draws, for experiments that are to be repeated: whoever knows it can take the noise
            away. None for a secret of the run.

    Raises:
        UserError: If a number is out of range.
    """

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float = 1.0
    batch_size: int = 32
    seed: int | None = None

    def __post_init__(self) -> None:
        section = "federation.privacy"
        above(section, 0, epsilon=self.epsilon, delta=self.delta, clip=self.clip)
        within(section, 0, 0.1, delta=self.delta)
        at_least(section, 1, batch_size=self.batch_size)

    def plan(self, method: Method, course: Course) -> TrainingPlan:
        """Plans the noise of each client's steps, before anything runs.

        Args:
            method: The method.
            course: The run; a client counts as if it trained in all rounds.

        Raises:
            UserError: If Opacus is missing, more is sent than weights that were trained image by image, or no noise is
                large enough for the budget.
        """
        require("dp", "federation/privacy=dp_sgd")
        from opacus.grad_sample import GradSampleModule
        from opacus.validators import ModuleValidator

        course.check_stages()
        client, exchanges = method.client, sending(method)
        weights = dict(client.task.named_parameters())
        usual = all(getattr(type(client), hook) is getattr(Client, hook) for hook in _HOOKS)
        sent = {name for exchange in exchanges for name in exchange.upload_spec(client)}
        plain = usual and client.task.kind == "classification" and sent <= client.task.state_dict().keys()
        if not (plain and exchanges and all(type(e) is Train for e in exchanges)):
            raise UserError(
                f"federation/privacy=dp_sgd: {type(client).__name__} with task {type(client.task).__name__} sends more"
                " than weights that are trained by a sum over single images; give method=fedavg with a classifier"
            )
        buffers = sorted(sent - weights.keys())
        faults = [f"it shares {buffers[0]}"] if buffers else []
        client.task.train()  # as which Opacus judges it
        faults += [str(fault).split(". ")[0] for fault in ModuleValidator.validate(client.task, strict=False)]
        # Opacus looks at no layer without weights that are trained, as of a norm that scales nothing.
        norms = any(isinstance(layer, _BatchNorm) and layer.training for layer in client.task.modules())
        if norms or GradSampleModule.validate(client.task, strict=False):
            faults.append("a layer keeps statistics of batches")
        client.task.eval()
        if faults:
            raise UserError(
                "federation/privacy=dp_sgd: the model looks at several images at once"
                f" ({faults[0]}); give encoder=convnet encoder.norm=instance, or features=frozen"
            )
        plan = TrainingPlan(self, dict(course.sizes), client.local_epochs, course.rounds)
        for images in set(plan.sizes.values()):
            plan.steps(images)  # of which none may have a budget that no noise keeps
        return plan


@dataclass(frozen=True)
class TrainingPlan:
    """The noise of a run's training.

    Attributes:
        settings: The settings.
        sizes: Images of each client.
        epochs: Epochs a round.
        releases: Rounds in which a client trains.
    """

    settings: TrainingPrivacy
    sizes: Mapping[int, int]
    epochs: int
    releases: int

    def steps(self, images: int) -> Steps:
        """Computes the steps of a client with so many images, and the least noise that its budget asks for."""
        settings = self.settings
        share, number = min(1.0, settings.batch_size / images), math.ceil(images / settings.batch_size)
        assert settings.epsilon is not None
        noise = _noise(settings.epsilon, settings.delta, share, number * self.epochs * self.releases)
        return Steps(share, number, noise)

    def epsilon(self, releases: int) -> float:
        """Computes what so many rounds cost: the largest epsilon of a client."""
        found = [self.steps(images) for images in set(self.sizes.values())]
        delta = self.settings.delta
        return max(_spent(one.noise, one.share, one.number * self.epochs * releases, delta) for one in found)

    def check(self, releases: int, what: str) -> None:
        """Refuses what would overdraw the budget.

        Raises:
            UserError: If their epsilon exceeds the budget.
        """
        if releases > self.releases:
            raise UserError(
                f"federation.privacy: {what} would be number {releases} of a client's rounds of training, and the noise"
                f" was made for {self.releases}; {ANEW}"
            )

    def released_in(self, exchanges: Sequence[Exchange], client: Client) -> int:
        """Counts the exchanges in which clients train."""
        return sum(isinstance(exchange, TrainPrivately) for exchange in exchanges)

    def noised(self, method: Method, key: bytes) -> Exchanges:
        """Puts private training in the place of training."""
        rounds = tuple(
            TrainPrivately(self, key, one.sums) if type(one) is Train else one
            for one in method.exchanges.rounds
        )
        return replace(method.exchanges, rounds=rounds)

    def summary(self, releases: int) -> dict[str, float | int | str | bool]:
        """Describes what a run has spent, for its result."""
        noise = max(self.steps(images).noise for images in self.sizes.values())
        spent = {"epsilon": self.epsilon(releases) if releases else 0.0, "noise": noise, "sums": releases}
        where = {"unit": "image", "where": "every step's", "of": "rounds of DP-SGD"}
        return terms(self.settings) | spent | where


@lru_cache(maxsize=4096)
def _noise(epsilon: float, delta: float, share: float, steps: int) -> float:
    """Computes the least noise multiplier of so many steps, by Renyi differential privacy.

    Raises:
        UserError: If none is large enough: Renyi's bound has a least epsilon, whatever the noise.
    """
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # orders at the end of their list bound less tightly: never too small
        try:
            return float(
                get_noise_multiplier(
                    target_epsilon=epsilon,
                    target_delta=delta,
                    sample_rate=share,
                    steps=steps,
                    accountant="rdp",
                    epsilon_tolerance=0.001 * epsilon,
                )
            )
        except ValueError as error:
            raise UserError(
                f"federation.privacy.epsilon={epsilon:g}: no noise is known to keep it at delta={delta:g}; give larger"
                " ones"
            ) from error


@lru_cache(maxsize=4096)
def _spent(noise: float, share: float, steps: int, delta: float) -> float:
    """Computes the epsilon of so many steps."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(noise, share, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta))
