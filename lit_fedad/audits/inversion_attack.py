"""Attacks by inversion: what a client sends once more, and the search for images that explain it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from lit_fedad.audits.reconstruction import (
    Inversion,
    as_sets,
    by_position,
    invert_features,
    invert_gradients,
)
from lit_fedad.audits.statistics import evidence_of, receive
from lit_fedad.contracts import Context, Message
from lit_fedad.contracts.evidence import Invertible, SentBank, SentImages, SentWeights
from lit_fedad.contracts.randomness import generator
from lit_fedad.contracts.state import detached, load_state
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import Batch
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.sample import ImageSet
from lit_fedad.experiment.finished_run import FinishedRun

Progress = Callable[[int, int], None]

Target = Literal["images", "memory", "weights"]

SEARCH: dict[Target, tuple[str, ...]] = {
    "images": (),
    "memory": ("images", "steps", "restarts", "seed", "knowledge"),
    "weights": ("images", "steps", "restarts", "seed"),
}
"""Options that the search depends on, by what is attacked."""


@dataclass(frozen=True)
class InversionOptions:
    """Options of ``lit-fedad privacy attack=inversion``.

    Attributes:
        client: Attacked client; None for the first.
        control: Client that it is compared with; None for the next one.
        images: How many images are sought; the best 16 at most are shown.
        steps: Steps of the search.
        restarts: How often the search begins anew; the one of the lowest loss counts.
        seed: Seed of what the search starts from.
        knowledge: With which head features are generated when a memory bank is attacked: ``shared``, the one that all
            clients began with, or ``own``, the client's own trained one, which never leaves it: the worst case.

    Raises:
        UserError: If ``images``, ``steps`` or ``restarts`` is less than 1.
    """

    client: int | None = None
    control: int | None = None
    images: int = 4
    steps: int = 500
    restarts: int = 1
    seed: int = 0
    knowledge: Literal["shared", "own"] = "shared"

    def __post_init__(self) -> None:
        if min(self.images, self.steps, self.restarts) < 1:
            raise UserError(
                f"images={self.images} steps={self.steps} restarts={self.restarts} must be at least 1"
            )


_TARGETS: dict[type[Invertible], Target] = {
    SentImages: "images",
    SentBank: "memory",
    SentWeights: "weights",
}


@dataclass(frozen=True)
class Attack:
    """One attack, the same on any client.

    Attributes:
        run: The attacked run.
        target: What is attacked.
        shared: The attacked part of the message, as the method declares it invertible.
        round: The exchange that is played once more.
        client: The attacked client.
        control: The client that it is compared with.
        options: How it is attacked.
    """

    run: FinishedRun
    target: Target
    shared: Invertible
    round: int
    client: int
    control: int
    options: InversionOptions

    @classmethod
    def of(cls, run: FinishedRun, options: InversionOptions) -> Attack:
        """Chooses what is attacked, the client and its control.

        Raises:
            UserError: If there is no such client, or an option does not fit what the method shares.
        """
        shared, round = _shared(run)
        target = _TARGETS[type(shared)]
        allowed = dict.fromkeys(("client", "control", "images", *SEARCH[target]))
        for field in fields(options):
            value = getattr(options, field.name)
            if field.name not in allowed and value != field.default:
                raise UserError(
                    f"{field.name}={value}: attack=inversion of {target} has no such option, only {', '.join(allowed)}"
                )
        clients = run.federation.clients
        client = clients[0] if options.client is None else options.client
        others = [c for c in clients if c > client] + [c for c in clients if c < client]
        if not others:
            raise UserError(f"{run.folder.path}: one client alone holds images; no other can be the control")
        control = others[0] if options.control is None else options.control
        for key, number in (("client", client), ("control", control)):
            if number not in clients:
                raise UserError(f"{key}={number}: the run has clients {', '.join(map(str, clients))}")
        if control == client:
            raise UserError(f"control={control} must be another client than the one attacked")
        return cls(run, target, shared, round, client, control, options)

    @property
    def described(self) -> dict[str, Any]:
        """The attack, as the report states it."""
        return {
            "attacked": self.target,
            "exchange": self.round,
            "client": self.client,
            "control": self.control,
            **{key: getattr(self.options, key) for key in SEARCH[self.target]},
        }

    def __call__(self, number: int) -> Inversion:
        """Attacks a client's upload."""
        shared = self.shared
        if isinstance(shared, SentImages):
            return self._take_images(shared, number)
        with self.run.display.progress(f"Inversion of client {number}") as progress:
            if isinstance(shared, SentBank):
                return self._invert_memory(shared, number, progress)
            return self._invert_weights(number, progress)

    def _take_images(self, shared: SentImages, number: int) -> Inversion:
        images = shared.images(self._send(number))
        if not len(images):
            raise UserError(f"client {number} shares no image; choose others by client=N and control=N")
        return Inversion(images, [])

    def _invert_memory(self, shared: SentBank, number: int, progress: Progress) -> Inversion:
        received, sent = self._enter(number), self._send(number)
        bank = shared.vectors(received, sent)
        if self.options.knowledge == "shared":
            # Personal states are those that all clients began with, possibly from another run (`start`).
            load_state(self.run.federation.client, detached(self.run.federation.pool.initial))
        return self.search_features(bank, shared.ordered, self.options.images, progress)

    @property
    def weights(self) -> SentWeights:
        """The weights that are attacked."""
        assert isinstance(self.shared, SentWeights)
        return self.shared

    @property
    def bank(self) -> SentBank:
        """The bank that is attacked."""
        assert isinstance(self.shared, SentBank)
        return self.shared

    def search_features(self, target: Tensor, ordered: bool, images: int, progress: Progress) -> Inversion:
        """Searches images whose generated features are a target.

        Args:
            target: Features [P, C] of each image, or a bank [slots, C] of all.
            ordered: Whether they are matched position by position, or as sets.
            images: Number of images that are sought.
            progress: Called with the number of steps done and of all.
        """
        return self._best(
            lambda source: invert_features(
                self.encode,
                target.to(self.run.model.task.device),
                self._shape(images),
                source,
                self.options.steps,
                discrepancy=by_position if ordered else as_sets,
                on_step=progress,
            )
        )

    def encode(self, images: Tensor) -> Tensor:
        """Computes the features of images in [0, 1], differentiably."""
        return self.bank.encode(self._normalise()(images).contiguous(memory_format=torch.channels_last))

    def _best(self, search: Callable[[torch.Generator], Inversion]) -> Inversion:
        """Searches as often as `restarts` says, and returns the result with the lowest last loss."""
        starts = (
            generator(self.options.seed, "inversion", restart) for restart in range(self.options.restarts)
        )
        return min(map(search, starts), key=lambda attempt: attempt.losses[-1])

    def _invert_weights(self, number: int, progress: Progress) -> Inversion:
        """Inverts the update of a whole round, as the run would play it, with labels unknown."""
        sent = self._send(number)
        trained = self._trained(self._enter(number).keys() & sent.keys())
        # The update counts from the weights with which the client begins: its own ones, where it is sent those of all
        # clients.
        update = [sent[name].to(weight) - weight.detach() for name, weight in trained.items()]
        self.weights.settle()  # gradients are taken at these
        return self._search_gradient(trained, update, None, self.options.images, progress)

    def invert_one_gradient(self, position: int, progress: Progress) -> Inversion:
        """Inverts the plain gradient of one image of the attacked client, whose class is known.

        Args:
            position: Its position among the client's images.
            progress: Called with the number of steps done and of all.
        """
        task, run = self.run.model.task, self.run
        trained = self._trained(self._enter(self.client).keys())
        self.weights.settle()  # gradients are taken at these
        index = run.data.partition.clients[self.client][position]
        batch: Batch = run.fabric.to_device(next(iter(run.data.module.normal_loader([index]))))
        loss = task.objective(task(batch), batch)["loss"]
        update = [-gradient for gradient in torch.autograd.grad(loss, list(trained.values()))]
        return self._search_gradient(trained, update, batch["label"], 1, progress)

    def _trained(self, names: Collection[str]) -> dict[str, Parameter]:
        """Lists known weights that logits depend on, unlike MOON's projection; sets the task to training mode."""
        task = self.run.model.task.train()  # batch normalisation uses the statistics of the batch
        named = {name: weight for name, weight in task.named_parameters() if name in names}
        logits = self.weights.logits(self._normalise()(torch.zeros(self._shape(2), device=task.device)))
        slopes = torch.autograd.grad(logits.sum(), list(named.values()), allow_unused=True)
        return {name: named[name] for name, slope in zip(named, slopes, strict=True) if slope is not None}

    def _search_gradient(
        self,
        trained: dict[str, Parameter],
        update: list[Tensor],
        labels: Tensor | None,
        images: int,
        progress: Progress,
    ) -> Inversion:
        shared, normalise = self.weights, self._normalise()
        return self._best(
            lambda source: invert_gradients(
                lambda pixels: shared.logits(normalise(pixels)),
                list(trained.values()),
                update,
                self._shape(images),
                source,
                shared.classes,
                labels,
                self.options.steps,
                on_step=progress,
            )
        )

    def _enter(self, number: int) -> Message:
        """Turns the live model into the client that the server's message has just reached; returns the message."""
        federation = self.run.federation
        federation.server.context = context = self._context(number)
        return receive(federation, number, context.stage, federation.pool.get(number))

    def _send(self, number: int) -> Message:
        """Plays the exchange with a client; returns what it sends, as the server sees it."""
        federation, context = self.run.federation, self._context(number)
        exchange = federation.exchanges.at(context)
        self._enter(number)
        result = federation.runner.play(exchange, federation.data.at(federation.rounds))
        return federation.channel.up.unpack(
            result.blob, exchange.upload_spec(federation.client), f"client {number}"
        )

    def _context(self, number: int) -> Context:
        federation = self.run.federation
        stage = federation.data.at(federation.rounds).stages[number]
        return Context(federation.seed, self.round, number, stage=stage)

    def _shape(self, images: int) -> tuple[int, ...]:
        return (images, *private_images(self.run, self.client, 1).shape[1:])

    def _normalise(self) -> Callable[[Tensor], Tensor]:
        mean, std = (values.to(self.run.fabric.device) for values in channel_statistics(self.run))
        return lambda pixels: (pixels - mean) / std


