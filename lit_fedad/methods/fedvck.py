"""FedVCK: condensation of images that the model predicts wrongly (Yan et al., AAAI 2025).

FedDM with four changes: images that the model predicts wrongly are drawn more often; synthetic images are normalised by
the statistics of real ones; the server keeps the images of earlier rounds; and a contrastive loss separates classes
that the model confuses, as the clients' mean logits show.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.condensation.batch_statistics import apply, check_encoder, record, unconstrained
from lit_fedad.condensation.condense import RealBatch
from lit_fedad.condensation.kernels import Kernel, class_mmd
from lit_fedad.condensation.relations import (
    RelationalContrast,
    class_means,
    hard_negatives,
    importance,
    merged_prototypes,
)
from lit_fedad.condensation.training import CondensedTraining, ExtraLoss
from lit_fedad.contracts import Free, Message, MessageSpec, TensorSpec, Update
from lit_fedad.contracts.disclosure import Disclosures, by_class
from lit_fedad.contracts.evidence import SharedPrototypes, Shown
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.core.errors import UserError
from lit_fedad.methods.feddm import FedDMServer, ImageCondenser, OwnImages
from lit_fedad.methods.parts.condensed_images import CLASSES
from lit_fedad.methods.parts.functional import apply_in_chunks, draw_weights, with_weights
from lit_fedad.tasks.classifier import Classifier

PROTOTYPES, SIZES = "prototypes", "sizes"

Constraints = Literal["batch", "running", "own"]


class FedVCKClient(ImageCondenser):
    """A client that condenses images by importance, and sends the mean logits of each class (FedVCK Eq. 11).

    The previous model is the one that the client received in the last round in which it took part. In its first round
    the current model takes its place.

    Args:
        task: A `Classifier` whose encoder has batch normalisation.
        kernel: Kernel of the maximum mean discrepancy of features (FedVCK Eq. 3). ``linear`` is that of FedVCK Eq. 2,
            which compares means only.
        constraints: Statistics that normalise synthetic images: those of the step's ``batch`` of real images
            (FedVCK Eq. 4); ``running`` ones, which these batches update, as in the released code; or their ``own``,
            that is without constraint.
        selection: Whether images are drawn by importance (FedVCK Eq. 8), or all with equal probability.
        alpha: Share of the current model in the mixture of both models' logits (FedVCK Eq. 7). The paper's models end
            in a softmax.
        bias: Bias b (FedVCK Eq. 5).
        prototype_images: Fewest images of a class with which its mean logits are sent: a mean of few images reveals
            which images are in it. A class with fewer is sent as zeros with a count of 0, so that only the other
            clients' means count for it.
        ranks: Whether the ranks of a class's mean logits, 0 for the lowest, are sent instead of the logits. The server
            then ranks negatives by the vote of all images (Borda count); FedVCK Eq. 13 needs no more than ranks.
        continue_images: Whether condensation continues with the synthetic images of the client's last round, as in the
            released code.
        softmax: Whether images are drawn by the softmax of their importance, as in the released code; otherwise in
            proportion to it.
        own_first_model: Whether the client condenses under random weights of its own in round 1, as in the released
            code. They are also its previous model in round 2.
        **condensing: See `ImageCondenser`.

    Raises:
        UserError: If the encoder has no batch normalisation, or a setting is out of range.
    """

    state_names: ClassVar[tuple[str, ...]] = ("previous", "ended")

    def __init__(
        self,
        task: Classifier,
        kernel: Kernel = "linear",
        constraints: Constraints = "batch",
        selection: bool = True,
        alpha: float = 0.5,
        bias: float = 0.0,
        prototype_images: int = 1,
        ranks: bool = False,
        continue_images: bool = False,
        softmax: bool = False,
        own_first_model: bool = False,
        **condensing: Any,
    ) -> None:
        super().__init__(task, **condensing)
        at_least("method.client", 1, prototype_images=prototype_images)
        within("method.client", 0, 1, alpha=alpha)
        within("method.client", -50, 50, bias=bias)  # far above any cross-entropy, all importances would be 0
        check_encoder(task.encoder)
        self.kernel, self.constraints = kernel, constraints
        self.selection, self.alpha, self.bias = selection, alpha, bias
        self.prototype_images, self.ranks = prototype_images, ranks
        self.continue_images, self.softmax, self.own_first_model = continue_images, softmax, own_first_model
        self.previous: Message = {}
        self.ended = torch.empty(0)
        """The synthetic images of the last round, with which the next round continues."""
        self._running: dict[str, Tensor] = {}

    def condense(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Condenses images by importance; with ``own_first_model``, in round 1 under random weights."""
        if self.own_first_model and self.context.round == 1:
            with self.context.seeded("own first model"):
                draw_weights(self.task)
        losses = super().condense(loader, fabric)
        if self.continue_images:
            self.ended = self.synthetic
        return losses

    def initial_images(self, local: OwnImages, counts: Sequence[int], generator: torch.Generator) -> Tensor:
        """Returns FedDM's initial images or, with ``continue_images``, the synthetic images of the last round."""
        start = super().initial_images(local, counts, generator)
        return self.ended if self.continue_images and self.ended.shape == start.shape else start

    def survey(self, local: OwnImages, fabric: Fabric) -> tuple[list[Tensor], Message]:
        """Returns the images' probabilities by importance, and each class's mean logits under the received weights."""
        logits = self._logits(local.images, {}, fabric)
        labels = torch.tensor(local.classes, dtype=torch.int64).repeat_interleave(
            torch.tensor(local.sizes, dtype=torch.int64)
        )
        weights = torch.ones(len(labels))
        if self.selection:
            previous = self._logits(local.images, self.previous, fabric) if self.previous else logits
            weights = importance(logits, previous, labels, self.alpha, self.bias)
        means = [class_logits.mean(0) for class_logits in logits.split(local.sizes)]
        prototypes = torch.stack(means) if means else logits[:0]
        if self.ranks:
            prototypes = ranks_of(prototypes)
        sizes = torch.tensor(local.sizes, dtype=torch.int64)
        enough = sizes >= self.prototype_images
        entries = {PROTOTYPES: prototypes * enough[:, None], SIZES: sizes * enough}
        self._running = {name: buffer.clone() for name, buffer in self.task.named_buffers()}
        draws = [self._probabilities(part) for part in weights.split(local.sizes)] if local.sizes else []
        return draws, entries

    def _probabilities(self, weights: Tensor) -> Tensor:
        """Computes the probability with which each image of a class is drawn from importances [n] (FedVCK Eq. 8)."""
        return weights.softmax(0) if self.softmax else weights / weights.sum()

    def _logits(self, images: Tensor, weights: Message, fabric: Fabric) -> Tensor:
        """Computes logits [n, K] in evaluation mode, under the given weights."""

        def logits(batch: Tensor) -> Tensor:
            with fabric.autocast():
                return self.task.classifier(self.task({"image": batch})).float().cpu()

        return torch.cat(apply_in_chunks(self.task, weights, images, logits))

    def class_distance(self, real: RealBatch, synthetic: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes the discrepancy of features class by class (FedVCK Eq. 9), under the constraint of FedVCK Eq. 4."""
        encoder = self.task.encoder
        if self.constraints == "running":
            real_features, synthetic_features = self._under_running(real, synthetic)
            once = torch.ones(len(real_features)).to(real_features.device)
            sizes = [self.condensation.batch] * len(counts)
            return class_mmd(real_features, synthetic_features, once, sizes, counts, self.kernel)
        real_features, statistics = record(encoder, real.images, real.times)
        if self.constraints == "batch":
            synthetic_features = apply(encoder, synthetic, statistics)
        else:
            synthetic_features = unconstrained(encoder, synthetic)
        return class_mmd(real_features, synthetic_features, real.times, real.sizes, counts, self.kernel)

    def _under_running(self, real: RealBatch, synthetic: Tensor) -> tuple[Tensor, Tensor]:
        """Computes features of the real draws, which update the running statistics, then of the synthetic images."""
        task = self.task
        task.train()
        with torch.no_grad():
            drawn = real.images.repeat_interleave(real.times, 0)
            features: Tensor = with_weights(task, self._running, lambda _: task.encoder(drawn))
        task.eval()
        return features, with_weights(task, self._running, lambda _: task.encoder(synthetic))

    @property
    def discloses(self) -> Disclosures:  # type: ignore[override]
        """What uploads disclose: FedDM's images, and the model's mean logits of each class, or their ranks."""
        statistic = "ranks" if self.ranks else "means"
        what = f"{statistic} of the model's logits over the images of each class, with their numbers"
        return (*super().discloses, by_class(what, max(self.prototype_images, self.min_class_images)))

    def send(self, loader: DataLoader) -> Message:
        """Returns images and logit prototypes, and stores the received weights as the previous model."""
        self.previous = self.shared_state()
        return super().send(loader)

    def upload_spec(self) -> MessageSpec:
        """Declares images, and logit prototypes with their numbers of images."""
        classes = Free("classes")
        prototypes = {
            PROTOTYPES: TensorSpec((classes, self.task.classes)),
            SIZES: TensorSpec(
                (classes,),
                torch.int64,
                low=0 if self.prototype_images > self.min_class_images else self.min_class_images,
            ),
        }
        return {**super().upload_spec(), **prototypes}

    def shown(self, sent: Message) -> list[Shown]:
        """Lists what an upload shows of single images: the logit prototypes, and the model that its images train."""
        if PROTOTYPES not in sent:
            return super().shown(sent)
        counted, task = sent[SIZES] > 0, self.task

        def logits(batch: Mapping[str, Any]) -> Tensor:
            values: Tensor = task.classifier(task(batch))
            return ranks_of(values) if self.ranks else values

        prototypes = SharedPrototypes(sent[PROTOTYPES][counted], sent[CLASSES][counted], logits)
        return [prototypes, *super().shown(sent)]


def ranks_of(logits: Tensor) -> Tensor:
    """Returns the rank of each class among a row of logits [n, K], 0 for the lowest, as float32."""
    return logits.argsort(dim=1, stable=True).argsort(dim=1).float()


class FedVCKServer(FedDMServer):
    """The server, which trains on all rounds' images with relational contrast (FedVCK Eq. 15 and FedVCK Eq. 16).

    In round 1 there are no feature prototypes yet, and the loss is only cross-entropy. A class that no client of a
    round owns keeps its logit prototype.

    Args:
        training: Epochs, batches and learning rate of training in a round.
        rounds_kept: Number of latest rounds whose images are used; None for all (FedVCK Eq. 16). The released code
            keeps half of all rounds, but at least ten.
        contrast: Weight of the contrast; 0 for none.
        negatives: Number of negative classes, K - 1 in FedVCK Eq. 13: the paper's K classes include the class itself.
        temperature: Temperature tau (FedVCK Eq. 15).
        with_own: Whether the denominator of FedVCK Eq. 15 includes the class itself; otherwise the loss has no lower
            bound.
        head_width: Hidden width of the projection h, which is initialised anew in each round.
        head_rate: Learning rate of Adam for h.
        prior: Whether the contrast counts each class as often as it occurs in the batch, as in the released code.
        decay_contrast: Whether the weight of the contrast falls to a tenth from round to round, as in the released
            code.

    Raises:
        UserError: If a setting is out of range.
    """

    state_names = ("prototypes",)

    def __init__(
        self,
        client: FedVCKClient,
        training: CondensedTraining,
        rounds_kept: int | None = None,
        contrast: float = 0.05,
        negatives: int = 4,
        temperature: float = 1.0,
        with_own: bool = True,
        head_width: int = 128,
        head_rate: float = 0.01,
        prior: bool = False,
        decay_contrast: bool = False,
    ) -> None:
        super().__init__(client, training)
        at_least("method.server", 1, rounds_kept=rounds_kept, negatives=negatives, head_width=head_width)
        at_least("method.server", 0, contrast=contrast)
        above("method.server", 0, temperature=temperature, head_rate=head_rate)
        self.rounds_kept, self.contrast, self.negatives = rounds_kept, contrast, negatives
        self.temperature, self.with_own = temperature, with_own
        self.head_width, self.head_rate = head_width, head_rate
        self.prior, self.decay_contrast = prior, decay_contrast
        self.prototypes = torch.full((self.task.classes, self.task.classes), torch.nan)

    def validate(self, client_id: int, update: Update) -> None:
        """Checks images, and that no more real images are counted than the client has."""
        super().validate(client_id, update)
        counted = int(update.message[SIZES].sum())
        if counted > update.num_samples:
            raise UserError(
                f"the client counts {counted} images of its classes, and has {update.num_samples}"
            )

    def extra_loss(self, messages: Sequence[Message]) -> ExtraLoss | None:
        """Returns the contrast with prototypes of earlier rounds' images, under the weights that clients received."""
        classes = self.task.classes
        means, sizes, owned = (torch.cat([m[n] for m in messages]) for n in (PROTOTYPES, SIZES, CLASSES))
        new = merged_prototypes(means, sizes, owned, classes)
        self.prototypes = new.where(~new.isnan(), self.prototypes)
        if not self.knowledge or not self.contrast:
            return None
        images, labels = (torch.cat(parts) for parts in zip(*self.knowledge.values(), strict=True))
        features = class_means(self._features(images, self.weights), labels, classes)
        negatives = hard_negatives(self.prototypes, (features != 0).any(1), self.negatives)
        with self.context.seeded("contrast head"):
            module = RelationalContrast(
                features, negatives, self.head_width, self.temperature, self.with_own, self.prior
            )
        weight = self.contrast * 0.1 ** (self.context.round - 1) if self.decay_contrast else self.contrast
        return ExtraLoss(module, weight, self.head_rate)
