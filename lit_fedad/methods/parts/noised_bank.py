"""The exchanges that find a bank of normal features under differential privacy: noised sums of patches by slot.

Slots lie in the few public directions that features are projected on for the noised subspace. The first are drawn from
the noised moments; in each round images add their patches by slot, and noise is added to the sums of all: a step of
Lloyd's algorithm under differential privacy (Blum, Dwork, McSherry and Nissim, PODS 2005), with the usual residual at
each slot beside it. The server's ``moments`` then also have ``slots`` [K, k], to which patches are assigned next, in
the public frame, and ``unit``, the usual length of residuals.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts import Free, Message, MessageSpec, TensorSpec
from lit_fedad.contracts.disclosure import summed
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.errors import UserError
from lit_fedad.memory.knn import nearest
from lit_fedad.memory.merge import shared_slots
from lit_fedad.memory.moments import Moments, upper_triangle
from lit_fedad.memory.slot_sums import copies_apart, draw_slots, split_fullest
from lit_fedad.methods.parts.noised_subspace import NOISED_FRAME, LastProducts, Projected, ProjectedSums

DEVIATIONS = 3.0
"""Deviations of the noise within which a count may be noise alone."""

PRIOR = 10.0
"""Weight, in deviations of the noise, that the mean of all slots has in the mean square of each."""


class ImageSlots(ProjectedSums):
    """The sums ``counts`` [K], ``offsets`` [K, k] and ``squares`` [K] over the patches g that are nearest to slot m_k.

    Of an image with P patches they are ``n_k / P``, ``sum (g - m_k) / P`` and ``sum |B^T g|^2 / P``, over the length of
    all three. The unit of offsets is the length of usual features, that of squares the mean square residual.

    Args:
        client: See `ProjectedSums`; its ``frame`` also holds ``slots`` m [K, k], and ``outside`` B [k, R]: the
            directions outside the subspace over the usual length of residuals.

    Raises:
        UserError: If the task's bank is none of these features.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        task = client.task
        if task.average_pool is not True or task.whiten is None or task.cosine:
            raise UserError(
                "federation.privacy: a noised bank looks at features that are averaged in every layer and"
                " whitened; give task.average_pool=true, task.whiten=0.1 and task.distance=euclidean, as"
                " method=federated_bank does"
            )
        self.slots = task.slots

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Declares the sums."""
        return {"counts": (self.slots,), "offsets": (self.slots, self.directions), "squares": (self.slots,)}

    def _parts(self, projected: Tensor) -> dict[str, Tensor]:
        slots, outside = (self.frame[name].to(projected) for name in ("slots", "outside"))
        at = nearest(projected.flatten(0, 1), slots, 1)[1].view(projected.shape[:2])
        shares = F.one_hot(at, len(slots)).to(projected).mT / projected.shape[1]
        counts = shares.sum(2)
        squares = (projected @ outside).square().sum(2, keepdim=True)
        return {
            "counts": counts,
            "offsets": shares @ projected - counts[:, :, None] * slots,
            "squares": (shares @ squares)[:, :, 0],
        }

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes what the sums say of slots.

        An image's part of a count is at most 1: as many images as a count has ones lie behind a slot at least.

        Returns:
            ``shown``: which slots count `DEVIATIONS` of the noise more than ``server.min_images``, bool [K];
            ``counts``; ``steps`` [K, k] to the mean of their patches, shortened by the share of noise in them (James
            and Stein 1961); ``squares``: mean squares of residuals, drawn to the mean of all slots (`PRIOR`).

        Raises:
            HiddenByNoiseError: If no slot counts enough.
        """
        counts, offsets, squares = sums["counts"], sums["offsets"], sums["squares"]
        shown = counts - DEVIATIONS * noise >= server.min_images
        if not shown.any():
            raise HiddenByNoiseError("fewer task.slots")
        lengths = offsets.square().sum(1, keepdim=True).clamp(min=1e-300)
        steps = (
            offsets * (1 - self.directions * noise**2 / lengths).clamp(min=0) / counts.clamp(min=1)[:, None]
        )
        usual = (squares[shown].sum() / counts[shown].sum()).clamp(min=1e-12)
        means = (squares + PRIOR * noise * usual).clamp(min=0) / (counts + PRIOR * noise).clamp(min=1)
        return {"shown": shown, "counts": counts, "steps": steps, "squares": means}

    @staticmethod
    def merge(server: Any, results: Message) -> None:
        """Moves slots to the mean of their patches; the nearest that shows takes the place of one that does not."""
        moments, shown = server.moments, results["shown"]
        slots = torch.where(shown[:, None], moments["slots"] + results["steps"], moments["slots"])
        place = shared_slots(slots, shown.long(), 1)
        radii = moments["unit"] * results["squares"].sqrt()
        server.known = _bank(moments, slots[place], radii[place])
        server.latest = {"shown_slots": float(shown.sum())}
        split = slots[split_fullest(results["counts"], shown)]
        apart = copies_apart(split.float(), server.context.common.generator("copies"))
        server.moments = {**moments, "slots": apart.double()}


