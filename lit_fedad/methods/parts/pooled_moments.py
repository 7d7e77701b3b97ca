"""Models computed from second moments of features, which clients send once for each stage and the server adds up."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    SUM,
    Client,
    Exchange,
    Free,
    LeaveOut,
    Message,
    MessageSpec,
    NothingNew,
    Predictors,
    Server,
    Sums,
    Task,
    TensorSpec,
    Update,
)
from lit_fedad.contracts.disclosure import DisclosedBy, Disclosures, summed
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError, not_there
from lit_fedad.memory.moments import Moments, MomentSets
from lit_fedad.methods.parts.feature_sums import MomentSums
from lit_fedad.methods.parts.pooled_statistics import check_count
from lit_fedad.tasks.patches import PatchTask


class MomentsClient(Client):
    """A client that sends the moments of each stage of its data once, and can subtract images from the model again.

    Args:
        task: Features, and the model that is computed from their moments.
        local_epochs: Passes over the client's data per round (E).
        keep_optimizer: Whether the optimiser's state is kept between rounds.

    Attributes:
        sets: Number of sets of moments that the task needs.
        vectors_per_image: Number of feature vectors that an image adds to a set.
        measured: The stages whose moments the client has sent, ascending; without stages in which it was not sampled.
        sums: The last message of `ModelSums`.
        pooled: The moments of all clients' images by set, unpacked from `sums` when they are first needed.
        directions: Number of directions that features are projected on under differential privacy.
        noised_share: Share of the variance along these directions that the subspace then keeps.
        frame: The last message of a noised exchange, by which features are projected; empty before.
    """

    needs: ClassVar[type[Task]] = PatchTask
    state_names: ClassVar[tuple[str, ...]] = ("measured",)
    task: PatchTask
    directions: int = 0
    noised_share: float = 1.0

    def __init__(self, task: PatchTask, local_epochs: int = 1, keep_optimizer: bool = False) -> None:
        super().__init__(task, local_epochs, keep_optimizer)
        self.sets, self.vectors_per_image = task.moment_sets, task.vectors_per_image
        self.measured: list[int] = []
        self.sums: Message = {}
        self.pooled: list[Moments] = []
        self.frame: Message = {}

    def choose_directions(self, noised_directions: int, noised_share: float = 0.95) -> None:
        """Sets how many directions of features noised exchanges use, and which share of their variance.

        Raises:
            UserError: If a number is out of range.
        """
        at_least("method.client", 2, noised_directions=noised_directions)
        above("method.client", 0, noised_share=noised_share)
        within("method.client", 0, 1, noised_share=noised_share)
        self.directions = min(noised_directions, self.task.num_features)
        self.noised_share = noised_share

    @property
    def predictors(self) -> Predictors:
        """One model for all clients."""
        return Predictors(shared=True)

    @property
    def moments_disclosed(self) -> Disclosures:
        """What moments disclose: mean and covariance over all images, or over those of each product."""
        if self.task.kinds == 1 or self.sets == 1:
            return (summed("mean and covariance of all patches' features"),)
        return (summed("mean and covariance of the features of each product's patches", by_product=True),)

    def new_moments(self, loader: DataLoader) -> Message:
        """Returns ``count`` [n], ``mean`` [k, C] and ``covariance`` [k, C (C + 1) / 2] of the client's patches.

        n is the number of sets in the first message of each stage, and 0 later, so that no moments are added twice. Of
        these sets, k have patches. The covariance divides by the count, and is packed by `upper_triangle`.
        """
        stage = self.context.stage
        if self.measured and stage <= self.measured[-1]:
            return self.no_sets().message()
        self.measured = [*self.measured, stage]
        return self.moment_sets(loader).message()

    def moment_sets(self, loader: DataLoader) -> MomentSets:
        """Computes the moments of local features by set."""
        return MomentSets.of(self.task.moments(loader), self.task.num_features)

    def no_sets(self) -> MomentSets:
        """Returns moments without any set, for a message without new images."""
        return MomentSets.of((), self.task.num_features)

    def moments_spec(self) -> MessageSpec:
        """Declares the form of `new_moments`."""
        return packed_spec(Free("sets", self.sets), self.sets, self.task.num_features)

    def sums_spec(self) -> MessageSpec:
        """Declares the sums over all clients that the model is computed from; see `MomentsServer.model_sums`."""
        moments = packed_spec(self.sets, self.sets, self.task.num_features)
        measured = TensorSpec((), torch.int64, low=0, high=1)
        return {**{f"sum_{name}": form for name, form in moments.items()}, "measured": measured}

    def holds(self, stage: int) -> bool | None:
        """Returns whether the last message of `ModelSums` holds the images of a stage; see `LeaveOut.holds`."""
        return bool(int(self.sums["measured"])) and stage in self.measured

    def sums_by_set(self) -> MomentSets:
        """Unpacks the moments of all clients' images from the last message of `ModelSums`."""
        return MomentSets.of_message(
            {name: self.sums[f"sum_{name}"] for name in ("count", "mean", "covariance")}
        )

    def refit(self, moments: list[Moments], loader: DataLoader) -> None:
        """Computes the model without the images of a loader.

        Args:
            moments: Moments by set, from which these images have been subtracted already.
            loader: The images to leave out.
        """
        raise not_there(self, "refit")


