"""Exchanges whose sums over images are clipped image by image and noised; they wrap any exchange with such sums.

``U = sum_i u_i min(1, B / |u_i|) + N(0, (sigma B)^2 I)``: one image changes the sum by at most B, so that U is
1/sigma-GDP (`lit_fedad.privacy.image_privacy`). Anything that a server computes from U costs no further budget.
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
        carriers: Number of clients whose shares add up to the whole noise; None where the server adds it.
        clients: All clients of the run; None where every sum is over the same clients.
    """

    clip: float
    deviation: float
    carriers: int | None = None
    clients: frozenset[int] | None = None

    @property
    def share(self) -> float:
        """Standard deviation of the noise that one client adds."""
        return 0.0 if self.carriers is None else self.deviation / math.sqrt(self.carriers)


def clipped_sum(sums: ImageSums, loader: Iterable[Any], clip: float) -> dict[str, Tensor]:
    """Sums what the images of a loader add, each clipped to a norm.

    Args:
        sums: The sums over images.
        loader: A client's images.
        clip: Largest norm B of what one image adds, over all tensors together.

    Returns:
        Sums by name, float64.
    """
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in sums.shapes().items()}
    for parts in clipped_parts(sums, loader, clip):
        for name, part in parts.items():
            total[name] += part.sum(0)
    return total


def clipped_parts(sums: ImageSums, loader: Iterable[Any], clip: float) -> Iterator[dict[str, Tensor]]:
    """Yields for each batch what its images add to `clipped_sum`, float64 ``[images, *sizes]`` by name.

    An image whose part is not finite adds nothing, instead of being refused. Noise would not hide a refusal: a server
    that sends values for which the part of a certain image overflows would learn whether the client has this image.
    """
    for parts in sums.per_image(loader):
        squares = torch.stack([part.reshape(len(part), -1).square().sum(1) for part in parts.values()])
        norms = squares.sum(0).sqrt()
        factors = (clip / norms.clamp(min=1e-300)).clamp(max=1)
        shapes = {name: (-1, *[1] * (part.ndim - 1)) for name, part in parts.items()}  # for broadcasting
        yield {
            name: torch.where(
                norms.isfinite().reshape(shapes[name]), factors.reshape(shapes[name]) * part, 0.0
            )
            for name, part in parts.items()
        }


def secret_generator(key: bytes, *place: object) -> np.random.Generator:
    """Returns a generator that is seeded by a secret of at most 64 bytes and by the place at which it is used.

    Args:
        key: The secret.
        *place: Purpose, round, client and so on; other places give unrelated numbers.
    """
    digest = blake2b("/".join(map(str, place)).encode(), key=key, digest_size=32).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def gaussian(
    key: bytes,
    context: Context,
    shapes: Mapping[str, tuple[int, ...]],
    deviation: float,
    subset: Sequence[int] = (),
) -> dict[str, Tensor]:
    """Draws noise that depends only on the secret, round, exchange and client; a replayed message has the same noise.

    Args:
        key: The secret.
        context: Round and exchange; with a client, the noise is this client's share.
        shapes: Sizes by name.
        deviation: Standard deviation.
        subset: The clients in the sum, if not all clients are in it; else empty. Sums over different clients get
            different noise: with the same noise, the difference of two sums would show what one client sends.

    Returns:
        Noise by name, float64.

    Raises:
        ValueError: If there is no secret, without which everybody could remove the noise.
    """
    if not key:
        raise ValueError("no secret to draw noise from")
    generator = secret_generator(key, context.round, context.exchange, context.client, *subset)
    return {
        name: torch.from_numpy(np.asarray(deviation * generator.standard_normal(shape)))
        for name, shape in sorted(shapes.items())
    }


