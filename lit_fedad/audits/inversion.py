"""Which images can be made out in what a client of a finished run sends: reconstruction by inversion.

A client of the run sends once more, in the exchange that would come next. What crosses is attacked as the server could
attack it, and what comes out is judged by the client's own images. Beside it stands the same attack on another client,
judged by the same images: what it reaches is owed to the prior and not to the upload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_fedad.contracts import Context, Message
from lit_fedad.contracts.randomness import generator
from lit_fedad.data.datamodule import Batch
from lit_fedad.data.labelled import LabelledSet
from lit_fedad.data.sample import ImageSet
from lit_fedad.errors import UserError
from lit_fedad.experiment.build import build_model
from lit_fedad.experiment.finished_run import Reopened, reopen
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.memory.reduce import PositionReduce
from lit_fedad.methods.feddymem import FedDyMemClient
from lit_fedad.privacy.inversion import (
    Inversion,
    Matches,
    as_sets,
    by_position,
    closest,
    invert_features,
    invert_gradients,
)
from lit_fedad.report.figures import save_figure
from lit_fedad.report.inversion_sheet import Shown, inversion_sheet
from lit_fedad.tasks.classifier import Classifier
from lit_fedad.tasks.memory_bank import MemoryBank

Target = Literal["images", "memory", "weights"]

_OPTIONS: dict[Target, tuple[str, ...]] = {
    "images": ("client", "control", "images", "seed"),
    "memory": ("client", "control", "images", "seed", "steps", "knowledge"),
    "weights": ("client", "control", "images", "seed", "steps", "update"),
}
_CHOICES = {"knowledge": ("shared", "own"), "update": ("round", "step")}


def invert(run: str, options: Mapping[str, str]) -> None:
    """Attacks what a client sends; writes ``privacy/inversion.json`` and ``figures/inversion.png``.

    What is attacked is what the method shares:

    - ``memory`` (FedDyMem, federated PatchCore): images are sought whose generated features are the bank: position by
      position where the bank keeps positions (`PositionReduce`), as a set where it does not. Of a bank that was moved
      towards the last shared one, the client's own part is taken, which the server can compute.
      ``knowledge=shared`` generates with the head that all clients began with, ``knowledge=own`` with the client's own
      trained one, which never leaves it: the worst case.
    - ``weights`` of a classifier (FedAvg and its kin): the update is inverted as a gradient. ``update=round`` is a
      whole round as the run would play it, with labels unknown; ``update=step`` the classical setting: the
      plain gradient on so many of the client's images, not augmented, with labels known.
    - ``images`` (FedDM, FedVCK): they are judged as they are.

    Args:
        run: MLflow run id, or the run's folder.
        options: ``client`` (by default the first), ``control`` (the next), ``images`` (4: how many are sought and
            shown), ``steps`` (500), ``seed`` (0), ``knowledge``, ``update``; and what differs on this machine, such as
            ``data.root``.

    Raises:
        UserError: If there is no such complete run or client, an option does not fit, or the method shares nothing that
            this attack is about.
    """
    machine = {key: value for key, value in options.items() if "." in key}
    again = reopen(run, machine)
    attack = _Attack.of(again, {key: value for key, value in options.items() if key not in machine})
    private = _private_images(again, attack.client)
    mean = private.mean(0, keepdim=True)
    own, control = attack(attack.client), attack(attack.control)
    rows = {
        f"client {attack.client}": (own.images, closest(own.images, private)),
        f"control (client {attack.control})": (control.images, closest(control.images, private)),
        "mean image": (mean, closest(mean, private)),
    }
    judged = {name: _summary(images, matches, mean) for name, (images, matches) in rows.items()}
    held = again.data.partition.clients[attack.client]
    matches = rows[f"client {attack.client}"][1]
    report = {
        "method": again.result["method"],
        **attack.described,
        "private_images": len(private),
        "judged": judged,
        "closest": [held[index] for index in matches.nearest.tolist()],
        "psnr": matches.psnr.tolist(),
        "ssim": matches.ssim.tolist(),
        "losses": own.losses,
        "control_losses": control.losses,
    }
    path = RunFolder(again.folder.path / "privacy").save_json("inversion.json", report)
    figure = again.folder.path / "figures" / "inversion.png"
    title = f"{again.result['method']}: inversion of the {attack.target} sent by client {attack.client}"
    _draw(list(rows.values())[:2], private, attack, title, figure)
    for key, value in attack.described.items():
        again.display.note(f"{key}: {value}")
    again.display.table([{"": name, **_cells(numbers)} for name, numbers in judged.items()])
    again.display.where_next([("numbers", str(path)), ("images", str(figure))])


@dataclass(frozen=True)
class _Attack:
    """One attack, the same on any client.

    Attributes:
        again: The run.
        target: What is attacked.
        round: The exchange that is played once more.
        client: Whom it is about.
        control: Whom it is compared with.
        images: How many images are sought.
        steps: Steps of the search.
        seed: Of what the search starts from.
        knowledge: Whose head the attacker has.
        update: How much training is behind the update.
    """

    again: Reopened
    target: Target
    round: int
    client: int
    control: int
    images: int
    steps: int
    seed: int
    knowledge: str
    update: str

    @classmethod
    def of(cls, again: Reopened, options: Mapping[str, str]) -> _Attack:
        """Reads the options."""
        target, round = _shared(again)
        for key, value in options.items():
            if key not in _OPTIONS[target]:
                raise UserError(
                    f"attack=inversion of {target} has no key '{key}', only {', '.join(_OPTIONS[target])}"
                )
            if key in _CHOICES and value not in _CHOICES[key]:
                raise UserError(f"{key}={value}: give {' or '.join(_CHOICES[key])}")
            if key not in _CHOICES and not value.isdecimal():
                raise UserError(f"{key}={value} must be a whole number")
        clients = again.federation.clients
        client = int(options.get("client", clients[0]))
        others = [c for c in clients if c > client] + [c for c in clients if c < client]
        if not others:
            raise UserError(
                f"{again.folder.path}: one client alone holds images; no other can be the control"
            )
        control = int(options.get("control", others[0]))
        for key, number in (("client", client), ("control", control)):
            if number not in clients:
                raise UserError(f"{key}={number}: the run has clients {', '.join(map(str, clients))}")
        if control == client:
            raise UserError(f"control={control} must be another client than the one attacked")
        images, steps = int(options.get("images", 4)), int(options.get("steps", 500))
        if min(images, steps) < 1:
            raise UserError(f"images={images} steps={steps} must be at least 1")
        return cls(
            again,
            target,
            round,
            client,
            control,
            images,
            steps,
            int(options.get("seed", 0)),
            options.get("knowledge", "shared"),
            options.get("update", "round"),
        )

    @property
    def described(self) -> dict[str, Any]:
        """What was done."""
        chosen = {"images": {}, "memory": {"knowledge": self.knowledge}, "weights": {"update": self.update}}
        searched = (
            {} if self.target == "images" else {"images": self.images, "steps": self.steps, "seed": self.seed}
        )
        return {
            "attacked": self.target,
            "exchange": self.round,
            "client": self.client,
            "control": self.control,
            **searched,
            **chosen[self.target],
        }

    def __call__(self, number: int) -> Inversion:
        """What the attack makes of a client's upload."""
        display = self.again.display
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

    def _invert_memory(self, number: int, progress: Callable[[int, int], None]) -> Inversion:
        federation, task = self.again.federation, self.again.model.task
        assert isinstance(task, MemoryBank)
        known, bank = self._enter(number), self._send(number)["memory"]
        if "memory" in known:
            # Eq. 16 of FedDyMem undone: m = own / (t + 1) + (1 - 1 / (t + 1)) m'. Slots without patches stay m'.
            moved = (bank != known["memory"]).any(1)
            bank = (known["memory"] + (self.round + 1) * (bank - known["memory"]))[moved]
        if self.knowledge == "shared":
            # The weights that all began with, be it with those of another run (`start`).
            first = build_model(self.again.config, self.again.result["partition"]["products"]).task
            assert isinstance(first, MemoryBank)
            task.head = first.head if first.head is None else first.head.to(task.device)
        ordered = isinstance(federation.client, FedDyMemClient) and isinstance(task.reduce, PositionReduce)
        normalise = self._normalise()

        def encode(pixels: Tensor) -> Tensor:
            # The layers themselves: as a whole, the frozen backbone gives no gradients.
            images = normalise(pixels).contiguous(memory_format=torch.channels_last)
            return task({"pyramid": task.backbone.features(images)})

        return invert_features(
            encode,
            bank.to(task.device),
            self._shape(),
            generator(self.seed, "inversion"),
            self.steps,
            discrepancy=by_position if ordered else as_sets,
            on_step=progress,
        )

    def _invert_weights(self, number: int, progress: Callable[[int, int], None]) -> Inversion:
        task, labels = self.again.model.task, None
        assert isinstance(task, Classifier)
        sent = self._send(number) if self.update == "round" else dict(task.named_parameters())
        known = self._enter(number)
        task.train()  # its normalisation goes by the batch
        trained = {n: p for n, p in task.named_parameters() if n in known and n in sent}
        if self.update == "round":
            update = [(sent[name] - known[name]).to(task.device) for name in trained]
        else:
            batch = self._some_images(number)
            labels, loss = batch["label"], task.objective(task(batch), batch)["loss"]
            update = [-gradient for gradient in torch.autograd.grad(loss, list(trained.values()))]
        normalise = self._normalise()
        return invert_gradients(
            lambda pixels: task.classifier(task({"image": normalise(pixels)})),
            list(trained.values()),
            update,
            self._shape(),
            generator(self.seed, "inversion"),
            task.classes,
            labels,
            self.steps,
            on_step=progress,
        )

    def _some_images(self, number: int) -> Batch:
        """As many of a client's images as are sought."""
        data, fabric = self.again.data, self.again.fabric
        held = torch.tensor(data.partition.clients[number])
        if self.images > len(held):
            raise UserError(f"images={self.images}, but client {number} holds {len(held)}; give no more")
        order = torch.randperm(len(held), generator=generator(self.seed, "images", client=number))
        batch: Batch = data.module.train.__getitems__(held[order[: self.images]].tolist())  # type: ignore[attr-defined]
        return fabric.to_device(batch)

    def _enter(self, number: int) -> Message:
        """Turns the live model into the client that the server's message has just reached; returns the message."""
        federation, context = self.again.federation, self._context(number)
        exchange, link = federation.exchanges.at(context), federation.channel.down
        federation.server.begin(context)
        message, spec = (
            exchange.broadcast(federation.server, number),
            exchange.broadcast_spec(federation.client),
        )
        blob = link.pack(message, spec, context, "the server")
        return federation.turn.activate(exchange, context, federation.pool.get(number), blob)

    def _send(self, number: int) -> Message:
        """Plays a client's turn; returns what it sends, as the server sees it."""
        federation, context = self.again.federation, self._context(number)
        exchange = federation.exchanges.at(context)
        self._enter(number)
        result = federation.turn.play(exchange, federation.data.at(federation.rounds))
        return federation.channel.up.unpack(
            result.blob, exchange.upload_spec(federation.client), f"client {number}"
        )

    def _context(self, number: int) -> Context:
        federation = self.again.federation
        stage = federation.data.at(federation.rounds).stages[number]
        return Context(federation.seed, self.round, number, stage=stage)

    def _shape(self) -> tuple[int, ...]:
        return (self.images, *_private_images(self.again, self.client, 1).shape[1:])

    def _normalise(self) -> Callable[[Tensor], Tensor]:
        mean, std = (values.to(self.again.fabric.device) for values in _channel_statistics(self.again))
        return lambda pixels: (pixels - mean) / std


