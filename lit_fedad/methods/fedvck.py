"""FedVCK: what the model still lacks, condensed into few images that the server learns from (Yan et al., AAAI 2025).

FedDM with four changes: images that the model gets wrong are drawn more often; synthetic images pass through the
network under the statistics of real ones; the server keeps the images of earlier rounds; and it drives apart the
classes that the clients' logits show to be confused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.condensation.batch_statistics import apply, check_encoder, record, unconstrained
from lit_fedad.condensation.condense import Condensation, RealBatch
from lit_fedad.condensation.kernels import Kernel, class_mmd
from lit_fedad.condensation.relations import (
    RelationalContrast,
    class_means,
    hard_negatives,
    merged_prototypes,
)
from lit_fedad.condensation.selection import chances, importance
from lit_fedad.condensation.training import CondensedTraining, ExtraLoss
from lit_fedad.contracts import Message, MessageSpec, TensorSpec
from lit_fedad.errors import UserError
from lit_fedad.methods.feddm import CLASSES, FedDMClient, FedDMServer, Knowledge, OwnImages
from lit_fedad.methods.parts.functional import look, with_weights
from lit_fedad.tasks.classifier import Classifier

PROTOTYPES, SIZES = "prototypes", "sizes"

Constraints = Literal["batch", "running", "own"]


class FedVCKClient(FedDMClient):
    """A client: condenses what the model still lacks, and sends how it judges each class (FedVCK Eq. 11).

    The model of one round ago is the one that the client received when it last took part; at first, the current one.

    Args:
        task: A `Classifier` whose encoder has batch normalisation.
        condensation: Steps, batches and learning rate.
        mean: As in `FedDMClient`.
        std: As in `FedDMClient`.
        share: p.
        minimum: Fewest synthetic images of a class.
        least: Images that make a client the owner of a class.
        init: As in `FedDMClient`.
        quantize: As in `FedDMClient`.
        kernel: Of the maximum mean discrepancy of features (FedVCK Eq. 3). ``linear`` is that of FedVCK Eq. 2: it
            compares means alone.
        constraints: By what synthetic images are normalised: statistics of the step's ``batch`` of real ones
            (FedVCK Eq. 4); ``running`` ones, which these batches move, as in the released code; or their ``own``,
            which is no constraint.
        selection: Whether images are drawn by importance (FedVCK Eq. 8), or all alike.
        alpha: Share of the current model in the mixed logits (FedVCK Eq. 7).
        bias: b (FedVCK Eq. 5).

    Raises:
        UserError: If the encoder has no batch normalisation, or a setting is out of range.
    """

    kept = ("previous",)

    def __init__(
        self,
        task: Classifier,
        condensation: Condensation,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        share: float = 0.01,
        minimum: int = 5,
        least: int = 10,
        init: Literal["noise", "real"] = "noise",
        quantize: bool = True,
        kernel: Kernel = "linear",
        constraints: Constraints = "batch",
        selection: bool = True,
        alpha: float = 0.5,
        bias: float = 0.0,
    ) -> None:
        super().__init__(
            task, condensation, mean, std, share, minimum, least, init, radius=0.0, quantize=quantize
        )
        if not 0 <= alpha <= 1:
            raise UserError(f"method.client.alpha={alpha}: give a share from 0 to 1")
        check_encoder(task.encoder)
        self.kernel, self.constraints = kernel, constraints
        self.selection, self.alpha, self.bias = selection, alpha, bias
        self.previous: Message = {}
        self._running: dict[str, Tensor] = {}

    def _survey(self, own: OwnImages, fabric: Fabric) -> tuple[list[Tensor], Message]:
        """The chances of images by their importance; the mean logits of each class under the received weights."""
        logits = self._logits(own.images, {}, fabric)
        labels = torch.tensor(own.classes, dtype=torch.int64).repeat_interleave(
            torch.tensor(own.sizes, dtype=torch.int64)
        )
        weights = torch.ones(len(labels))
        if self.selection:
            before = self._logits(own.images, self.previous, fabric) if self.previous else logits
            weights = importance(logits, before, labels, self.alpha, self.bias)
        means = [part.mean(0) for part in logits.split(own.sizes)]
        facts = {
            PROTOTYPES: torch.stack(means) if means else logits[:0],
            SIZES: torch.tensor(own.sizes, dtype=torch.int64),
        }
        self._running = {name: buffer.clone() for name, buffer in self.task.named_buffers()}
        return [chances(part) for part in weights.split(own.sizes)] if own.sizes else [], facts

    def _logits(self, images: Tensor, weights: Message, fabric: Fabric) -> Tensor:
        """In evaluation mode, under other weights where any are given [n, K]."""

        def logits(batch: Tensor) -> Tensor:
            with fabric.autocast():
                return self.task.classifier(self.task({"image": batch})).float().cpu()

        return torch.cat(look(self.task, weights, images, logits))

    def _distance(self, real: RealBatch, synthetic: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes the discrepancy of features, class by class (FedVCK Eq. 9), constrained by FedVCK Eq. 4."""
        encoder = self.task.encoder
        if self.constraints == "running":
            every, synthetic_features = self._under_running(real, synthetic)
            times, sizes = torch.ones(len(every)), [self.condensation.batch] * len(counts)
            return class_mmd(every, synthetic_features, times.to(every.device), sizes, counts, self.kernel)
        target, statistics = record(encoder, real.images, real.times)
        if self.constraints == "batch":
            found = apply(encoder, synthetic, statistics)
        else:
            found = unconstrained(encoder, synthetic)
        return class_mmd(target, found, real.times, real.sizes, counts, self.kernel)

    def _under_running(self, real: RealBatch, synthetic: Tensor) -> tuple[Tensor, Tensor]:
        """Features of every real draw, which move the running statistics, then of synthetic images under these."""
        task = self.task
        task.train()
        with torch.no_grad():
            drawn = real.images.repeat_interleave(real.times, 0)
            target: Tensor = with_weights(task, self._running, lambda _: task.encoder(drawn))
        task.eval()
        return target, with_weights(task, self._running, lambda _: task.encoder(synthetic))

    def send(self, loader: DataLoader) -> Message:
        """Returns images and logit prototypes; the weights received are the previous ones from now on."""
        self.previous = self.shared_state()
        return super().send(loader)

    def upload_spec(self) -> MessageSpec:
        """Declares images, and logit prototypes with the images behind them."""
        own = {PROTOTYPES: TensorSpec((None, self.task.classes)), SIZES: TensorSpec((None,), torch.int64)}
        return {**super().upload_spec(), **own}


