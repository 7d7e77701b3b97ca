"""FedDyMem: clients share a small bank of normal patch features instead of weights (arXiv 2502.21012).

Each client trains a personal head against the shared memory, and sends its patches compressed to a memory of its own.
The server clusters the clients' memories to the next shared one. The method as printed in the paper,
`feddymem_literal`, collapses: FedDyMem Eq. 14, FedDyMem Eq. 15 and FedDyMem Eq. 16 average slots by position, but
k-means returns slots in arbitrary order.
`lit_fedad.methods.federated_bank` extends client and server to a bank of sums without a head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Evidence,
    Exchange,
    Exchanges,
    Free,
    Message,
    MessageSpec,
    Predictors,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.disclosure import Disclosure, Kind
from lit_fedad.contracts.randomness import seeded
from lit_fedad.core.bounds import at_least
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.federation.message_check import TINY
from lit_fedad.federation.receiver import FAR
from lit_fedad.memory.merge import Aggregation, agreement, merge_radii
from lit_fedad.methods.parts.bank_evidence import (
    bank_received,
    bank_sent,
    invertible_memory,
    predict_with_bank,
)
from lit_fedad.methods.parts.pooled_moments import MomentsClient, MomentsServer, PooledMoments
from lit_fedad.methods.parts.pooled_statistics import (
    PooledThreshold,
    check_slots,
    load_statistics,
    pool_channels,
    standardised,
    statistics_spec,
)
from lit_fedad.tasks.memory_bank import MemoryBank

_MIN_SPREAD = 0.5
"""Share of the memory's initial spread below which the server warns of a collapse."""

MEMORY = Disclosure(Kind.PATCHES, "mean features of groups of similar patches (a group may be one patch)")
"""What a memory tells of a client's images."""


class FedDyMemClient(MomentsClient):
    """A client that uploads its patches compressed to a memory, and trains a head, if any, against the shared one.

    Head and optimiser are personal: they are never averaged (FedDyMem Alg. 5). The memory is made of the trained head's
    features. In FedDyMem Alg. 5 it is made of those of the last epoch's steps, each computed before its step; the
    paper's text says that it is updated after training.

    Args:
        task: Features, head, loss and bank.
        local_epochs: Passes over the client's data per round (E).
        keep_optimizer: Whether the optimiser's state is kept between rounds.
        send_counts: Whether each slot's numbers of patches and images and its radius are sent too.
        independent_init: Whether every client draws its own initial head, as printed in FedDyMem Alg. 4. Features of
            different clients are then not comparable: a stress test, not a useful setting.

    Raises:
        UserError: If the task has a subspace, which `federated_bank` alone fits.
    """

    needs = MemoryBank
    state_names: ClassVar[tuple[str, ...]] = ("head", "drew_head")
    discloses = (MEMORY,)
    takes_subspace: ClassVar[bool] = False
    task: MemoryBank

    def __init__(
        self,
        task: MemoryBank,
        local_epochs: int = 1,
        keep_optimizer: bool = True,
        send_counts: bool = False,
        independent_init: bool = False,
    ) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        if task.subspace is not None and not self.takes_subspace:
            raise UserError(
                f"task.subspace={task.subspace}: a memory of FedDyMem has none; give method=federated_bank, or"
                " task.subspace=null"
            )
        self.send_counts = send_counts
        self.independent_init = independent_init
        self.drew_head = False

    @property
    def pools_threshold(self) -> bool:
        """Whether the threshold of the head's loss is a median distance, which the server pools from the clients'."""
        return self.task.head is not None and isinstance(self.task.loss.threshold, str)

    @property
    def predictors(self) -> Predictors:
        """One model for all clients if there is no head, or no head has been trained: all else is shared."""
        return Predictors(shared=self.task.head is None, shared_at_first=not self.independent_init)

    @property
    def head(self) -> dict[str, Tensor]:
        """Weights of the personal head; empty where the task has no head."""
        return {} if self.task.head is None else self.task.head.state_dict()

    @head.setter
    def head(self, weights: Mapping[str, Tensor]) -> None:
        if self.task.head is not None:
            self.task.head.load_state_dict(weights)

    def receive(self, message: Message) -> None:
        """Loads statistics, memory and threshold, as far as the message holds them.

        With ``independent_init`` a client first draws its head when it receives its first message.
        """
        task = self.task
        if self.independent_init and not self.drew_head and task.head is not None:
            with seeded(self.context.seed, "head", client=self.context.client):
                task.head.reset_parameters()  # type: ignore[operator]
        self.drew_head = True
        load_statistics(task, message)
        if "memory" in message:
            task.load_memory(message["memory"], message.get("radii"))
        if "threshold" in message:
            task.threshold = message["threshold"].to(task.threshold)

    def broadcast_spec(self) -> MessageSpec:
        """Declares all that the server sends; in the paper this is the memory alone, float32 [slots, C]."""
        threshold = {"threshold": TensorSpec((), low=0)} if self.pools_threshold else {}
        return {**self.features_spec(), **self.memory_spec("radii"), **threshold}

    def features_spec(self) -> MessageSpec:
        """Declares pooled statistics, as far as the task uses them."""
        return statistics_spec(self.task)

    def send(self, loader: DataLoader) -> Message:
        """Returns the client's patches compressed to a memory, which updates the shared one."""
        reduced = self.task.reduce_memory(loader, self.context, self.task.memory)
        return reduced.message(self.sent_per_slot())

    def upload_spec(self) -> MessageSpec:
        """Declares a memory, float32 [slots, C]."""
        return self.memory_spec(*self.sent_per_slot())

    def first_memory(self, loader: DataLoader, names: Sequence[str], vectors: int | None = None) -> Message:
        """Returns the first memory of the client's patches. Its radii are distances to its own vectors.

        Args:
            loader: The client's batches.
            names: Names of the values of each slot that are sent with the memory.
            vectors: Number of vectors; None for as many as the bank has slots.
        """
        return self.task.reduce_memory(loader, self.context, None, vectors).message(names)

    def sent_per_slot(self) -> list[str]:
        """Lists the names of the values of each slot that are sent with a memory."""
        return ["counts", "radii", "image_counts"] if self.send_counts else []

    def memory_spec(self, *per_slot: str, slots: int | Free | None = None) -> MessageSpec:
        """Declares a memory, and the values of each slot where they are sent."""
        rows = self.task.slots if slots is None else slots
        forms = {
            "counts": TensorSpec((rows,), low=0, counted=True),
            "radii": TensorSpec((rows,), low=0),
            "image_counts": TensorSpec((rows,), torch.int64, low=0, counted=True),
        }
        values = {name: forms[name] for name in per_slot} if self.send_counts else {}
        return {"memory": TensorSpec((rows, self.task.num_features), unordered=True), **values}