def _shared(again: Reopened) -> tuple[Target, int]:
    """Finds what clients share that can be inverted, and when: in the next round, else last before round 1."""
    federation, task = again.federation, again.model.task
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
        f"attack=inversion: method {again.result['method']} with task {again.result['task']} shares no images, no"
        " memory bank and no weights of a classifier"
    )


def _private_images(again: Reopened, number: int, at_most: int | None = None) -> Tensor:
    """A client's training images in [0, 1] [n, ch, H, W], as its task sees them."""
    images, held = again.data.images, list(again.data.partition.clients[number])[:at_most]
    if isinstance(images, LabelledSet):
        return images.train_images[held] / 255
    mean, std = _channel_statistics(again)
    paths = [images.train[index].path for index in held]
    return (torch.stack([again.data.transform.image(path) for path in paths]) * std + mean).clamp(0, 1)


def _channel_statistics(again: Reopened) -> tuple[Tensor, Tensor]:
    """Mean and deviation that images are normalised by, each [ch, 1, 1]."""
    images = again.data.images
    source = again.data.transform if isinstance(images, ImageSet) else images
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return mean, std


def _summary(images: Tensor, matches: Matches, mean: Tensor) -> dict[str, float]:
    """Means over images, the best one, and how much the images are like the mean image."""
    return {
        "psnr": float(matches.psnr.mean()),
        "ssim": float(matches.ssim.mean()),
        "best_psnr": float(matches.psnr.max()),
        "best_ssim": float(matches.ssim.max()),
        "psnr_to_mean_image": float(closest(images, mean).psnr.mean()),
    }


