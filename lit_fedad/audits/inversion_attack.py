"""Attacks by inversion: what a client sends once more, and the search for images that explain it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lit_fedad.audits.decoder import Batches, Decoder, drawn_from, drawn_scenes, train_decoder
from lit_fedad.audits.inversion_options import SEARCH, InversionOptions, Target
from lit_fedad.audits.reconstruction import (
    Inversion,
    as_sets,
    by_position,
    invert_features,
    invert_gradients,
)
from lit_fedad.audits.statistics import own_part
from lit_fedad.contracts import Context, Message
from lit_fedad.contracts.randomness import generator
from lit_fedad.core.errors import UserError
from lit_fedad.data.arrays import read_images, resized
from lit_fedad.data.datamodule import Batch
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.public import natural, refuse_overlap
from lit_fedad.data.sample import ImageSet
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.finished_run import FinishedRun
from lit_fedad.memory.reduce import PositionReduce
from lit_fedad.methods.feddymem import FedDyMemClient
from lit_fedad.tasks.classifier import Classifier
from lit_fedad.tasks.memory_bank import MemoryBank

Progress = Callable[[int, int], None]

_MOST_PUBLIC = 10_000
"""Images that a decoder is trained on at most, of those that are given."""


@dataclass(frozen=True)
class Attack:
    """One attack, the same on any client.

    Attributes:
        run: The attacked run.
        target: What is attacked.
        round: The exchange that is played once more.
        client: The attacked client.
        control: The client that it is compared with.
        options: How it is attacked.
    """

    run: FinishedRun
    target: Target
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
        target, round = _shared(run)
        known = dict.fromkeys(("client", "control", "images", *SEARCH[target]))
        for field in fields(options):
            value = getattr(options, field.name)
            if field.name not in known and value != field.default:
                raise UserError(
                    f"{field.name}={value}: attack=inversion of {target} has no such option, only {', '.join(known)}"
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
        return cls(run, target, round, client, control, options)

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
        display = self.run.display
        if self.target == "images":
            return self._take_images(number)
        with display.progress(f"Inversion of client {number}") as progress:
            return (self._invert_memory if self.target == "memory" else self._invert_weights)(
                number, progress
            )

    def _take_images(self, number: int) -> Inversion:
        images = self._send(number)["images"]
        if not len(images):
            raise UserError(f"client {number} shares no image; choose others by client=N and control=N")
        return Inversion(images / 255 if images.dtype == torch.uint8 else images.clamp(0, 1), [])

    def _invert_memory(self, number: int, progress: Progress) -> Inversion:
        task = self.run.model.task
        assert isinstance(task, MemoryBank)
        if self.options.by == "decoder" and not self.ordered:
            raise UserError(
                "by=decoder needs a bank that keeps positions, as task.reduce=PositionReduce makes it, and this one has"
                " no order; give by=search"
            )
        known, sent = self._enter(number), self._send(number)
        bank = own_part(task, known, sent, self.round)
        if self.options.knowledge == "shared":
            # The weights that all began with, be it with those of another run (`start`).
            first = build_model(self.run.config, self.run.result["partition"]["products"]).task
            assert isinstance(first, MemoryBank)
            task.head = first.head if first.head is None else first.head.to(task.device)
        return self.search_features(bank, self.ordered, self.options.images, progress)

    @property
    def ordered(self) -> bool:
        """Whether the bank that is attacked keeps positions."""
        client, task = self.run.federation.client, self.run.model.task
        kept = isinstance(task, MemoryBank) and isinstance(task.reduce, PositionReduce)
        return kept and isinstance(client, FedDyMemClient)

    @cached_property
    def decoder(self) -> tuple[Decoder, list[float]]:
        """Trains a decoder of the features that all share, at its first use; with the loss of each step."""
        task, size = self.run.model.task, self._shape(1)[2:]
        assert isinstance(task, MemoryBank)
        public = self._public((size[0], size[1]))
        with self.run.display.progress("Decoder") as progress:
            return train_decoder(
                self.encode,
                task.grid,
                (size[0], size[1]),
                self.options.steps,
                self.options.seed,
                public,
                progress,
            )

    def _public(self, size: tuple[int, int]) -> Batches:
        """Reads what a decoder is trained on, none of it a client's."""
        if self.options.public is None:
            return drawn_scenes(size, self.options.seed)
        images = natural(self.options.public, max(size), _MOST_PUBLIC, self.options.seed)
        held = self.run.data.images
        if isinstance(held, ImageSet):
            own = read_images([sample.path for sample in held.train], max(size))
        else:
            own = resized(held.train_images, max(size), max(size))
        refuse_overlap(images, own, f"the training images of {held.name}")
        return drawn_from(images, size, self.options.seed)

    def search_features(self, target: Tensor, ordered: bool, images: int, progress: Progress) -> Inversion:
        """Searches images whose generated features are a target, or decodes the one image of an ordered one.

        Args:
            target: Features [P, C] of each image, or a bank [slots, C] of all.
            ordered: Whether they are matched position by position, or as sets.
            images: Number of images that are sought.
            progress: Called with the number of steps done and of all.
        """
        if self.options.by == "decoder" and ordered:
            decoder, losses = self.decoder
            with torch.no_grad():
                return Inversion(decoder(target.to(decoder.mean)[None]).cpu(), losses)
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

    def encode(self, shown: Tensor) -> Tensor:
        """Computes the features of images in [0, 1], differentiably."""
        task, normalise = self.run.model.task, self._normalise()
        # The layers themselves: as a whole, the frozen backbone gives no gradients.
        images = normalise(shown).contiguous(memory_format=torch.channels_last)
        return task({"pyramid": task.backbone.features(images)})  # type: ignore[union-attr,operator]

    def _best(self, search: Callable[[torch.Generator], Inversion]) -> Inversion:
        """Searches as often as `restarts` says, and returns what has the lowest loss at its end."""
        starts = (generator(self.options.seed, "inversion", again) for again in range(self.options.restarts))
        return min(map(search, starts), key=lambda found: found.losses[-1])

    def _invert_weights(self, number: int, progress: Progress) -> Inversion:
        task, labels = self.run.model.task, None
        assert isinstance(task, Classifier)
        sent = self._send(number) if self.options.update == "round" else dict(task.named_parameters())
        known = self._enter(number)
        task.train()  # its normalisation goes by the batch
        trained = {n: p for n, p in task.named_parameters() if n in known and n in sent}
        if self.options.update == "round":
            update = [(sent[name] - known[name]).to(task.device) for name in trained]
        else:
            update, labels = self._gradient(trained, self._some_images(number))
        return self._search_gradient(trained, update, labels, self.options.images, progress)

    def invert_one_gradient(self, place: int, progress: Progress) -> Inversion:
        """Inverts the plain gradient of one image of the attacked client, whose class is known.

        Args:
            place: Its position among the client's images.
            progress: Called with the number of steps done and of all.
        """
        task, known = self.run.model.task, self._enter(self.client)
        task.train()
        trained = {name: p for name, p in task.named_parameters() if name in known}
        index = self.run.data.partition.clients[self.client][place]
        update, labels = self._gradient(trained, self._images([index]))
        return self._search_gradient(trained, update, labels, 1, progress)

    def _gradient(self, trained: dict[str, Parameter], batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Computes the negative gradient of a batch's loss, and returns it with the batch's classes."""
        task = self.run.model.task
        loss = task.objective(task(batch), batch)["loss"]
        return [-gradient for gradient in torch.autograd.grad(loss, list(trained.values()))], batch["label"]

    def _search_gradient(
        self,
        trained: dict[str, Parameter],
        update: list[Tensor],
        labels: Tensor | None,
        images: int,
        progress: Progress,
    ) -> Inversion:
        task, normalise = self.run.model.task, self._normalise()
        assert isinstance(task, Classifier)
        return self._best(
            lambda source: invert_gradients(
                lambda pixels: task.classifier(task({"image": normalise(pixels)})),
                list(trained.values()),
                update,
                self._shape(images),
                source,
                task.classes,
                labels,
                self.options.steps,
                on_step=progress,
            )
        )

    def _some_images(self, number: int) -> Batch:
        """Draws as many of a client's images as are sought."""
        held = torch.tensor(self.run.data.partition.clients[number])
        if self.options.images > len(held):
            raise UserError(
                f"images={self.options.images}, but client {number} holds {len(held)}; give no more"
            )
        order = torch.randperm(len(held), generator=generator(self.options.seed, "images", client=number))
        return self._images(held[order[: self.options.images]].tolist())

    def _images(self, positions: list[int]) -> Batch:
        batch: Batch = self.run.data.module.train.__getitems__(positions)  # type: ignore[attr-defined]
        return self.run.fabric.to_device(batch)

    def _enter(self, number: int) -> Message:
        """Turns the live model into the client that the server's message has just reached; returns the message."""
        federation, context = self.run.federation, self._context(number)
        exchange, link = federation.exchanges.at(context), federation.channel.down
        federation.server.begin(context)
        message, spec = (
            exchange.broadcast(federation.server, number),
            exchange.broadcast_spec(federation.client),
        )
        blob = link.pack(message, spec, context, "the server")
        return federation.runner.activate(exchange, context, federation.pool.get(number), blob)

    def _send(self, number: int) -> Message:
        """Plays a client's turn; returns what it sends, as the server sees it."""
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
        mean, std = (values.to(self.run.fabric.device) for values in _channel_statistics(self.run))
        return lambda pixels: (pixels - mean) / std


def _shared(run: FinishedRun) -> tuple[Target, int]:
    """Finds what clients share that can be inverted, and when: in the next round, else last before round 1."""
    federation, task = run.federation, run.model.task
    client, exchanges, weights = federation.client, federation.exchanges, dict(task.named_parameters())
    for round in (federation.rounds + 1, *range(0, exchanges.first_round - 1, -1)):
        exchange = exchanges.of_round(round)[0]
        sent, received = set(exchange.upload_spec(client)), exchange.broadcast_spec(client).keys()
        if "images" in sent:
            return "images", round
        if "memory" in sent and isinstance(task, MemoryBank):
            return "memory", round
        if isinstance(task, Classifier) and not sent.isdisjoint(weights.keys() & received):
            return "weights", round
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
    mean, std = _channel_statistics(run)
    paths = [images.train[index].path for index in positions]
    return (torch.stack([run.data.transform.image(path) for path in paths]) * std + mean).clamp(0, 1)


def _channel_statistics(run: FinishedRun) -> tuple[Tensor, Tensor]:
    """Finds the mean and deviation that images are normalised by, each [ch, 1, 1]."""
    images = run.data.images
    source = run.data.transform if isinstance(images, ImageSet) else images
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return mean, std
