"""Federated bank: mean patches by slot and a subspace of all features, from sums over all clients.

Nothing is trained. Clients send moments of their features once. Then, in every round, they send sums of their patches
by slot of the shared bank: each round is a step of Lloyd's algorithm. Anomaly maps are distances to the bank; image
scores add residuals outside the subspace of a product (SubspaceAD, arXiv 2602.23013). The first slots are k-means
centres of some patches of every client. Or they are drawn from the moments: then no client sends a vector of its own,
and all messages can be masked. Differential privacy needs other sums, to which noise can be added
(`lit_fedad.methods.parts.noised_bank`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    SUM,
    Exchanges,
    Free,
    Message,
    MessageSpec,
    Sums,
    TensorSpec,
    Update,
    senders,
)
from lit_fedad.contracts.disclosure import Disclosures
from lit_fedad.contracts.message import LARGEST_SQUARES
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.memory.merge import Aggregation, merge_radii, pooled_radii, shared_slots
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.reduce import PositionReduce, Reduced
from lit_fedad.memory.slot_sums import SlotSums, carried, copies_apart, draw_slots, split_fullest
from lit_fedad.methods import feddymem
from lit_fedad.methods.feddymem import MEMORY, FedDyMemClient, FedDyMemServer, FirstMemory
from lit_fedad.methods.parts.feature_sums import MomentSums, SlotMeans
from lit_fedad.methods.parts.noised_bank import NOISED_BANK, NOISED_STEPS
from lit_fedad.methods.parts.pooled_moments import ModelSums, PooledMoments, subspace_spec
from lit_fedad.tasks.memory_bank import MemoryBank


def made_of_sums(task: MemoryBank) -> bool:
    """Returns whether bank and subspace follow from sums, so that images can be subtracted from them again."""
    fixed_share = task.subspace is not None and not isinstance(task.subspace, str)
    return task.head is None and task.reduce.adds_up and fixed_share


class FederatedBankClient(FedDyMemClient):
    """A client that sends moments of its features once, then sums of its patches by slot.

    Args:
        task: Features, bank and subspace, both made of sums.
        slots_from_moments: Whether the first slots are drawn from the moments. Each round then replaces a slot with too
            few images by half of a full one.
        oversampling: Vectors that all clients together send for the first memory, as a multiple of its slots; unused
            if slots are drawn.
        min_images: Fewest different images, over all clients, whose patches every slot of the shared memory must have
            from round 1 on. Under differential privacy the noised count of a slot must exceed this number by three
            standard deviations of the noise.
        noised_directions: Number of directions that features are projected on under differential privacy.
        noised_share: Share of the variance along these directions that the subspace then keeps.

    Raises:
        UserError: If a number is out of range, or the task's bank is by position or not made of sums.
    """

    state_names: ClassVar[tuple[str, ...]] = ("sent", "past", "summed", "judged_by")
    takes_subspace = True

    def __init__(
        self,
        task: MemoryBank,
        slots_from_moments: bool = False,
        oversampling: float = 1.5,
        min_images: int = 2,
        noised_directions: int = 48,
        noised_share: float = 0.95,
    ) -> None:
        super().__init__(task, send_counts=True)
        self.choose_directions(noised_directions, noised_share)
        if isinstance(task.reduce, PositionReduce):
            raise UserError(
                "the slots of the first memory are divided among clients, and a bank by position has one for each"
                " patch: give task=memory_bank_sums"
            )
        at_least("method.client", 1, oversampling=oversampling, min_images=min_images)
        if slots_from_moments:
            at_least("method.client", 2, min_images=min_images)
            if not (task.measures and made_of_sums(task)):
                raise UserError(
                    "a drawn memory needs a bank and a subspace of sums: give task=memory_bank_sums"
                )
        self.slots_from_moments = slots_from_moments
        self.oversampling, self.min_images = oversampling, min_images
        self.first_vectors = task.slots
        # For data in stages: `sent` are the sums that the client sent last, `past` those of other stages among them
        # (`carried`), and `summed` the stages whose images `sent` holds.
        self.sent: dict[str, Tensor] = {}
        self.past: dict[str, Tensor] = {}
        self.summed: list[int] = []
        # Numbers of the subspaces (`_subspace_number`) that judged the patches in the last upload.
        self.judged_by: list[int] = []

    def receive(self, message: Message) -> None:
        """Loads statistics, subspaces and bank, as far as the message holds them."""
        super().receive(message)
        if "basis" in message:
            self.task.load_subspace(message["centre"], message["basis"])

    def features_spec(self) -> MessageSpec:
        """Declares pooled statistics and the subspaces of normal features, as far as the task uses them."""
        subspaces = {} if self.task.subspace is None else subspace_spec(self.task)
        return {**super().features_spec(), **subspaces}

    @property
    def discloses(self) -> Disclosures:  # type: ignore[override]
        """What uploads disclose: a memory and, with a subspace, moments of the features of new images."""
        moments = () if self.task.subspace is None else self.moments_disclosed
        since = "of images since the last round"
        return MEMORY, *(replace(part, what=f"{part.what}, {since}") for part in moments)

    def send(self, loader: DataLoader) -> Message:
        """Returns the client's patches summed by slot, including those of earlier stages, and new moments."""
        self.past, is_new = carried(self.sent, self.past, stage := self.context.stage)
        past = Reduced(*(self.past[name] for name in Reduced._fields)) if self.past else None
        anchors, images = anchors_of(self, self.task.memory), loader if is_new else ()
        reduced = self.task.reduce_memory(images, self.context, anchors, past=past)
        if self.task.reduce.adds_up:
            self.judged_by = sorted({*(self.judged_by if past else ()), self._subspace_number()})
            stages = torch.tensor(max(stage + 1, int(self.past.get("stages", 0))))
            self.sent = {**reduced._asdict(), "stages": stages}
            self.summed = sorted({*self.summed, stage}) if is_new else self.summed
        moments = {} if self.task.subspace is None else self.new_moments(loader)
        return {**reduced.message(self.sent_per_slot()), **moments}

    def upload_spec(self) -> MessageSpec:
        """Declares the sums by slot, which are sent as means and counts, and new moments if the task has a subspace."""
        moments = {} if self.task.subspace is None else self.moments_spec()
        return {**super().upload_spec(), **moments}

    def sent_at_first(self) -> list[str]:
        """Lists the names of the values of each slot that are sent with the first memory; a subspace needs no radii."""
        return ["counts", "radii"] if self.task.subspace is None else ["counts"]

    def sent_per_slot(self) -> list[str]:
        """Lists the names of the values of each slot that are sent with a memory."""
        return ["counts", "radii", *(["image_counts"] if self.min_images > 1 else [])]

    def sums_spec(self) -> MessageSpec:
        """Declares the sums that the model is computed from."""
        slots = self.task.slots
        rows = TensorSpec((slots, self.task.num_features), unordered=True)
        sums = TensorSpec((slots,), low=0)
        return {
            **super().sums_spec(),
            "anchors": rows,
            "sum_memory": rows,
            "sum_counts": sums,
            "sum_squares": TensorSpec((slots,), low=0, high=LARGEST_SQUARES),
            "sum_images": TensorSpec((slots,), torch.int64, low=0),
            "counted": TensorSpec((), torch.int64, low=0, high=1),
        }

    def holds(self, stage: int) -> bool | None:
        """Returns whether the sums hold the images of a stage; None if moments and slots differ in this."""
        in_moments = super().holds(stage)
        return in_moments if not int(self.sums["counted"]) or in_moments == (stage in self.summed) else None

    def refit(self, moments: list[Moments], loader: DataLoader) -> None:
        """Subtracts images of the client from bank, radii and subspace.

        The statistics that standardise and whiten features do not change, since the bank consists of such features.
        Radii do not change either if another subspace than the present one has judged the images.
        """
        task, message = self.task, self.sums
        names = ("anchors", "sum_memory", "sum_counts", "sum_squares", "sum_images")
        sums = SlotSums(*(message[name].cpu() for name in names))
        if int(message["counted"]):
            anchors = message["anchors"].to(task.memory)
            # The moments of new images change the subspace only after the subspace has judged these images.
            same_values = self.judged_by == [self._subspace_number()]
            sums = sums.without(task.reduce_memory(loader, self.context, anchors), same_values)
        task.load_memory(*sums.bank(self.min_images))
        task.load_subspace(**task.fit_subspace(moments, task.loaded_statistics()))

    def _subspace_number(self) -> int:
        """Returns a number that identifies the task's subspace, the same on every device."""
        return int(self.task.basis.float().cpu().contiguous().view(torch.int32).sum())


