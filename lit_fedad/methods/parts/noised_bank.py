"""The exchanges that find a bank of normal features under differential privacy: noised sums of patches by slot.

Slots are vectors in the few public directions on which features are projected for the noised subspace. The first slots
are drawn from the noised moments. In each round images add their patches by slot, and noise is added to the sums over
all images: a step of Lloyd's algorithm under differential privacy (Blum, Dwork, McSherry and Nissim, PODS 2005). A
further sum gives the usual residual at each slot. The server's ``moments`` then also have ``slots`` [K, k], the slots
to which the next round assigns patches, in the public frame, and ``unit``, the usual length of residuals.
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
"""Standard deviations of the noise by which a count must exceed the fewest images, so that it is not noise alone."""

PRIOR = 10.0
"""Weight of the mean of all slots in the mean square of each slot, in standard deviations of the noise."""


class ImageSlots(ProjectedSums):
    """The sums ``counts`` [K], ``offsets`` [K, k] and ``squares`` [K] over the patches g that are nearest to slot m_k.

    An image with P patches adds ``n_k / P``, ``sum (g - m_k) / P`` and ``sum |B^T g|^2 / P``, divided by the length of
    all three together. Offsets are in units of the usual length of features, squares in units of the mean square
    residual.

    Args:
        client: See `ProjectedSums`; its ``frame`` also holds ``slots`` m [K, k], and ``outside`` B [k, R]: the
            directions outside the subspace, divided by the usual length of residuals.

    Raises:
        UserError: If the task's bank does not consist of averaged, whitened features at Euclidean distances.
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
        assigned = nearest(projected.flatten(0, 1), slots, 1)[1].view(projected.shape[:2])
        shares = F.one_hot(assigned, len(slots)).to(projected).mT / projected.shape[1]
        counts = shares.sum(2)
        squares = (projected @ outside).square().sum(2, keepdim=True)
        return {
            "counts": counts,
            "offsets": shares @ projected - counts[:, :, None] * slots,
            "squares": (shares @ squares)[:, :, 0],
        }

    def from_sums(self, server: Any, sums: Mapping[str, Tensor], noise: float) -> Message:
        """Computes counts, steps and mean squares of the slots from the noised sums.

        An image adds at most 1 to a count, so that a slot has patches of at least as many images as it counts.

        Returns:
            ``shown``: whether a slot's count exceeds ``server.min_images`` by `DEVIATIONS` of the noise, bool [K];
            ``counts`` [K]; ``steps`` [K, k] from the slots to the mean of their patches, shrunk by the share of noise
            in them (James and Stein 1961); ``squares`` [K]: mean squares of residuals, shrunk towards the mean of all
            slots (`PRIOR`).

        Raises:
            HiddenByNoiseError: If no slot's count is that large.
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
        """Moves slots to the mean of their patches; the nearest shown slot takes the place of one that is not shown."""
        moments, shown = server.moments, results["shown"]
        slots = torch.where(shown[:, None], moments["slots"] + results["steps"], moments["slots"])
        shared = shared_slots(slots, shown.long(), 1)
        radii = moments["unit"] * results["squares"].sqrt()
        server.known = _bank(moments, slots[shared], radii[shared])
        server.latest = {"shown_slots": float(shown.sum())}
        with_copies = slots[split_fullest(results["counts"], shown)]
        next_slots = copies_apart(with_copies.float(), server.context.common.generator("copies"))
        server.moments = {**moments, "slots": next_slots.double()}


class FirstSlots(LastProducts):
    """The sum of products to which the subspace is fitted, and from which the first slots are drawn."""

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
        """Returns the model, and the frame, slots and directions by which clients assign and measure patches."""
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
        """Loads the model, and keeps frame, slots and directions for this exchange."""
        client.receive(message)
        super().receive(client, message)


def _statistics(moments: Message) -> Message:
    """Computes the model's statistics, which standardise features as the frame A does, up to a rotation.

    Their whitening is ``(A A^T)^(1/2)``.
    """
    left, lengths, _ = torch.linalg.svd(moments["frame"], full_matrices=False)
    root = (left * lengths) @ left.T
    centre = moments["centre"].float()
    return {"mean": centre, "scale": torch.ones_like(centre), "whitening": upper_triangle(root).float()}


def _bank(moments: Message, slots: Tensor, radii: Tensor) -> Message:
    """Computes the model's bank [K, C] from slots in the frame [K, k], by the rotation left out of `_statistics`."""
    left, _, right = torch.linalg.svd(moments["frame"], full_matrices=False)
    return {"memory": (slots @ right.T @ left.T).float().contiguous(), "radii": radii.float().contiguous()}


NOISED_BANK = (*NOISED_FRAME, Projected("subspace", FirstSlots))
"""The exchanges before round 1 that find a noised subspace and the first slots."""

NOISED_STEPS = (NoisedSlots("slots", ImageSlots),)
"""The exchanges of a round, which move the slots."""
