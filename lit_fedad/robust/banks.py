"""A rule for banks: sets of vectors, of which a server keeps those that other clients hold alike.

Honest clients differ, each with its own kinds of normal, so that a vector unlike all others is not yet a lie. What
tells a lie from a new kind of normal was measured (docs/lab/robust.md): half of an honest client's patches are about as
near to what others hold as vectors of one bank are to each other, while patches of defects are farther.
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
"""Names of the number of patches of each vector, of the images behind them, and of the patches' distance to it."""


SHARE = 1 / 256
"""Share of a bank's vectors that its spacing reaches over.

Limits were found with banks of 256 vectors, where that is the nearest other one. Of the same features more vectors lie
nearer to each other, by the power of their number and the features' dimension, which nobody knows; the nearest 1 of
256, 4 of 1,024 and so on reach equally far in any dimension.
"""


APART = 1.1
"""Factor by which clients that are left out lie farther than all others; docs/lab/robust.md says why."""


NAMED = 0.01
"""Share of a client's patches from which on their loss is worth a warning."""

_CHUNK = 1024  # vectors whose distances are held at once


def bank_name(spec: MessageSpec) -> str | None:
    """Returns the name of a message's bank: its only set of vectors, with counts or of free size; None without one.

    Sets of images, densities, whose vectors come with matrices, and memories of positions, which come in a fixed number
    without counts, are no banks: distances say little about them.
    """
    sets = [name for name, form in spec.items() if form.unordered]
    if len(sets) != 1:
        return None
    form = spec[sets[0]]
    rows = len(form.shape) == 2 and form.dtype.is_floating_point
    return sets[0] if rows and (COUNTS in spec or isinstance(form.shape[0], Free)) else None


@dataclass(frozen=True)
class BankSupport:
    """A check that other clients, or the server's last bank, hold something like a client's vectors.

    The distance of a vector x to a bank B is ``min_b |x - b| / s_b``, where s_b is how far the nearest `SHARE` of B's
    other vectors reaches from b: in units of the bank's own spacing there, which neither the sender of x nor the bank's
    size changes. The distance of x to the others is the `holders`-th smallest over the other clients' banks, or that to
    the last bank, if smaller.

    - A client whose median vector, weighted by counts, is farther than `far` is named, and left out if it stands out.
    - Of other clients, single vectors farther than `reach` are left out where the server has sent a bank, which covers
      all kinds of normal; before, only those farther than `reach_first`.

    A bank of fewer than two different vectors has no spacing: what it does not hold is infinitely far from it. A client
    that is infinitely far from all others is kept as it is, for nothing is known of its distance.

    A vector that is left out of a message of fixed size becomes a copy of the nearest that stays, with count 0.

    Attributes:
        far: Largest distance of a client's median vector, in banks with counts, whose vectors are means of patches.
        far_without_counts: The same in banks without, such as coresets, whose vectors are extremes.
        reach: Largest distance of a single vector.
        reach_first: The same where the server has sent no bank yet.
        holders: Number of other clients that must hold something near.
        liars: Share of clients that may be left out, at least one; if more have no support, see `standing_out`.
    """

    far: float = 1.2
    far_without_counts: float = 2.0
    reach: float = 1.25
    reach_first: float = 3.0
    holders: int = 1
    liars: float = 0.2

    def __post_init__(self) -> None:
        far = max(self.far, self.far_without_counts)
        if not (0 < self.far <= self.reach and self.far_without_counts > 0 and far <= self.reach_first):
            raise UserError(
                f"federation.robust.banks.reach={self.reach} must be at least far={self.far}, reach_first="
                f"{self.reach_first} at least far and far_without_counts={self.far_without_counts}, and these above 0"
            )
        at_least("federation.robust.banks", 1, holders=self.holders)
        within("federation.robust.banks", 0, 1, liars=self.liars)

    def __call__(self, updates: Updates, spec: MessageSpec, previous: Message) -> Judged:
        """Leaves clients and vectors out; see `RobustAggregation`."""
        name = bank_name(spec)
        if name is None or len(updates) < 3:
            return dict(updates), []
        messages = {client: update.message for client, update in updates.items()}
        last = previous.get(name)
        distances = self._distances(messages, name, last)
        masses = {client: _mass(message, name) for client, message in messages.items()}
        limit = self.far if COUNTS in spec else self.far_without_counts
        medians = {
            client: weighted_quantile(distances[client], mass, 0.5) if len(mass) else 0.0
            for client, mass in masses.items()
        }
        known = {client: median for client, median in medians.items() if math.isfinite(median)}
        far = standing_out(known, limit, tolerated(self.liars, len(known)))
        lines = {
            client: f"lies far out: half of its vectors are at least {median:.3g} times as far from all others'"
            f" as those are from each other (limit {limit:g})"
            for client, median in known.items()
            if median > limit
        }
        remarks = [
            (client, f"{line}; left out" if client in far else f"{line}; kept, as others lie about as far")
            for client, line in lines.items()
        ]
        reach, kept = self.reach_first if last is None else self.reach, dict[int, Update]()
        for client, update in updates.items():
            if client in far:
                continue
            stays = distances[client] <= reach
            # Of a client that is kept though nobody holds its kind, single vectors cannot be judged either.
            if stays.all() or client in lines or client not in known:
                kept[client] = update
                continue
            kept[client] = _only(update, stays, spec, name)
            lost = float(masses[client][~stays].sum() / masses[client].sum())
            if lost >= NAMED:
                remarks.append((client, f"lies far out in {lost:.1%} of what it holds, which is left out"))
        return kept, remarks

    def _distances(
        self, messages: Mapping[int, Message], name: str, last: Tensor | None
    ) -> dict[int, Tensor]:
        """Computes the distance of each vector to what others hold, by client."""
        # Distances are computed by matrix products, whose error is smallest around the origin.
        centre = torch.cat([message[name] for message in messages.values()]).double().mean(0)
        rows = {client: _centred(message[name], centre) for client, message in messages.items()}
        banks = {client: _spaced(rows[client][_mass(messages[client], name) > 0]) for client in messages}
        common = None if last is None else _spaced(_centred(last, centre))
        found = {}
        for client, own in rows.items():
            others = torch.stack([_distance(own, *banks[other]) for other in banks if other != client])
            held = others.kthvalue(min(self.holders, len(others)), dim=0).values
            found[client] = held if common is None else torch.minimum(held, _distance(own, *common))
        return found