class FederatedBankServer(FedDyMemServer):
    """The server, which computes the bank from the sum of the uploads, and may draw the first slots from the moments.

    Args:
        client: A client, for sizes.
        aggregation: Aggregation of N memories to one.

    Attributes:
        slots_of: The sums of the last round by slot, as `FederatedBankClient.sums_spec` names them.
        counted_clients: The clients whose patches are in these sums.
        summed: Number of each client's images that slots have counted, over all its stages.
        held: Number of images that each client has, over all its stages.
    """

    state_names: ClassVar[tuple[str, ...]] = ("slots_of", "counted_clients", "summed")
    admits = True  # only the first memory depends on the number of clients

    def __init__(self, client: FederatedBankClient, aggregation: Aggregation) -> None:
        super().__init__(client, aggregation)
        self.min_images, self.oversampling, self.clients = client.min_images, client.oversampling, 1
        self.slots_of: Message = {}
        self.counted_clients: list[int] = []
        self.summed: dict[int, int] = {}
        self.held: Mapping[int, int] = {}
        self.slots_from_moments = client.slots_from_moments

    @property
    def merges_sums(self) -> bool:  # type: ignore[override]
        """Whether memories are merged by adding up the clients' patches."""
        return self.aggregation.adds_up

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Keeps the number of clients, among which the first memory is divided, and of the images of each."""
        self.held, self.clients = dict(sizes), len(sizes)

    @property
    def first_vectors(self) -> int:
        """Number of vectors that each client sends for the first memory."""
        return min(self.slots, math.ceil(self.oversampling * self.slots / self.clients))

    def model_sums(self, client_id: int) -> Message:
        """Returns the sums that the model is computed from, and whether the slots count patches of this client."""
        counted = torch.tensor(int(client_id in self.counted_clients))
        return {**super().model_sums(client_id), **self.slots_of, "counted": counted}

    def learn(self) -> None:
        """Computes the subspaces of all features so far; the first time also statistics, and a drawn first memory."""
        super().learn()
        if self.task.subspace is not None:
            self.subspace = self.task.fit_subspace(list(self.moment_sets()), self.statistics)
        if self.slots_from_moments and not self.known:
            generator = self.context.generator("memory")
            memory = draw_slots(next(iter(self.moment_sets())), self.statistics, self.slots, generator)
            self.known = {"memory": memory, "radii": torch.ones(self.slots)}

    def broadcast(self, client_id: int) -> Message:
        """Returns statistics, subspaces and bank as far as they exist, the same to every client."""
        return {**super().broadcast(client_id), **self.subspace}

    def validate(self, client_id: int, update: Update) -> None:
        """Checks the counts of the slots, and new moments."""
        self.check_counts(update.message, *self._images(client_id, update))
        if "covariance" in update.message:
            self.check_moments(update)

    def _images(self, client_id: int, update: Update) -> tuple[int, int]:
        """Returns the most and the fewest images that slots may count: sums include images of earlier stages."""
        images = update.num_samples
        if not self.task.reduce.adds_up:
            return images, images
        # The exact number is known only for a single client: a sum does not tell whose images were counted before.
        if self.task.subspace is not None and client_id != SUM:
            summed_before = self.summed.get(client_id)  # without stages in which the client was not sampled
            new = images if summed_before is None or len(update.message.get("count", ())) else 0
            summed = max(images, (summed_before or 0) + new)
            return summed, summed
        held = sum(self.held.get(client, 0) for client in update.clients or (client_id,))
        return max(images, held), images

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges memories and radii, and adds up new moments.

        If slots are drawn, copies of full slots replace those with too few images; copies move apart in the next round.
        """
        messages = [update.message for update in updates.values()]
        previous = anchors_of(self, self.known["memory"]) if "memory" in self.known else None
        memory = self.merge(messages, previous)
        if previous is None:
            self.known = {"memory": memory, "radii": self._radii(messages, memory)}
            return
        nearest_slot = self._place_slots(updates, memory, previous)
        memory = memory[nearest_slot]
        radii = self._radii(messages, memory, nearest_slot)
        if self.task.subspace is not None:
            self.summed |= {client: self._images(client, update)[0] for client, update in updates.items()}
            self.add_moments(updates)
        if self.slots_from_moments:
            enough = self.slots_of["sum_images"] >= self.min_images
            origin = split_fullest(self.slots_of["sum_counts"], enough)
            memory, radii = memory[origin], radii[origin]
        self.known = {"memory": memory, "radii": radii}

    def _place_slots(self, updates: Mapping[int, Update], memory: Tensor, anchors: Tensor) -> Tensor:
        """Keeps the sums; returns which slot fills each place [slots]: for one of too few images the nearest other."""
        messages = [update.message for update in updates.values()]
        if made_of_sums(self.task):
            self.slots_of, self.counted_clients = _slot_sums(messages, memory, anchors), senders(updates)
        if self.min_images == 1:
            return torch.arange(self.slots)
        images = torch.stack([message["image_counts"] for message in messages]).sum(0)
        return shared_slots(memory, images, self.min_images)

    def _radii(self, messages: list[Message], memory: Tensor, place: Tensor | None = None) -> Tensor:
        if self.task.subspace is None:
            return merge_radii(messages, memory.to(self.device)).cpu()
        if place is None:  # radii are residuals by slot here, and no client knows the slots yet
            return torch.ones(self.slots)
        counts, radii = (torch.cat([m[name] for m in messages]) for name in ("counts", "radii"))
        squares, slots = radii.double().square(), place.repeat(len(messages))
        return pooled_radii(counts, squares, slots, self.slots)[place]