class FedVCKServer(FedDMServer):
    """The server: trains on the images of all rounds, with relational contrast (FedVCK Eq. 15, FedVCK Eq. 16).

    In round 1 there are no feature prototypes yet, and cross-entropy is alone. A class that no participant owns keeps
    the logit prototype it had.

    Args:
        client: A client.
        training: Epochs, batches and learning rate of a round.
        rounds_kept: How many rounds' images are trained on, the latest; None for all (FedVCK Eq. 16). The released code
            keeps half of all rounds, but no fewer than ten.
        contrast: Weight of the contrast; 0 for none.
        negatives: K of FedVCK Eq. 13.
        temperature: tau of FedVCK Eq. 15.
        with_own: Whether a class itself is in the denominator of FedVCK Eq. 15, which else has no lower bound.
        head_width: Hidden width of h, which is drawn anew each round.
        head_rate: Adam's learning rate, of h.

    Raises:
        UserError: If a setting is out of range.
    """

    kept = ("prototypes",)

    def __init__(
        self,
        client: FedVCKClient,
        training: CondensedTraining,
        rounds_kept: int | None = None,
        contrast: float = 0.05,
        negatives: int = 5,
        temperature: float = 1.0,
        with_own: bool = True,
        head_width: int = 128,
        head_rate: float = 0.01,
    ) -> None:
        super().__init__(client, training)
        if min(1 if rounds_kept is None else rounds_kept, negatives, head_width) < 1 or contrast < 0:
            raise UserError(
                f"method.server.rounds_kept={rounds_kept}, negatives={negatives}, head_width={head_width},"
                f" contrast={contrast}: give at least 1, and a contrast not below 0"
            )
        if min(temperature, head_rate) <= 0:
            raise UserError(
                f"method.server.temperature={temperature}, head_rate={head_rate}: give numbers above 0"
            )
        self.rounds_kept, self.contrast, self.negatives = rounds_kept, contrast, negatives
        self.temperature, self.with_own = temperature, with_own
        self.head_width, self.head_rate = head_width, head_rate
        self.prototypes = torch.full((self.task.classes, self.task.classes), torch.nan)

    def _kept(self, new: Knowledge) -> dict[int, Knowledge]:
        """The images of the latest rounds."""
        every = {**self.knowledge, self.context.round: new}
        return dict(sorted(every.items())[-(self.rounds_kept or len(every)) :])

    def _relate(self, messages: Sequence[Message]) -> ExtraLoss | None:
        """The contrast, with prototypes of earlier rounds' images under the weights that clients received."""
        classes = self.task.classes
        new = merged_prototypes(
            [message[PROTOTYPES] for message in messages],
            [message[SIZES] for message in messages],
            [message[CLASSES] for message in messages],
            classes,
        )
        self.prototypes = new.where(~new.isnan(), self.prototypes)
        if not self.knowledge or not self.contrast:
            return None
        images, labels = (torch.cat(parts) for parts in zip(*self.knowledge.values(), strict=True))
        features = class_means(self._features(images, self.weights), labels, classes)
        negatives = hard_negatives(self.prototypes, (features != 0).any(1), self.negatives)
        with self.context.seeded("contrast head"):
            module = RelationalContrast(features, negatives, self.head_width, self.temperature, self.with_own)
        return ExtraLoss(module, self.contrast, self.head_rate)