class MomentsServer(Server):
    """A server that adds up moments.

    Args:
        client: A client, for sizes.

    Attributes:
        moments: ``count``, ``mean`` and ``covariance`` by set, of all images that were measured so far; empty before.
            Under differential privacy, estimates from noised sums (`lit_fedad.methods.parts.noised_subspace`).
        measured: Number of each client's images in these moments, over all of its stages.
        subspace: The entries ``centre`` and ``basis`` of the message to clients, fitted to the moments.
    """

    state_names: ClassVar[tuple[str, ...]] = ("moments", "measured", "subspace")

    def __init__(self, client: MomentsClient) -> None:
        super().__init__()
        self.task: PatchTask = client.task
        self.sets, self.set_vectors = client.sets, client.vectors_per_image
        self.directions, self.noised_share = client.directions, client.noised_share
        self.moments: Message = {}
        self.measured: dict[int, int] = {}
        self.subspace: Message = {}

    def learn(self) -> None:
        """Computes the model from the moments, after they have changed."""
        raise not_there(self, "learn")

    def moment_sets(self) -> MomentSets:
        """Returns the moments by set."""
        return MomentSets(**self.moments)

    def check_moments(self, update: Update, needed: bool = False) -> None:
        """Checks what the form of `MomentsClient.new_moments` cannot say.

        Args:
            update: A client's message.
            needed: Whether moments must be in it.

        Raises:
            UserError: If moments are missing, count more vectors than the client's images have, or have a covariance
                with a negative variance.
        """
        counts, rows = update.message["count"], len(update.message["mean"])
        filled = int(counts.count_nonzero())
        if len(counts) and not filled:
            raise UserError("the client sent moments of no image")
        if rows != filled:
            raise UserError(f"the client sent {rows} sets of moments, and counts patches of {filled}")
        if len(counts) != self.sets and (needed or len(counts)):
            raise UserError(f"the client sent {len(counts)} sets of moments, instead of {self.sets}")
        for count in counts.tolist():
            check_count(count, update.num_samples * self.set_vectors)
        MomentSets.of_message(update.message).check()

    def add_moments(self, updates: Mapping[int, Update]) -> None:
        """Adds the clients' new moments, and learns from them if there are any."""
        received = [MomentSets.of_message(update.message) for update in updates.values()]
        new = [sets for sets in received if len(sets)]
        if not new:
            return
        earlier = [self.moment_sets()] if self.moments else []
        self.moments = dict(vars(MomentSets.union([*earlier, *new])))
        for client, update in updates.items():
            images = update.num_samples if len(update.message["count"]) else 0
            self.measured[client] = self.measured.get(client, 0) + images
        self.learn()

    def model_sums(self, client_id: int) -> Message:
        """Returns the sums that the model is computed from, by set as in `new_moments`: ``sum_count`` and so on.

        ``measured`` says whether this client's images are in the sums.
        """
        measured = not {client_id, SUM}.isdisjoint(self.measured)
        return {
            **{f"sum_{name}": values for name, values in self.moment_sets().message().items()},
            "measured": torch.tensor(int(measured)),
        }