def standing_out(distances: Mapping[int, float], limit: float, at_most: int) -> set[int]:
    """Finds the clients that lie beyond a limit and far from where all others lie.

    Where each client has a kind of normal of its own, all lie about equally far out. A client that lies also takes the
    support from honest ones that hold what it should have held; these come a little beyond the limit.

    Args:
        distances: How far each client lies out.
        limit: Distance up to which a client never stands out.
        at_most: How many may stand out, fewer than there are.

    Returns:
        As many of the farthest clients as can be told from the next by a factor of `APART`; none if none can.

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
    """Returns the weight [rows] of each vector: its count, or 1 where none, or only zeros, are sent."""
    counts = message.get(COUNTS)
    if counts is None or not counts.any():
        return torch.ones(len(message[name]), dtype=torch.float64)
    return counts.double()


def _centred(rows: Tensor, centre: Tensor) -> Tensor:
    return (rows.double() - centre).float()


def _spaced(bank: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the different vectors of a bank [n, C], and how far from each the nearest `SHARE` of them reaches [n]."""
    rows = bank.unique(dim=0)
    if len(rows) < 2:
        return rows, torch.full((len(rows),), torch.nan)
    reached = math.ceil(SHARE * len(rows))
    spacing = torch.cat(
        [
            torch.cdist(rows[own], rows).scatter(1, own[:, None], torch.inf).kthvalue(reached, dim=1).values
            for own in torch.arange(len(rows)).split(_CHUNK)
        ]
    )
    return rows, spacing.clamp(min=torch.finfo(rows.dtype).tiny)


def _distance(rows: Tensor, bank: Tensor, spacing: Tensor) -> Tensor:
    """Computes the distance [n] of vectors [n, C] to a bank, in units of its spacing; infinite where it has none."""
    if not len(rows) or len(bank) < 2:
        held = (rows[:, None] == bank).all(2).any(1)
        return torch.where(held, 0.0, torch.inf)
    return torch.cat([(torch.cdist(part, bank) / spacing).amin(1) for part in rows.split(_CHUNK)])


def _only(update: Update, stays: Tensor, spec: MessageSpec, name: str) -> Update:
    """Returns the message with the vectors that stay, in place of the others the nearest of these with count 0."""
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
