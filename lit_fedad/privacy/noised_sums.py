"""Exchanges whose sums over images are clipped image by image, and noised: a stage around any exchange that names them.

``U = sum_i u_i min(1, B / |u_i|) + N(0, (sigma B)^2 I)``: one image changes the sum by at most B, so that U is
1/sigma-GDP (`lit_fedad.privacy.accounting`). What a server makes of U costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    SUM,
    Additive,
    Client,
    Context,
    Exchange,
    Exchanges,
    ImageSums,
    Message,
    MessageSpec,
    Method,
    Sums,
    TensorSpec,
    Update,
    senders,
)
from lit_fedad.contracts.disclosure import Disclosure, Disclosures, Kind
from lit_fedad.contracts.exchange import disclosed_by
from lit_fedad.contracts.sums import BoundedSums
from lit_fedad.core.errors import UserError

if TYPE_CHECKING:
    from lit_fedad.privacy.image_privacy import Plan


def clipped_sum(sums: ImageSums, loader: Iterable[Any], clip: float) -> dict[str, Tensor]:
    """Adds the parts of all images of a loader up, each shortened to a norm.

    Args:
        sums: The sums.
        loader: A client's images.
        clip: Largest norm B of an image's part, over all of its tensors together.

    Returns:
        Sums by name, float64.
    """
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in sums.form().items()}
    for parts in clipped_parts(sums, loader, clip):
        for name, part in parts.items():
            total[name] += part.sum(0)
    return total


def clipped_parts(sums: ImageSums, loader: Iterable[Any], clip: float) -> Iterator[dict[str, Tensor]]:
    """Yields what the images of each batch add to `clipped_sum`, float64 ``[images, *sizes]`` by name.

    Raises:
        UserError: If an image's features are not finite.
    """
    for parts in sums.parts(loader):
        squares = torch.stack([part.reshape(len(part), -1).square().sum(1) for part in parts.values()])
        norms = squares.sum(0).sqrt()
        if not norms.isfinite().all():
            raise UserError("an image's features are not finite")
        factors = (clip / norms.clamp(min=1e-300)).clamp(max=1)
        yield {name: factors.reshape(-1, *[1] * (part.ndim - 1)) * part for name, part in parts.items()}


def gaussian(
    key: bytes, context: Context, shapes: Mapping[str, tuple[int, ...]], deviation: float
) -> dict[str, Tensor]:
    """Draws noise that depends on the secret, round, exchange and client alone: a replayed message has the same.

    Args:
        key: The secret.
        context: Round and exchange; a client's own share where it names a client.
        shapes: Sizes by name.
        deviation: Standard deviation.

    Returns:
        Noise by name, float64.

    Raises:
        ValueError: If there is no secret: everybody could take such noise away.
    """
    if not key:
        raise ValueError("no secret to draw noise from")
    place = f"{context.round}/{context.exchange}/{context.client}".encode()
    drawn = np.random.default_rng(int.from_bytes(blake2b(place, key=key, digest_size=32).digest(), "big"))
    return {
        name: torch.from_numpy(np.asarray(deviation * drawn.standard_normal(shape)))
        for name, shape in sorted(shapes.items())
    }


class Noised(Exchange[Any, Any]):
    """An exchange whose clients send clipped sums, with noise from server or clients, and whose server merges these.

    Args:
        inner: The exchange.
        client: The live client, for declared forms.
        plan: The noise.
        key: The secret that the noise is drawn from.
    """

    def __init__(self, inner: Exchange, client: Client, plan: Plan, key: bytes) -> None:
        self.inner, self.client, self.plan, self._key = inner, client, plan, key
        self.name = inner.name
        self.distributed = plan.settings.where == "distributed"
        self.sums = Sums(self._additive, self._sums)
        self.discloses = tuple(
            Disclosure(Kind.SUMS, f"{part.what}, under noise", noised=True) if self.distributed else part
            for part in disclosed_by(inner, client)
        )

    def _sums(self, client: Client) -> ImageSums:
        assert self.inner.sums is not None
        assert self.inner.sums.by_image is not None  # `ImagePrivacy.plan` has refused others
        return self.inner.sums.by_image(client)

    def broadcast(self, server: Any, client_id: int) -> Message:
        """Returns the exchange's message."""
        return self.inner.broadcast(server, client_id)

    def broadcast_spec(self, client: Client) -> MessageSpec:
        """Declares the exchange's message."""
        return self.inner.broadcast_spec(client)

    def receive(self, client: Client, message: Message) -> None:
        """Loads the exchange's message."""
        self.inner.receive(client, message)

    discloses: Disclosures = ()  # the inner exchange's, of each instance

    def send(self, client: Client, loader: DataLoader) -> Message:
        """Returns clipped sums and, where clients add it, this client's share of the noise."""
        sums = self._sums(client)
        total = clipped_sum(sums, loader, self.plan.settings.clip)
        if not self.distributed:
            return total
        noise = gaussian(self._key, client.context, sums.form(), self.plan.share)
        return {name: part + noise[name] for name, part in total.items()}

    def upload_spec(self, client: Client) -> MessageSpec:
        """Declares the sums; they grow with a client's images."""
        shapes = self._sums(client).form()
        return {name: TensorSpec(shape, torch.float64, counted=True) for name, shape in shapes.items()}

    def _additive(self, client: Client) -> Additive:
        noise = self.plan.share if self.distributed else 0.0
        return BoundedSums(self._sums(client).form(), self.plan.settings.clip, noise)

    def validate(self, server: Any, client_id: int, update: Update) -> None:
        """Checks that a sum without noise is none of longer parts."""
        if self.distributed:
            return
        norm = float(sum(part.double().square().sum() for part in update.message.values())) ** 0.5
        most = update.num_samples * self.plan.settings.clip
        if norm > most * (1 + 1e-6):
            raise UserError(f"the client's sums have a norm of {norm:.4g}, its images at most {most:.4g}")

    def released(self, server: Any, updates: Mapping[int, Update]) -> Message:
        """Returns the noised sum of all, which is all that is promised to say little of an image."""
        shapes = self._sums(self.client).form()
        total = {n: sum((u.message[n] for u in updates.values()), torch.zeros(())) for n in shapes}
        if self.distributed:
            return total
        noise = gaussian(self._key, replace(server.context, client=None), shapes, self.plan.deviation)
        return {name: part + noise[name] for name, part in total.items()}

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Adds sums and noise up, and has the server merge what follows from them as one client's message."""
        clients = senders(updates)
        if self.distributed and len(clients) < self.plan.carriers:
            raise UserError(
                f"the sum of {len(clients)} clients holds less noise than that of {self.plan.carriers}, which the"
                " privacy of their images needs"
            )
        total = self.released(server, updates)
        images = sum(update.num_samples for update in updates.values())
        # Clients that finish beyond the carriers bring noise of their own.
        deviation = self.plan.deviation * max(1.0, len(clients) / self.plan.carriers) ** 0.5
        message = self._sums(self.client).joined(
            server, total, deviation if self.distributed else self.plan.deviation
        )
        self.inner.aggregate(server, {SUM: Update(message, images, tuple(clients))})


def noised(method: Method, plan: Plan, key: bytes) -> Exchanges:
    """Puts the noise around all exchanges of a method.

    Images cannot be taken out of noised sums again: `Exchanges.sums` falls away.
    """
    client, plain = method.client, method.exchanges.under_noise
    setup, rounds = (
        tuple(Noised(one, client, plan, key) if one.upload_spec(client) else one for one in group)
        for group in (plain.setup, plain.rounds)
    )
    return Exchanges(setup, rounds, evidence=plain.evidence)
