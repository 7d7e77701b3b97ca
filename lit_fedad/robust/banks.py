"""A rule for banks (sets of vectors), of which the server keeps vectors that are similar to those of other clients.

Honest clients differ, each with its own kinds of normal images, so a vector unlike all others need not be a lie.
Measurements show what distinguishes a lie from a new kind of normal images (docs/lab/robust.md): half of an honest
client's patches are about as close to other clients' vectors as vectors of one bank are to each other, while patches of
defects are farther away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_fedad.contracts import Free, Message, MessageSpec, Update
from lit_fedad.core.bounds import at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import weighted_quantile
from lit_fedad.robust.aggregation import Judged, Updates, tolerated

COUNTS, IMAGES, RADII = "counts", "image_counts", "radii"
"""Names of message entries: each vector's number of patches, its number of images, and its patches' distance to it."""


SHARE = 1 / 256
"""Share of a bank's vectors that defines its spacing: the distance of a vector to the nearest such share of the others.

The limits were found with banks of 256 vectors, where this share is the nearest other vector. More vectors of the same
features lie closer to each other, by a power of their number that depends on the unknown dimension of the features.
The nearest 1 of 256, 4 of 1,024 and so on reach equally far in any dimension.
"""


APART = 1.1
"""Factor by which clients that are left out must lie farther away than all others; docs/lab/robust.md says why."""


NAMED = 0.01
"""Share of a client's patches from which their removal is worth a warning."""

_CHUNK = 1024  # number of vectors whose distances are in memory at once


def bank_name(spec: MessageSpec) -> str | None:
    """Returns the name of a message's bank: its only set of vectors, with counts or of free size; None without one.

    Distances say little about other sets, which are no banks: sets of images, densities (whose vectors come with
    matrices), and memories of positions (a fixed number of vectors without counts).
    """
    sets = [name for name, form in spec.items() if form.unordered]
    if len(sets) != 1:
        return None
    form = spec[sets[0]]
    rows = len(form.shape) == 2 and form.dtype.is_floating_point
    return sets[0] if rows and (COUNTS in spec or isinstance(form.shape[0], Free)) else None


@dataclass(frozen=True)
class BankSupport:
    """A check that other clients, or the server's last bank, have vectors similar to those of a client.

    The distance of a vector x to a bank B is ``min_b |x - b| / s_b``, where s_b is the spacing of B at b: the distance
    from b that the nearest `SHARE` of B's other vectors reaches. Neither the sender of x nor the size of the bank
    changes this unit. The distance of x to the other clients is the `min_supporters`-th smallest over their banks, or
    the distance to the server's last bank, if that is smaller.

    - A client whose median vector, weighted by counts, is farther than `client_limit` is named, and left out if it
      stands out.
    - Single vectors of the remaining clients are left out if they are farther than `vector_limit`. This holds once the
      server has sent a bank, which covers all kinds of normal images; before that, the limit is `first_vector_limit`.

    A bank of fewer than two different vectors has no spacing: any vector that it does not contain is infinitely far
    from it. A client that is infinitely far from all others is kept unchanged, because it cannot be judged.

    In a message of fixed size, a vector that is left out becomes a copy of the nearest vector that stays, with count 0.

    Attributes:
        client_limit: Largest distance of a client's median vector, for banks with counts, whose vectors are means of
            patches.
        client_limit_without_counts: The same for banks without counts, such as coresets, whose vectors are extremes.
        vector_limit: Largest distance of a single vector.
        first_vector_limit: The same as long as the server has sent no bank.
        min_supporters: Number of other clients that must have a similar vector.
        malicious_share: Share of clients that may be left out, at least one client; `standing_out` decides about them.
    """

    client_limit: float = 1.2
    client_limit_without_counts: float = 2.0
    vector_limit: float = 1.25
    first_vector_limit: float = 3.0
    min_supporters: int = 1
    malicious_share: float = 0.2

    def __post_init__(self) -> None:
        limits = self.client_limit, self.client_limit_without_counts
        if not (
            min(limits) > 0
            and self.client_limit <= self.vector_limit
            and max(limits) <= self.first_vector_limit
        ):
            raise UserError(
                f"federation.robust.banks.vector_limit={self.vector_limit} must be at least client_limit="
                f"{self.client_limit}, first_vector_limit={self.first_vector_limit} at least client_limit and"
                f" client_limit_without_counts={self.client_limit_without_counts}, and these above 0"
            )
        at_least("federation.robust.banks", 1, min_supporters=self.min_supporters)
        within("federation.robust.banks", 0, 1, malicious_share=self.malicious_share)

    def __call__(self, updates: Updates, spec: MessageSpec, previous: Message) -> Judged:
        """Leaves clients and vectors out; see `RobustAggregation`."""
        name = bank_name(spec)
        if name is None or len(updates) < 3:
            return dict(updates), []
        messages = {client: update.message for client, update in updates.items()}
        last = previous.get(name)
        distances = self._distances(messages, name, last)
        masses = {client: _mass(message, name) for client, message in messages.items()}
        limit = self.client_limit if COUNTS in spec else self.client_limit_without_counts
        medians = {
            client: weighted_quantile(distances[client], mass, 0.5) if len(mass) else 0.0
            for client, mass in masses.items()
        }
        finite = {client: median for client, median in medians.items() if math.isfinite(median)}
        far = standing_out(finite, limit, tolerated(self.malicious_share, len(finite)))
        lines = {
            client: f"is an outlier: half of its vectors are at least {median:.3g} times as far from all others'"
            f" as those are from each other (limit {limit:g})"
            for client, median in finite.items()
            if median > limit
        }
        remarks = [
            (client, f"{line}; left out" if client in far else f"{line}; kept, as others lie about as far")
            for client, line in lines.items()
        ]
        vector_limit, kept = (
            self.first_vector_limit if last is None else self.vector_limit,
            dict[int, Update](),
        )
        for client, update in updates.items():
            if client in far:
                continue
            stays = distances[client] <= vector_limit
            # Single vectors of a client that is kept although it is an outlier cannot be judged either.
            if stays.all() or client in lines or client not in finite:
                kept[client] = update
                continue
            kept[client] = _without_vectors(update, stays, spec, name)
            lost = float(masses[client][~stays].sum() / masses[client].sum())
            if lost >= NAMED:
                remarks.append((client, f"has outliers: {lost:.1%} of its vectors, by count, are left out"))
        return kept, remarks

    def _distances(
        self, messages: Mapping[int, Message], name: str, last: Tensor | None
    ) -> dict[int, Tensor]:
        """Computes the distance of each vector to the vectors of the others, by client."""
        # Vectors are centred: distances are computed by matrix products, whose error is smallest around the origin.
        centre = torch.cat([message[name] for message in messages.values()]).double().mean(0)
        rows = {client: _centred(message[name], centre) for client, message in messages.items()}
        banks = {client: _spaced(rows[client][_mass(messages[client], name) > 0]) for client in messages}
        prior = None if last is None else _spaced(_centred(last, centre))
        distances = {}
        for client, vectors in rows.items():
            by_bank = torch.stack([_distance(vectors, *banks[other]) for other in banks if other != client])
            near = by_bank.kthvalue(min(self.min_supporters, len(by_bank)), dim=0).values
            distances[client] = near if prior is None else torch.minimum(near, _distance(vectors, *prior))
        return distances