class FedDyMemServer(MomentsServer):
    """The server, which merges the uploaded memories to the next one (FedDyMem Alg. 3).

    Args:
        client: A client, for sizes.
        aggregation: Aggregation of N memories to one.
        prior_patches: Number of patches at the usual distance that are added to the patches of each slot when its
            radius is computed, so that slots of few patches do not seem narrow.
        radius_images: Fewest different images with which the patches of a slot determine its radius (`merge_radii`).

    Raises:
        UserError: If a number is out of range, or counts are needed and not sent.
    """

    state_names: ClassVar[tuple[str, ...]] = ("statistics", "known", "first_spread", "latest")
    merges_sums = False
    task: MemoryBank

    def __init__(
        self,
        client: FedDyMemClient,
        aggregation: Aggregation,
        prior_patches: float = 0.0,
        radius_images: int = 1,
    ) -> None:
        super().__init__(client)
        at_least("method.server", 0, prior_patches=prior_patches)
        at_least("method.server", 1, radius_images=radius_images)
        self.counted, self.slots = client.send_counts, client.task.slots
        scored = client.task.image_score is not None
        if not self.counted and (scored or aggregation.needs_counts or prior_patches or radius_images > 1):
            raise UserError(
                "method.client.send_counts=false: nobody sends slots' counts and radii; give task.image_score=null,"
                " and in method.server aggregation.weighted=false prior_patches=0 radius_images=1"
            )
        # In a bank by position every slot counts every image, so that an image is counted `slots` times.
        self.counts_per_image = max(client.task.vectors_per_image, self.slots)
        self.aggregation, self.prior_patches, self.radius_images = aggregation, prior_patches, radius_images
        self.statistics: Message = {}
        self.known: Message = {}
        self.first_spread: float | None = None
        self.latest: dict[str, float] = {}

    def learn(self) -> None:
        """Computes the statistics of features, only once: the memory consists of features standardised by them."""
        if standardised(self.task) and not self.statistics:
            self.statistics = self.task.statistics_of(next(iter(self.moment_sets())))

    def broadcast(self, client_id: int) -> Message:
        """Returns statistics, memory and threshold as far as they exist, the same to every client."""
        return {**self.statistics, **self.known}

    def validate(self, client_id: int, update: Update) -> None:
        """Checks the counts of the slots."""
        if self.counted:
            self.check_counts(update.message, update.num_samples, update.num_samples)

    def check_counts(self, message: Message, max_images: int, min_images: int) -> None:
        """Checks the counts of a memory that was computed from ``min_images`` to ``max_images`` images."""
        check_slots(message, max_images, self.set_vectors, self.counts_per_image, min_images)

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges memories, and the radii of their slots."""
        messages = [update.message for update in updates.values()]
        memory = self.merge(messages, self.known.get("memory"))
        if self.counted:
            radii = merge_radii(messages, memory.to(self.device), self.prior_patches, self.radius_images)
            self.known["radii"] = radii.cpu()
        self.known["memory"] = memory

    def merge(self, messages: list[Message], previous: Tensor | None) -> Tensor:
        """Merges memories to one [slots, C], and measures its spread.

        Args:
            messages: The clients' memories.
            previous: The slots [slots, C] that the clients' patches were assigned to; None before the first memory.
        """
        device, generator = self.device, self.context.generator("aggregate")
        vectors = torch.cat([m["memory"] for m in messages]).to(device)
        counts = torch.cat([m.get("counts", torch.ones(len(m["memory"]))) for m in messages]).to(device)
        last = None if previous is None else previous.to(device)
        memory = self.aggregation(vectors, counts, self.slots, last, generator).contiguous()
        spread = float(memory.var(0, correction=0).sum().sqrt())
        self.first_spread = self.first_spread or spread
        self.latest = {"memory_spread": spread}
        if (agreed := agreement(vectors[counts > 0], memory)) is not None:
            self.latest["client_agreement"] = agreed
        return memory.cpu()

    def diagnostics(self) -> dict[str, float]:
        """Returns the memory's spread (root of the summed slot variance) and the agreement of the clients."""
        return dict(self.latest)

    def warnings(self) -> list[str]:
        """Returns one line in each round in which training has collapsed the memory; without a head nothing trains."""
        spread, first = self.latest.get("memory_spread"), self.first_spread
        if self.task.head is None or spread is None or first is None or spread >= _MIN_SPREAD * first:
            return []
        shrunk = f"its spread is {spread / first:.0%} of what it was at first"
        return [f"round {self.context.round}: the memory is collapsing: {shrunk}"]


