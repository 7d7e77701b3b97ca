"""Exchanges whose sums over images are clipped image by image, and noised: a stage around any exchange that names them.

``U = sum_i u_i min(1, B / |u_i|) + N(0, (sigma B)^2 I)``: one image changes the sum by at most B, so that U is
1/sigma-GDP (`lit_fedad.privacy.image_privacy`). What a server makes of U costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    SUM,
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


@dataclass(frozen=True)
class Noise:
    """The noise of a sum over images.

    Attributes:
        clip: Largest norm B of what one image adds.
        deviation: Standard deviation of the noise of every element.
        carriers: Clients whose shares make up the whole noise; None where the server adds it.
        clients: All clients of the run; None where each of its sums is of the same.
    """

    clip: float
    deviation: float
    carriers: int | None = None
    clients: frozenset[int] | None = None

    @property
    def share(self) -> float:
        """Standard deviation of what one client adds."""
        return 0.0 if self.carriers is None else self.deviation / math.sqrt(self.carriers)


def clipped_sum(sums: ImageSums, loader: Iterable[Any], clip: float) -> dict[str, Tensor]:
    """Adds the parts of all images of a loader up, each shortened to a norm.

    Args:
        sums: The sums.
        loader: A client's images.
        clip: Largest norm B of an image's part, over all of its tensors together.

    Returns:
        Sums by name, float64.
    """
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in sums.shapes().items()}
    for parts in clipped_parts(sums, loader, clip):
        for name, part in parts.items():
            total[name] += part.sum(0)
    return total


def clipped_parts(sums: ImageSums, loader: Iterable[Any], clip: float) -> Iterator[dict[str, Tensor]]:
    """Yields what the images of each batch add to `clipped_sum`, float64 ``[images, *sizes]`` by name.

    An image whose part is not finite adds nothing. Noise hides no refusal: a server that sends values at which one
    image's part overflows would learn from it whether there is one.
    """
    for parts in sums.per_image(loader):
        squares = torch.stack([part.reshape(len(part), -1).square().sum(1) for part in parts.values()])
        norms = squares.sum(0).sqrt()
        factors = (clip / norms.clamp(min=1e-300)).clamp(max=1)
        each = {name: (-1, *[1] * (part.ndim - 1)) for name, part in parts.items()}
        yield {
            name: torch.where(norms.isfinite().reshape(each[name]), factors.reshape(each[name]) * part, 0.0)
            for name, part in parts.items()
        }


def secret_generator(key: bytes, *place: object) -> np.random.Generator:
    """Returns a generator that follows from a secret of at most 64 bytes and from what it draws for."""
    digest = blake2b("/".join(map(str, place)).encode(), key=key, digest_size=32).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def gaussian(
    key: bytes,
    context: Context,
    shapes: Mapping[str, tuple[int, ...]],
    deviation: float,
    some: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Draws noise that depends on the secret, round, exchange and client alone: a replayed message has the same.

    Args:
        key: The secret.
        context: Round and exchange; a client's own share where it names a client.
        shapes: Sizes by name.
        deviation: Standard deviation.
        some: The clients in a sum, where they are not all: a sum of others has other noise, since the difference of two
            with the same would show what one client sends.

    Returns:
        Noise by name, float64.

    Raises:
        ValueError: If there is no secret: everybody could take such noise away.
    """
    if not key:
        raise ValueError("no secret to draw noise from")
    drawn = secret_generator(key, context.round, context.exchange, context.client, *some)
    return {
        name: torch.from_numpy(np.asarray(deviation * drawn.standard_normal(shape)))
        for name, shape in sorted(shapes.items())
    }


class Noised(Exchange[Any, Any]):
    """An exchange whose clients send clipped sums, with noise from server or clients, and whose server merges these.

    Args:
        inner: The exchange.
        client: The live client, for declared forms.
        noise: The noise.
        key: The secret that the noise is drawn from.
    """

    noised = True

    def __init__(self, inner: Exchange, client: Client, noise: Noise, key: bytes) -> None:
        self.inner, self.client, self.noise, self._key = inner, client, noise, key
        self.name = inner.name
        self.sums = Sums(
            lambda one: BoundedSums(self._sums(one).shapes(), noise.clip, noise.share), self._sums
        )
        self.discloses = disclosed_by(inner, client)
        if noise.carriers is not None:
            words = [f"{part.what}, under noise" for part in self.discloses]
            self.discloses = tuple(Disclosure(Kind.SUMS, what, noised=True) for what in words)

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
        total = clipped_sum(sums, loader, self.noise.clip)
        if self.noise.carriers is None:
            return total
        noise = gaussian(self._key, client.context, sums.shapes(), self.noise.share)
        return {name: part + noise[name] for name, part in total.items()}

    def upload_spec(self, client: Client) -> MessageSpec:
        """Declares the sums; they grow with a client's images."""
        shapes = self._sums(client).shapes()
        return {name: TensorSpec(shape, torch.float64, counted=True) for name, shape in shapes.items()}

    def validate(self, server: Any, client_id: int, update: Update) -> None:
        """Checks that a sum without noise is none of longer parts."""
        if self.noise.carriers is not None:
            return
        norm = float(sum(part.double().square().sum() for part in update.message.values())) ** 0.5
        most = update.num_samples * self.noise.clip
        if norm > most * (1 + 1e-6):
            raise UserError(f"the client's sums have a norm of {norm:.4g}, its images at most {most:.4g}")

    def released(self, server: Any, updates: Mapping[int, Update]) -> Message:
        """Returns the noised sum of all, which is all that is promised to say little of an image."""
        shapes = self._sums(self.client).shapes()
        total = {n: sum((u.message[n] for u in updates.values()), torch.zeros(())) for n in shapes}
        if self.noise.carriers is not None:
            return total
        clients = senders(updates)
        some = () if self.noise.clients in (None, set(clients)) else clients
        context = replace(server.context, client=None)
        noise = gaussian(self._key, context, shapes, self.noise.deviation, some)
        return {name: part + noise[name] for name, part in total.items()}

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Adds sums and noise up, and has the server merge what follows from them as one client's message."""
        clients, carriers = senders(updates), self.noise.carriers
        if carriers is not None and len(clients) < carriers:
            raise UserError(
                f"the sum of {len(clients)} clients holds less noise than that of {carriers}, which the privacy of"
                " their images needs"
            )
        total = self.released(server, updates)
        images = sum(update.num_samples for update in updates.values())
        # Clients that finish beyond the carriers bring noise of their own.
        more = 1.0 if carriers is None else max(1.0, len(clients) / carriers)
        message = self._sums(self.client).from_sums(server, total, self.noise.deviation * more**0.5)
        self.inner.aggregate(server, {SUM: Update(message, images, tuple(clients))})


def noised(method: Method, noise: Noise, key: bytes) -> Exchanges:
    """Puts the noise around all exchanges of a method.

    Images cannot be taken out of noised sums again: `Exchanges.leave_out` falls away.
    """
    client, plain = method.client, method.exchanges.under_noise
    setup, rounds = (
        tuple(Noised(one, client, noise, key) if one.upload_spec(client) else one for one in group)
        for group in (plain.setup, plain.rounds)
    )
    return Exchanges(setup, rounds, evidence=method.exchanges.evidence)