def packed_spec(sets: int | Free, max_filled: int, channels: int) -> MessageSpec:
    """Declares the form of `MomentSets.message`.

    Args:
        sets: Number of sets.
        max_filled: Largest number of sets with vectors.
        channels: Channels C of the features.
    """
    filled = Free("filled", max_filled)
    return {
        "count": TensorSpec((sets,), torch.int64, low=0, counted=True),
        "mean": TensorSpec((filled, channels)),
        "covariance": TensorSpec((filled, channels * (channels + 1) // 2), exact=True),
    }


def subspace_spec(task: PatchTask) -> MessageSpec:
    """Declares the subspaces of normal features by product: ``centre`` [N, C] and ``basis`` [N, C, R]."""
    channels, products = task.num_features, Free("products", task.kinds)
    basis = TensorSpec((products, channels, Free("directions", channels)))
    return {"centre": TensorSpec((products, channels)), "basis": basis}


class PooledMoments(Exchange[MomentsClient, MomentsServer]):
    """The set-up exchange in which clients send the moments of their patches, which the server adds up.

    Args:
        first_stage: Whether only images of the first stage are measured, since rounds send no further moments.
    """

    name = "moments"
    down = False
    joining = "skip"  # a client that joins later sends its moments in its first round
    sums = Sums(lambda client: MomentSums(client.vectors_per_image))

    discloses = DisclosedBy(lambda client: client.moments_disclosed)

    def __init__(self, first_stage: bool = False) -> None:
        self.first_stage = first_stage

    def send(self, client: MomentsClient, loader: DataLoader) -> Message:
        """Returns new moments."""
        return client.new_moments(loader)

    def upload_spec(self, client: MomentsClient) -> MessageSpec:
        """Declares new moments."""
        return client.moments_spec()

    def validate(self, server: MomentsServer, client_id: int, update: Update) -> None:
        """Checks the moments; see `MomentsServer.check_moments`."""
        server.check_moments(update, needed=not server.moments)

    def aggregate(self, server: MomentsServer, updates: Mapping[int, Update]) -> None:
        """Adds the moments up."""
        server.add_moments(updates)


class NewMoments(PooledMoments):
    """The exchange of a round: clients receive the model, and send the moments of a stage that has begun, if any."""

    down = True
    sums = Sums(
        lambda client: MomentSums(client.vectors_per_image),
        # Under differential privacy there are no stages: rounds bring no image that was not measured before.
        lambda client: NothingNew(client.no_sets().message()),
    )


class ModelSums(LeaveOut[MomentsClient, MomentsServer]):
    """The exchange after the rounds in which clients receive the model, and the sums that it was computed from."""

    name = "sums"

    def broadcast(self, server: MomentsServer, client_id: int) -> Message:
        """Returns model and sums."""
        return {**server.broadcast(client_id), **server.model_sums(client_id)}

    def broadcast_spec(self, client: MomentsClient) -> MessageSpec:
        """Declares model and sums."""
        return {**client.broadcast_spec(), **client.sums_spec()}

    def receive(self, client: MomentsClient, message: Message) -> None:
        """Loads the model, and keeps the sums."""
        client.receive(message)
        client.sums, client.pooled = message, []

    def holds(self, client: MomentsClient, stage: int) -> bool | None:
        """Returns whether all sums of the model hold the images of a stage; see `LeaveOut.holds`."""
        return client.holds(stage)

    def leave_out(self, client: MomentsClient, loader: DataLoader) -> None:
        """Subtracts the images of a loader from the model.

        Raises:
            UserError: If no image remains.
        """
        client.pooled = remaining = client.pooled or list(client.sums_by_set())
        if int(client.sums["measured"]):
            left_out = client.task.moments(loader)
            remaining = [total.without(own) for total, own in zip(remaining, left_out, strict=True)]
        if not any(moments.count for moments in remaining):
            raise UserError("no vector remains when a client's own are left out")
        client.refit(remaining, loader)