class FirstMemory(Exchange[FedDyMemClient, FedDyMemServer]):
    """The set-up exchange in which clients send memories of features of the untrained head; the server merges them."""

    name = "memory"
    joining = "skip"

    def broadcast_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares the statistics of features: there is no memory yet."""
        return client.features_spec()

    discloses = (MEMORY,)

    def send(self, client: FedDyMemClient, loader: DataLoader) -> Message:
        """Returns a first memory."""
        return client.first_memory(loader, client.sent_per_slot())

    def upload_spec(self, client: FedDyMemClient) -> MessageSpec:
        """Declares a first memory; its radii are checked against its own vectors, not against other clients' radii.

        A client of one or two images may have a slot for every patch. Its radii are then 0, which says nothing about
        the radii of other clients.
        """
        spec = client.memory_spec(*client.sent_per_slot())
        return {name: replace(form, counted=form.counted or name == "radii") for name, form in spec.items()}

    def validate(self, server: FedDyMemServer, client_id: int, update: Update) -> None:
        """Checks the counts of the slots, and that no radius is far larger than the longest vector of the memory."""
        super().validate(server, client_id, update)
        if "radii" in (message := update.message):
            radius, length = float(message["radii"].max()), float(message["memory"].norm(dim=1).max())
            if radius > FAR * max(length, TINY):
                raise UserError(f"sent a radius of {radius:g}, with no vector longer than {length:g}")


def exchanges(client: FedDyMemClient) -> Exchanges:
    """Lists statistics where the task requires them, the first memory, a pooled threshold if used; then training."""
    task, statistics = client.task, list[Exchange]()
    if task.measures:
        statistics = [PooledMoments(first_stage=True)]
    elif task.standardise:
        statistics = [pool_channels(task)]
    threshold = (PooledThreshold(task.loss.neighbours),) if client.pools_threshold else ()
    return Exchanges(
        (*statistics, FirstMemory(), *threshold),
        (Train(),),
        evidence=Evidence(bank_sent, bank_received, predict_with_bank, invertible_memory),
    )