class FirstVectors(FirstMemory):
    """The set-up exchange in which each client sends some vectors, and the server clusters them to the first memory."""

    def broadcast(self, server: FederatedBankServer, client_id: int) -> Message:  # type: ignore[override]
        """Returns statistics and subspace, and the number of vectors to send."""
        return {**server.broadcast(client_id), "vectors": torch.tensor(server.first_vectors)}

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares the form of `broadcast`."""
        return {
            **client.features_spec(),
            "vectors": TensorSpec((), torch.int64, low=1, high=client.task.slots),
        }

    def receive(self, client: FederatedBankClient, message: Message) -> None:  # type: ignore[override]
        """Loads the message."""
        client.receive(message)
        client.first_vectors = int(message["vectors"])

    discloses = (MEMORY,)

    def send(self, client: FederatedBankClient, loader: DataLoader) -> Message:  # type: ignore[override]
        """Returns as many vectors as the server asked for."""
        return client.first_memory(loader, client.sent_at_first(), client.first_vectors)

    def upload_spec(self, client: FederatedBankClient) -> MessageSpec:  # type: ignore[override]
        """Declares a memory of as many vectors as the server asked for."""
        return client.memory_spec(*client.sent_at_first(), slots=Free("vectors", client.task.slots))

    def validate(self, server: FederatedBankServer, client_id: int, update: Update) -> None:  # type: ignore[override]
        """Checks the number of vectors, and the counts of the slots."""
        vectors = len(update.message["memory"])
        if vectors != server.first_vectors:
            raise UserError(f"the client sent {vectors} vectors instead of {server.first_vectors}")
        server.validate(client_id, update)


def anchors_of(side: FederatedBankClient | FederatedBankServer, memory: Tensor) -> Tensor:
    """Returns the slots that patches are assigned to, the same on both sides; copies in a drawn memory move apart."""
    return (
        copies_apart(memory, side.context.common.generator("copies")) if side.slots_from_moments else memory
    )


def _slot_sums(messages: list[Message], memory: Tensor, anchors: Tensor) -> Message:
    """Adds up counts, squares and images by slot; returns them with the merged memory and the anchors [slots, C]."""
    counts = torch.stack([m["counts"].double() for m in messages])
    squares = counts * torch.stack([m["radii"].double().square() for m in messages])
    images = torch.stack([m.get("image_counts", m["counts"]).long() for m in messages])
    return {
        "anchors": anchors,
        "sum_memory": memory.clone(),  # no two tensors of a message share memory
        "sum_counts": counts.sum(0).float(),
        "sum_squares": squares.sum(0).float(),
        "sum_images": images.sum(0),
    }


def exchanges(client: FederatedBankClient) -> Exchanges:
    """Lists moments and the first memory, then a Lloyd step a round; under differential privacy noised sums instead."""
    task, inherited = client.task, feddymem.exchanges(client)
    replaced = {
        "moments": (PooledMoments(first_stage=task.subspace is None),),
        "memory": () if client.slots_from_moments else (FirstVectors(),),
    }
    sums = None
    if task.head is None and task.reduce.adds_up:
        moments = None if task.subspace is None else MomentSums(task.vectors_per_image)
        means = SlotMeans(max(task.vectors_per_image, task.slots), moments)
        sums = Sums(lambda client: means)
    return replace(
        inherited,
        setup=tuple(
            chain.from_iterable(replaced.get(exchange.name, (exchange,)) for exchange in inherited.setup)
        ),
        rounds=(Train(sums),),
        leave_out=ModelSums() if made_of_sums(task) else None,
        noised=Exchanges(NOISED_BANK, NOISED_STEPS) if client.slots_from_moments else None,
    )