def _cells(numbers: Mapping[str, float]) -> dict[str, str]:
    units = {"psnr": "{:.2f} dB", "ssim": "{:.3f}"}
    return {
        name.replace("_", " ").replace("psnr", "PSNR").replace("ssim", "SSIM"): (
            units["ssim" if "ssim" in name else "psnr"].format(value)
        )
        for name, value in numbers.items()
    }


def _draw(
    rows: list[tuple[Tensor, Matches]], private: Tensor, attack: _Attack, title: str, path: Path
) -> None:
    """The best reconstructions, the private images they are nearest to, and the best of the control."""
    (images, matches), (others, theirs) = rows
    shown = min(attack.images, len(images), len(others))
    sheet = []
    for own, other in zip(
        matches.psnr.argsort(descending=True)[:shown].tolist(),
        theirs.psnr.argsort(descending=True)[:shown].tolist(),
        strict=True,
    ):
        index = int(matches.nearest[own])
        sheet.append(
            [
                _panel(images[own], f"{matches.psnr[own]:.1f} dB, SSIM {matches.ssim[own]:.2f}"),
                _panel(private[index], f"image {index} of client {attack.client}"),
                _panel(others[other], f"{theirs.psnr[other]:.1f} dB, SSIM {theirs.ssim[other]:.2f}"),
            ]
        )
    heads = ["reconstruction", "closest private image", f"control (client {attack.control})"]
    save_figure(inversion_sheet(sheet, heads, title), path)


def _panel(image: Tensor, caption: str) -> Shown:
    pixels = image.cpu().permute(1, 2, 0).numpy()
    return Shown(pixels[..., 0] if pixels.shape[2] == 1 else pixels, caption)