class FirstSlots(LastProducts):
    """The products to which the subspace is fitted, and from which the first slots are drawn."""

    @staticmethod
    def merge(server: Any, results: Message) -> None:
        """Fits the subspace, and draws slots."""
        LastProducts.merge(server, results)
        product, outside = server.moments["product"], server.moments["outside"]
        moments = Moments(1, torch.zeros_like(product[0]), product)
        slots = draw_slots(moments, {}, server.slots, server.context.generator("memory")).double()
        unit = (outside.T @ product @ outside).trace().clamp(min=1e-12).sqrt()
        server.moments = {**server.moments, "slots": slots, "unit": unit}
        server.statistics = _statistics(server.moments)
        server.known = _bank(server.moments, slots, unit.expand(server.slots))


class NoisedSlots(Projected):
    """The exchange of a round: the model and the slots to the clients, noised sums of patches by slot to the server."""

    discloses = (summed("sums of patches' features by slot of the bank", images=1),)

    def broadcast(self, server: Any, client_id: int) -> Message:
        """Returns the model, and what patches are assigned and measured by."""
        moments = server.moments
        outside = moments["outside"] / moments["unit"]
        measures = {
            "frame": moments["frame"].float(),
            "slots": moments["slots"].float(),
            "outside": outside.float(),
        }
        return {**server.broadcast(client_id), **measures}

    def broadcast_spec(self, client: Any) -> MessageSpec:
        """Declares the form of `broadcast`."""
        return {
            **super().broadcast_spec(client),
            **client.broadcast_spec(),  # the model's centre is the frame's
            "slots": TensorSpec((client.task.slots, client.directions)),
            "outside": TensorSpec((client.directions, Free("directions", client.directions))),
        }

    def receive(self, client: Any, message: Message) -> None:
        """Loads the model, and keeps the rest for this exchange."""
        client.receive(message)
        super().receive(client, message)


def _statistics(moments: Message) -> Message:
    """Computes what makes features of the model such as those of the frame A, but for a rotation: ``(A A^T)^(1/2)``."""
    left, lengths, _ = torch.linalg.svd(moments["frame"], full_matrices=False)
    root = (left * lengths) @ left.T
    centre = moments["centre"].float()
    return {"mean": centre, "scale": torch.ones_like(centre), "whitening": upper_triangle(root).float()}


def _bank(moments: Message, slots: Tensor, radii: Tensor) -> Message:
    """Computes the model's bank [K, C] of slots in the frame [K, k], by the rotation that `_statistics` leaves out."""
    left, _, right = torch.linalg.svd(moments["frame"], full_matrices=False)
    return {"memory": (slots @ right.T @ left.T).float().contiguous(), "radii": radii.float().contiguous()}


NOISED_BANK = (*NOISED_FRAME, Projected("subspace", FirstSlots))
"""The exchanges before round 1."""

NOISED_STEPS = (NoisedSlots("slots", ImageSlots),)
"""The exchanges of a round."""