class Noised(Exchange[Any, Any]):
    """A wrapper of an exchange whose clients send clipped sums; the server or the clients add noise.

    Args:
        inner: The wrapped exchange, whose server merges the message that is computed from the noised sums.
        client: The live client, which knows the declared forms.
        noise: The noise of the sums.
        key: The secret from which the noise is drawn.
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
        assert self.inner.sums.by_image is not None  # `ImagePrivacy.plan` has refused other exchanges
        return self.inner.sums.by_image(client)

    def broadcast(self, server: Any, client_id: int) -> Message:
        """Returns the message of the wrapped exchange."""
        return self.inner.broadcast(server, client_id)

    def broadcast_spec(self, client: Client) -> MessageSpec:
        """Declares the form of the message of the wrapped exchange."""
        return self.inner.broadcast_spec(client)

    def receive(self, client: Client, message: Message) -> None:
        """Loads the message of the wrapped exchange."""
        self.inner.receive(client, message)

    discloses: Disclosures = ()  # each instance takes those of its wrapped exchange

    def send(self, client: Client, loader: DataLoader) -> Message:
        """Returns clipped sums, with this client's share of the noise if clients add the noise."""
        sums = self._sums(client)
        total = clipped_sum(sums, loader, self.noise.clip)
        if self.noise.carriers is None:
            return total
        noise = gaussian(self._key, client.context, sums.shapes(), self.noise.share)
        return {name: part + noise[name] for name, part in total.items()}

    def upload_spec(self, client: Client) -> MessageSpec:
        """Declares the sums, which grow with the number of a client's images."""
        shapes = self._sums(client).shapes()
        return {name: TensorSpec(shape, torch.float64, counted=True) for name, shape in shapes.items()}

    def validate(self, server: Any, client_id: int, update: Update) -> None:
        """Checks that a sum without noise is not longer than the clipped parts of the client's images allow."""
        if self.noise.carriers is not None:
            return
        norm = float(sum(part.double().square().sum() for part in update.message.values())) ** 0.5
        bound = update.num_samples * self.noise.clip
        if norm > bound * (1 + 1e-6):
            raise UserError(f"the client's sums have a norm of {norm:.4g}, its images at most {bound:.4g}")

    def released(self, server: Any, updates: Mapping[int, Update]) -> Message:
        """Returns the noised sum over all clients; the guarantee of privacy covers this sum only."""
        shapes = self._sums(self.client).shapes()
        total = {n: sum((u.message[n] for u in updates.values()), torch.zeros(())) for n in shapes}
        if self.noise.carriers is not None:
            return total
        clients = senders(updates)
        subset = () if self.noise.clients in (None, set(clients)) else clients
        context = replace(server.context, client=None)
        noise = gaussian(self._key, context, shapes, self.noise.deviation, subset)
        return {name: part + noise[name] for name, part in total.items()}

    def aggregate(self, server: Any, updates: Mapping[int, Update]) -> None:
        """Adds up sums and noise, and lets the server merge the message computed from them as that of one client."""
        clients, carriers = senders(updates), self.noise.carriers
        if carriers is not None and len(clients) < carriers:
            raise UserError(
                f"the sum of {len(clients)} clients holds less noise than that of {carriers}, which the privacy of"
                " their images needs"
            )
        total = self.released(server, updates)
        images = sum(update.num_samples for update in updates.values())
        # If more clients finish than are needed, the sum has the noise of all their shares.
        excess = 1.0 if carriers is None else max(1.0, len(clients) / carriers)
        message = self._sums(self.client).from_sums(server, total, self.noise.deviation * excess**0.5)
        self.inner.aggregate(server, {SUM: Update(message, images, tuple(clients))})


def noised(method: Method, noise: Noise, key: bytes) -> Exchanges:
    """Wraps all exchanges of a method to add the noise.

    The result has no `Exchanges.leave_out`, because images cannot be removed from noised sums again.
    """
    client, plain = method.client, method.exchanges.under_noise
    setup, rounds = (
        tuple(Noised(one, client, noise, key) if one.upload_spec(client) else one for one in group)
        for group in (plain.setup, plain.rounds)
    )
    return Exchanges(setup, rounds, evidence=method.exchanges.evidence)