def standing_out(distances: Mapping[int, float], limit: float, at_most: int) -> set[int]:
    """Finds the clients that are beyond a limit and clearly farther away than all others.

    If each client has its own kind of normal images, all are about equally far away. A lying client also lacks the
    vectors that its true images would give, and so supports nobody: honest clients may slightly exceed the limit.

    Args:
        distances: Distance of each client from the others.
        limit: Distance up to which a client never stands out.
        at_most: Largest number of clients that may stand out; smaller than the number of clients.

    Returns:
        The largest group of farthest clients, at most `at_most`, that exceeds the next client's distance by a factor of
        `APART`; empty if there is no such group.

    Example:
        >>> standing_out({1: 1.0, 2: 1.5, 4: 1.2}, 1.2, 1), standing_out({1: 1.0, 2: 1.25, 4: 1.19}, 1.2, 1)
        ({2}, set())
    """
    farthest = sorted(distances, key=lambda client: -distances[client])
    for count in range(at_most, 0, -1):
        out, rest = farthest[:count], farthest[count:]
        if distances[out[-1]] > max(limit, APART * distances[rest[0]]):
            return set(out)
    return set()


def _mass(message: Message, name: str) -> Tensor:
    """Returns the weight [n] of each vector: its count, or 1 if the message has no counts or only zeros."""
    counts = message.get(COUNTS)
    if counts is None or not counts.any():
        return torch.ones(len(message[name]), dtype=torch.float64)
    return counts.double()


def _centred(rows: Tensor, centre: Tensor) -> Tensor:
    """Subtracts the centre [C] from vectors [n, C] in double precision, and returns the result in single precision."""
    return (rows.double() - centre).float()


def _spaced(bank: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the different vectors of a bank [n, C], and the bank's spacing at each of them [n] (`SHARE`)."""
    rows = bank.unique(dim=0)
    if len(rows) < 2:
        return rows, torch.full((len(rows),), torch.nan)
    rank = math.ceil(SHARE * len(rows))
    spacing = torch.cat(
        [
            torch.cdist(rows[chunk], rows).scatter(1, chunk[:, None], torch.inf).kthvalue(rank, dim=1).values
            for chunk in torch.arange(len(rows)).split(_CHUNK)
        ]
    )
    return rows, spacing.clamp(min=torch.finfo(rows.dtype).tiny)


def _distance(rows: Tensor, bank: Tensor, spacing: Tensor) -> Tensor:
    """Computes the distance [n] of vectors [n, C] to a bank in units of its spacing; 0 or infinite without spacing."""
    if not len(rows) or len(bank) < 2:
        contained = (rows[:, None] == bank).all(2).any(1)
        return torch.where(contained, 0.0, torch.inf)
    return torch.cat([(torch.cdist(part, bank) / spacing).amin(1) for part in rows.split(_CHUNK)])


def _without_vectors(update: Update, stays: Tensor, spec: MessageSpec, name: str) -> Update:
    """Returns the update without the vectors of bank `name` that do not stay, where `stays` is bool [n].

    In a message of fixed size, each of them is replaced by the nearest vector that stays, with count 0.
    """
    message = dict(update.message)
    size = spec[name].shape[0]
    if isinstance(size, Free):
        rows = [n for n, form in spec.items() if form.shape and form.shape[0] == size]
        message.update({n: message[n][stays] for n in rows})
        return Update(message, update.num_samples)
    kept = stays.nonzero()[:, 0]
    bank = message[name]
    nearest = kept[torch.cdist(bank[~stays].double(), bank[kept].double()).argmin(1)]
    source = torch.arange(len(bank))
    source[~stays] = nearest
    message[name] = bank[source]
    if RADII in message:
        message[RADII] = message[RADII][source]
    for name in (COUNTS, IMAGES):
        if name in message:
            message[name] = torch.where(stays, message[name], 0)
    return Update(message, update.num_samples)
