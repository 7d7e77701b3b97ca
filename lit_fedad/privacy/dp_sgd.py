"""Differentially private training (DP-SGD): the noise that each client's steps need, and the budget that is spent."""

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
from lit_fedad.federation.client_runner import Train, begun_optimizer
from lit_fedad.privacy.image_privacy import Course, terms
from lit_fedad.privacy.noised_sums import secret_generator
from lit_fedad.privacy.secure_aggregation import sending

_HOOKS = ("training_step", "on_train_epoch_start", "on_before_optimizer_step")
"""Hooks by which a client could change the training step or the gradients; private training allows none of them."""


@dataclass(frozen=True)
class Steps:
    """The steps that a client trains in a round.

    Attributes:
        share: Probability q with which a step samples each image.
        number: Number of steps in an epoch.
        noise: Noise multiplier sigma.
    """

    share: float
    number: int
    noise: float


class TrainPrivately(Train):
    """The exchange in which clients train by DP-SGD; they report only weights, and no losses.

    Args:
        plan: The noise of each client's steps.
        key: The secret from which sampling and noise are derived; empty where nothing is trained.
        sums: How weights add up.
    """

    def __init__(self, plan: TrainingPlan, key: bytes, sums: Sums | None) -> None:
        super().__init__(sums)
        self.plan, self._key = plan, key

    def train(self, client: Client, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains the client by `fit_privately`; returns no losses, because they would reveal its images."""
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

    An exchange that is played again samples the same images and draws the same noise: both depend only on the secret,
    the round and exchange, and the client.

    Args:
        client: The live client.
        loader: Its training batches; only the data set and the collate function are used.
        fabric: Moves batches to the device and sets the precision.
        steps: Share of the images in a step, number of steps and noise.
        clip: Largest norm of an image's gradient.
        key: The secret from which sampling and noise are derived.

    Raises:
        UserError: If gradients are scaled, or the loss is not finite.
    """
    from opacus.optimizers import DPOptimizer

    if getattr(fabric.strategy.precision, "scaler", None) is not None:
        raise UserError("federation/privacy=dp_sgd: give fabric.precision=32-true or bf16-mixed")
    task, images = client.task, len(loader.dataset)  # type: ignore[arg-type]
    draw, noise = (_generator(key, client.context, purpose) for purpose in ("draw", "noise"))
    batch = steps.share * images
    deviation = steps.noise * clip / batch

    def add_noise(optimizer: DPOptimizer) -> None:
        for parameter in optimizer.params:
            drawn = torch.from_numpy(deviation * noise.standard_normal(tuple(parameter.shape)))
            parameter.grad = (parameter.grad.cpu() + drawn).to(parameter.grad)

    configured = begun_optimizer(client)
    task.train()
    # The seed of views and dropout is secret too: one image more or less changes those of all images in its step.
    views = _generator(key, client.context, "views").integers(1 << 63)
    with _gradients_by_image(task), seeded(int(views), "views"):
        # Opacus only clips gradients. Its own noise would come from torch's CPU generator, which has 2^32 seeds: an
        # attacker could try all of them.
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
            # Each step samples each image with the same probability, independently (Poisson sampling).
            drawn = [(draw.random(images) < steps.share).nonzero()[0].tolist() for _ in range(steps.number)]
            batches = iter(
                DataLoader(
                    loader.dataset,
                    batch_sampler=[indices for indices in drawn if indices],
                    collate_fn=loader.collate_fn,
                    generator=torch.Generator(),
                )
            )
            for index, indices in enumerate(drawn):
                optimizer.zero_grad()
                if indices:
                    with fabric.autocast():
                        loss = client.training_step(fabric.to_device(next(batches)), index)["loss"]
                    if not torch.isfinite(loss):
                        raise UserError(
                            "the loss is not finite: training has diverged; lower the learning rate"
                        )
                    loss.backward()
                    # Norms computed in bfloat16 could be too small, and gradients would be clipped too little.
                    for parameter in optimizer.params:
                        parameter.grad_sample = parameter.grad_sample.to(parameter.dtype)
                else:  # a step without images still adds noise
                    for parameter in optimizer.params:
                        parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
                optimizer.step()
        client.on_train_end()
    task.eval()
    if client.keep_optimizer:
        client.optimizer_state = configured.state_dict()


@contextmanager
def _gradients_by_image(task: nn.Module) -> Iterator[None]:
    """Lets backward passes store the gradient of every single image during a block, and removes all traces after it."""
    from opacus.grad_sample import GradSampleModule

    inplace = [module for module in task.modules() if getattr(module, "inplace", False)]
    for module in inplace:  # an in-place layer would overwrite activations that Opacus reads
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


def _generator(key: bytes, context: Context, purpose: str) -> np.random.Generator:
    return secret_generator(key, purpose, context.round, context.exchange, context.client)


@dataclass(frozen=True)
class TrainingPrivacy:
    """The settings of differentially private training, at the level of an image.

    Neighbouring data sets differ in one image of one client, which is present or absent.

    Attributes:
        epsilon: Budget of each client over the whole run; None for infinity, which is a run without clipping and noise.
        delta: Probability with which the guarantee may fail.
        clip: Largest norm C of an image's gradient.
        batch_size: Average number of images in a step.
        seed: Seed of noise and sampling, for experiments that must be repeatable. Anybody who knows it can remove the
            noise. None for a secret of the run.

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
            course: The course of the run; every client is accounted for as if it trained in all rounds.

        Raises:
            UserError: If Opacus is missing, clients send anything but weights that are trained once a round by a sum
                over single images, or no noise is large enough for the budget.
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
        once = [
            one for one in method.exchanges.rounds if type(one) is Train
        ]  # one release and one noise a round
        if not (plain and len(once) == 1 and exchanges == once):
            raise UserError(
                f"federation/privacy=dp_sgd: {type(client).__name__} with task {type(client.task).__name__} sends more"
                " than weights that are trained once a round by a sum over single images; give method=fedavg with a"
                " classifier"
            )
        buffers = sorted(sent - weights.keys())
        faults = [f"it shares {buffers[0]}"] if buffers else []
        client.task.train()  # Opacus validates a model in training mode
        faults += [str(fault).split(". ")[0] for fault in ModuleValidator.validate(client.task, strict=False)]
        # Opacus does not check layers without trained weights, such as a batch norm without scale.
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
            plan.steps(images)  # refuses a budget that no noise can keep
        return plan


@dataclass(frozen=True)
class TrainingPlan:
    """The noise of a run's training.

    Attributes:
        settings: The settings of differential privacy.
        sizes: Number of images of each client.
        epochs: Number of epochs in a round.
        releases: Number of rounds in which a client trains.
    """

    settings: TrainingPrivacy
    sizes: Mapping[int, int]
    epochs: int
    releases: int

    def steps(self, images: int) -> Steps:
        """Computes the steps of a client with so many images, with the smallest noise that its budget allows."""
        settings = self.settings
        share, number = min(1.0, settings.batch_size / images), math.ceil(images / settings.batch_size)
        assert settings.epsilon is not None
        noise = _noise(settings.epsilon, settings.delta, share, number * self.epochs * self.releases)
        return Steps(share, number, noise)

    def epsilon(self, releases: int) -> float:
        """Computes the epsilon of so many rounds: the largest over all clients."""
        steps = [self.steps(images) for images in set(self.sizes.values())]
        delta = self.settings.delta
        return max(_spent(one.noise, one.share, one.number * self.epochs * releases, delta) for one in steps)

    def check(self, releases: int, what: str) -> None:
        """Refuses more rounds of training than the noise was planned for.

        Args:
            releases: Number of rounds in which clients train, with those to come.
            what: What asks for them, for the error message.

        Raises:
            UserError: If there are more rounds than planned.
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
        """Replaces training by private training in the exchanges of a method."""
        rounds = tuple(
            TrainPrivately(self, key, one.sums) if type(one) is Train else one
            for one in method.exchanges.rounds
        )
        return replace(method.exchanges, rounds=rounds)

    def summary(self, releases: int) -> dict[str, float | int | str | bool]:
        """Describes the budget that a run has spent, for its result."""
        noise = max(self.steps(images).noise for images in self.sizes.values())
        spent = {"epsilon": self.epsilon(releases) if releases else 0.0, "noise": noise, "sums": releases}
        where = {"unit": "image", "where": "every step's", "of": "rounds of DP-SGD"}
        return terms(self.settings) | spent | where


@lru_cache(maxsize=4096)
def _noise(epsilon: float, delta: float, share: float, steps: int) -> float:
    """Computes the smallest sufficient noise multiplier for so many steps, by Renyi differential privacy.

    Raises:
        UserError: If no noise is large enough: Renyi's bound cannot give an epsilon below some minimum.
    """
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last order of Opacus's list gives a looser, but valid bound
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
