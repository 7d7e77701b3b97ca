"""GLDP: global and local dynamic prototypes, for rare classes that come task after task (Guo et al., STHFL, 2023).

Base and head are trained in turn and only the base is shared, as in FedRep; beside it cross prototypes, the mean
features of classes. A client's own older prototypes counter forgetting, those of all clients help its rare classes.

What holds on real images, at a scale far below the paper's (docs/gldp.md): prototypes forget least, by far; but they
classify worse than the heads of FedAvg and FedRep, and the two relations make hardly a difference. Global prototypes
suffer from being means over models that have drifted apart, and more so the faster clients learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Message, MessageSpec, Prediction, Predictors, TensorSpec, Update
from lit_fedad.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.memory.prototypes import Prototypes, class_means
from lit_fedad.methods.fedavg import FedAvgServer
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.parts.functional import map_batches
from lit_fedad.tasks.classifier import Classifier

VECTORS, CLASSES = "prototypes.vectors", "prototypes.classes"


class GLDPClient(FedRepClient):
    """A client: trains base, then head, drawn to its own older prototypes and to those of all clients.

    It predicts by the nearest global prototype (GLDP-GP, GLDP Eq. 13); the logits by its local prototypes (GLDP-LP) and
    those of the head go with each prediction. Until there are global prototypes, it predicts by the head. A class
    without a prototype is never predicted.

    Args:
        task: A `Classifier`.
        base_epochs: t, epochs that train the base (GLDP Eq. 3).
        head_epochs: s, epochs that train the head (GLDP Eq. 4); the paper has t < s.
        lam: Lambda of GLDP Eq. 12: share of the local against the global relation; None for cross-entropy alone.
        beta: Share of the older local prototypes in their moving average (GLDP Eq. 9).
        relation: What the local relation compares: the softmax of prototypes over their coordinates
            (``"embedding"``, GLDP Eq. 7), or the head's prediction of the old prototype with its mean prediction of the
            class's images (``"logit"``, GLDP Eq. 8).
        temperature: Divides coordinates, or logits, before that softmax.

    Raises:
        UserError: If t is not below s, or lambda or beta is not in [0, 1].
    """

    needs = Classifier
    task: Classifier
    kept = ("old", "current", "stage")

    def __init__(
        self,
        task: Classifier,
        base_epochs: int = 10,
        head_epochs: int = 20,
        lam: float | None = 0.5,
        beta: float = 0.5,
        relation: Literal["embedding", "logit"] = "embedding",
        temperature: float = 1.0,
    ) -> None:
        super().__init__(task, head_epochs, base_epochs, base_first=True)
        if not 0 < base_epochs < head_epochs:
            raise UserError(
                f"method.client.base_epochs={base_epochs} must be at least 1 and below head_epochs={head_epochs}"
            )
        if not (lam is None or 0 <= lam <= 1) or not 0 <= beta <= 1:
            raise UserError(f"method.client.lam={lam}, beta={beta}: give numbers in [0, 1]")
        self.lam, self.beta, self.relation, self.temperature = lam, beta, relation, temperature
        self.common_prototypes = self.old = self.current = Prototypes.none(task.classes, task.num_features)
        self.stage = 0

    @property
    def predictors(self) -> Predictors:
        """Global prototypes, local ones and the head; local prototypes and heads are each client's own."""
        return Predictors(heads=("lp", "head"))

    def broadcast_spec(self) -> MessageSpec:
        """Declares the base, and prototypes of any number of classes."""
        prototypes = {
            VECTORS: TensorSpec((None, self.task.num_features)),
            CLASSES: TensorSpec((None,), torch.int64),
        }
        return {**self.shared_spec(), **prototypes}

    def upload_spec(self) -> MessageSpec:
        """Declares the same."""
        return self.broadcast_spec()

    def receive(self, message: Message) -> None:
        """Takes over the base, and the prototypes of all clients."""
        super().receive(message)
        self.common_prototypes = Prototypes.unpack(message[VECTORS], message[CLASSES], self.task.classes)

    def refresh(self, loader: DataLoader) -> None:
        """Makes old knowledge of what the last stage left, where the next one begins (GLDP Eq. 9)."""
        super().refresh(loader)
        if self.context.stage != self.stage:
            self.old = self.old.moved(self.current, self.beta)
            self.current = Prototypes.none(self.task.classes, self.task.num_features)
            self.stage = self.context.stage

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """``L_CE + lambda L_LP + (1 - lambda) L_GP`` (GLDP Eq. 12), with the prototypes of the batch."""
        if self.lam is None:
            return super().training_step(batch, batch_idx)
        view = self.task.view(batch)
        features = self.task(view)
        scalars = self.task.objective(features, view)
        own, counts = class_means(features, view["label"], self.task.classes)
        local = self._local_relation(own, counts, features, view["label"])
        to_common = global_relation(own, counts, self.common_prototypes)
        loss = scalars["loss"] + self.lam * local + (1 - self.lam) * to_common
        return {**scalars, "loss": loss, "local_relation": local, "global_relation": to_common}

    def _local_relation(self, own: Tensor, counts: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        if self.relation == "embedding":
            return local_relation(own, counts, self.old, self.temperature)
        chances = (self._head(features) / self.temperature).softmax(1)
        mean, _ = class_means(chances, labels, self.task.classes)
        with torch.no_grad():
            old = self._head(self.old.vectors.to(features)) / self.temperature
        return _divergences(old.log_softmax(1), mean.clamp_min(1e-12).log(), counts, self.old.known)

    def _head(self, features: Tensor) -> Tensor:
        logits = self.task.predict(features, {}).logits
        assert logits is not None
        return logits

    def send(self, loader: DataLoader) -> Message:
        """The trained base, and the prototypes of the current task (GLDP Eq. 6), exact and without augmentation."""
        self.current = self._prototypes(loader)
        vectors, classes = self.current.pack()
        return {**super().send(loader), VECTORS: vectors, CLASSES: classes}

    @torch.no_grad()
    def _prototypes(self, loader: DataLoader) -> Prototypes:
        total = torch.zeros(self.task.classes, self.task.num_features, dtype=torch.float64)
        images = torch.zeros(self.task.classes, dtype=torch.int64)
        for features, labels in map_batches(
            self.task, loader, lambda batch: (self.task(batch), batch["label"])
        ):
            means, counts = class_means(features.double().cpu(), labels.cpu(), self.task.classes)
            total += counts[:, None] * means
            images += counts
        return Prototypes((total / images.clamp(min=1)[:, None]).float(), images > 0)

    @property
    def local(self) -> Prototypes:
        """The client's own prototypes: of the current task, and older ones of classes that are not in it."""
        return self.old.renewed(self.current)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """By the nearest global prototype; an image's score is its distance to that prototype."""
        features = self.task(batch)
        prediction = self.task.predict(features, batch)
        assert prediction.logits is not None
        head, local = prediction.logits, self.local
        # No branch on what is known: an exported graph could not take it along.
        known = self.common_prototypes.known.any().to(head.device)
        logits = torch.where(known, self.common_prototypes.logits(features), head)
        score = torch.where(known, -logits.amax(1), prediction.image_score)
        lp = torch.where(local.known.any().to(head.device), local.logits(features), logits)
        return Prediction(score, logits=logits, others={"lp": lp, "head": head})


class GLDPServer(FedAvgServer):
    """The server: averages bases (GLDP Eq. 5), and moves the prototypes of all clients (GLDP Eq. 11).

    Args:
        client: A client, for the initial weights.
        beta: Share of the older global prototypes in their moving average.
        weighted: Whether clients count by their data in the average; in GLDP Eq. 5 they count the same.
    """

    kept = ("prototypes",)

    def __init__(self, client: GLDPClient, beta: float = 0.5, weighted: bool = False) -> None:
        super().__init__(client)
        self.beta, self.weighted = beta, weighted
        self.prototypes = Prototypes.none(client.task.classes, client.task.num_features)

    def begin(self, context: Context) -> None:
        """Starts a round."""
        super().begin(context)
        self._packed = dict(zip((VECTORS, CLASSES), self.prototypes.pack(), strict=True))

    def broadcast(self, client_id: int) -> Message:
        """The base, and the prototypes of all clients."""
        return {**self.weights, **self._packed}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """``Theta = mean mu_i``; ``C = beta C + (1 - beta) mean C_i`` over the clients that hold the class."""
        classes = len(self.prototypes.known)
        uploads = [
            (update.message[VECTORS], update.message[CLASSES]) for _, update in sorted(updates.items())
        ]
        vectors, members = (torch.cat(parts) for parts in zip(*uploads, strict=True))
        mean, holders = class_means(vectors.double(), members, classes)
        self.prototypes = self.prototypes.moved(Prototypes(mean.float(), holders > 0), self.beta)
        bases = {
            client: Update({name: update.message[name] for name in self.weights}, update.num_samples)
            for client, update in updates.items()
        }
        self.weights = weighted_mean(bases, equal=not self.weighted)

    def diagnostics(self) -> dict[str, float]:
        """How many classes have a prototype."""
        return {"classes_known": float(self.prototypes.known.sum())}


def local_relation(own: Tensor, counts: Tensor, old: Prototypes, temperature: float = 1.0) -> Tensor:
    """The local prototype relation, ``L_LP = sum_n KL(old_n || own_n)`` (GLDP Eq. 7).

    Prototypes are embeddings, not distributions: the softmax over their coordinates is compared.

    Args:
        own: The batch's prototypes [K, D]; gradients reach them.
        counts: The batch's images of each class, int64 [K].
        old: Older prototypes; classes that have none, or no image, are left out.
        temperature: Divides coordinates before the softmax.

    Returns:
        A scalar, in nats; zero where no class is left.
    """
    former = (old.vectors.to(own) / temperature).log_softmax(1)
    return _divergences(former, (own / temperature).log_softmax(1), counts, old.known)


def _divergences(old: Tensor, new: Tensor, counts: Tensor, known: Tensor) -> Tensor:
    """The sum of KL(old || new), both logarithms [K, n], over classes that are known and in the batch."""
    both = (counts > 0) & known.to(counts.device)
    divergence = F.kl_div(new, old, log_target=True, reduction="none").sum(1)
    return torch.where(both, divergence, 0).sum()


def global_relation(own: Tensor, counts: Tensor, common: Prototypes) -> Tensor:
    """The global-local prototype relation, ``L_GP = sum_n T_n / T MSE(own_n, common_n)`` (GLDP Eq. 10).

    Args:
        own: The batch's prototypes [K, D]; gradients reach them.
        counts: The batch's images of each class, int64 [K].
        common: Prototypes of all clients; classes that have none are left out.

    Returns:
        A scalar; zero where no class is left.
    """
    share = counts / counts.sum() * common.known.to(counts.device)
    return (share * (own - common.vectors.to(own)).square().mean(1)).sum()