def _shared(run: FinishedRun) -> tuple[Invertible, int]:
    """Finds what clients share that can be inverted, and when: in the next round, else last before round 1."""
    federation, evidence = run.federation, evidence_of(run.federation)
    client, exchanges = federation.client, federation.exchanges
    for round in (federation.rounds + 1, *range(0, exchanges.first_round - 1, -1)):
        exchange = exchanges.of_round(round)[0]
        invertible = evidence.invertible(
            client, exchange.broadcast_spec(client), exchange.upload_spec(client)
        )
        if invertible is not None:
            return invertible, round
    raise UserError(
        f"attack=inversion: method {run.result['method']} with task {run.result['task']} shares no images, no"
        " memory bank and no weights of a classifier"
    )


def private_images(run: FinishedRun, number: int, at_most: int | None = None) -> Tensor:
    """Reads a client's training images in [0, 1] [n, ch, H, W], as its task sees them."""
    return pixels(run, run.data.partition.clients[number][:at_most])


def pixels(run: FinishedRun, positions: Sequence[int]) -> Tensor:
    """Reads training images in [0, 1] [n, ch, H, W], as the run's task sees them."""
    images = run.data.images
    if isinstance(images, LabelledSet):
        return images.train_images[list(positions)] / 255
    mean, std = channel_statistics(run)
    paths = [images.train[index].path for index in positions]
    return (torch.stack([run.data.transform.image(path) for path in paths]) * std + mean).clamp(0, 1)


def channel_statistics(run: FinishedRun) -> tuple[Tensor, Tensor]:
    """Finds the mean and deviation that images are normalised by, each [ch, 1, 1]."""
    images = run.data.images
    source = run.data.transform if isinstance(images, ImageSet) else images
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return mean, std
