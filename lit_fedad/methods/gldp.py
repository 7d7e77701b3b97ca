"""GLDP: global and local dynamic prototypes, for rare classes that come in stages (Guo et al., STHFL, 2023).

Base and head are trained in alternation. As in FedRep only the base is shared; with it clients share prototypes, the
mean features of classes. A client's older prototypes reduce forgetting; those of all clients improve its rare classes.

docs/gldp.md has measurements on real images. On frozen features prototypes forget far less than heads, provided that
the base hardly changes, since older prototypes are means of features of older bases. Discriminants in closed form with
one covariance (`prototype_statistics`) are better still. From pixels, at a scale far below the paper's, no method was
far above constant predictions.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import (
    Exchanges,
    Free,
    Message,
    MessageSpec,
    Prediction,
    Predictors,
    TensorSpec,
    Update,
    class_list,
)
from lit_fedad.contracts.compute import map_batches
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, by_class
from lit_fedad.contracts.evidence import SharedPrototypes, Shown
from lit_fedad.core.bounds import above, within
from lit_fedad.core.errors import UserError
from lit_fedad.memory.prototypes import Prototypes, class_means
from lit_fedad.methods.fedavg import WEIGHTS, FedAvgServer, with_exchanges
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.methods.parts.weight_evidence import weights_sent
from lit_fedad.tasks.classifier import Classifier

VECTORS, CLASSES = "prototypes.vectors", "prototypes.classes"


class GLDPClient(FedRepClient):
    """A client that trains base, then head, regularised by its own older prototypes and those of all clients.

    It predicts by the nearest global prototype of the classes that it has met (GLDP-GP, GLDP Eq. 13). Predictions also
    hold the logits by the global prototypes of all classes, the logits by its local prototypes (GLDP-LP), and those of
    the head. Until there are global prototypes, it predicts by the head. A class without a prototype is never
    predicted.

    Args:
        base_epochs: Epochs t that train the base (GLDP Eq. 3).
        head_epochs: Epochs s that train the head (GLDP Eq. 4); the paper requires t < s.
        lam: Weight lambda of the local against the global relation (GLDP Eq. 12); None for cross-entropy alone.
        beta: Share of the older local prototypes in their moving average (GLDP Eq. 9).
        relation: Quantity that the local relation compares: the softmax of prototypes over their coordinates
            (``"embedding"``, GLDP Eq. 7), or the head's prediction of the old prototype with its mean prediction of the
            class's images (``"logit"``, GLDP Eq. 8).
        temperature: Temperature of that softmax.
        candidates: Classes among which the nearest global prototype is sought: those that the client has met
            (``"met"``), as n in GLDP Eq. 13 runs over the client's classes, or ``"all"``.

    Raises:
        UserError: If t is not below s, or lambda or beta is not in [0, 1].
    """

    needs = Classifier
    task: Classifier
    state_names = ("old", "current", "met", "stage")

    def __init__(
        self,
        task: Classifier,
        base_epochs: int = 10,
        head_epochs: int = 20,
        lam: float | None = 0.5,
        beta: float = 0.5,
        relation: Literal["embedding", "logit"] = "embedding",
        temperature: float = 1.0,
        candidates: Literal["met", "all"] = "met",
    ) -> None:
        super().__init__(task, head_epochs, base_epochs, base_first=True)
        if not 0 < base_epochs < head_epochs:
            raise UserError(
                f"method.client.base_epochs={base_epochs} must be at least 1 and below head_epochs={head_epochs}"
            )
        within("method.client", 0, 1, lam=lam, beta=beta)
        above("method.client", 0, temperature=temperature)
        self.lam, self.beta, self.relation, self.temperature = lam, beta, relation, temperature
        self.candidates = candidates
        self.common_prototypes = self.old = self.current = Prototypes.none(task.classes, task.num_features)
        self.met = torch.zeros(task.classes, dtype=torch.bool)
        self.stage = -1

    @property
    def predictors(self) -> Predictors:
        """Global prototypes of the client's classes or of all classes, local prototypes and the head.

        Local prototypes and the head are personal.
        """
        return Predictors(merged=True, heads=("all", "lp", "head"))

    def auxiliary_spec(self) -> MessageSpec:
        """Declares prototypes of any number of classes."""
        vectors = TensorSpec((Free("classes"), self.task.num_features))
        return {VECTORS: vectors, CLASSES: class_list(self.task.classes)}

    def upload_spec(self) -> MessageSpec:
        """Declares the base and the client's prototypes, in the form of `broadcast_spec`."""
        return self.broadcast_spec()

    def receive(self, message: Message) -> None:
        """Loads the base and the prototypes of all clients."""
        super().receive(message)
        self.common_prototypes = Prototypes.unpack(message[VECTORS], message[CLASSES], self.task.classes)

    def refresh(self, loader: DataLoader, predicts: bool = False) -> None:
        """Updates the older prototypes by those of the last stage when a new stage begins (GLDP Eq. 9)."""
        super().refresh(loader, predicts)
        if self.context.stage != self.stage:
            self.old = self.old.moved(self.current, self.beta)
            self.current = Prototypes.none(self.task.classes, self.task.num_features)
            self.met = self.met.clone()
            for batch in loader:
                self.met[batch["label"]] = True
            self.stage = self.context.stage

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes ``L_CE + lambda L_LP + (1 - lambda) L_GP`` (GLDP Eq. 12), with the prototypes of the batch."""
        if self.lam is None or (self.relation == "embedding" and not self.trains_base):
            # Prototypes of embeddings have no gradient in the head.
            return super().training_step(batch, batch_idx)
        view = self.task.view(batch)
        features = self.task(view)
        scalars = self.task.objective(features, view)
        prototypes, counts = class_means(features, view["label"], self.task.classes)
        local = self._local_relation(prototypes, counts, features, view["label"])
        common = global_relation(prototypes, counts, self.common_prototypes)
        loss = scalars["loss"] + self.lam * local + (1 - self.lam) * common
        return {**scalars, "loss": loss, "local_relation": local, "global_relation": common}

    def _local_relation(self, prototypes: Tensor, counts: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Computes L_LP of the batch's prototypes [K, D] or, with relation ``logit``, of its mean predictions."""
        if self.relation == "embedding":
            return local_relation(prototypes, counts, self.old, self.temperature)
        probabilities = (self._head(features) / self.temperature).softmax(1)
        mean, _ = class_means(probabilities, labels, self.task.classes)
        with torch.no_grad():
            old_logits = self._head(self.old.vectors.to(features)) / self.temperature
        return _divergences(old_logits.log_softmax(1), mean.clamp_min(1e-12).log(), counts, self.old.known)

    def _head(self, features: Tensor) -> Tensor:
        logits = self.task.predict(features, {}).logits
        assert logits is not None
        return logits

    discloses = (TRAINED_WEIGHTS, by_class("mean features of the images of each class"))

    def send(self, loader: DataLoader) -> Message:
        """Returns the trained base, and the prototypes of the stage (GLDP Eq. 6), means over all images as they are."""
        self.current = self._prototypes(loader)
        return {**super().send(loader), **packed(self.current)}

    @torch.no_grad()
    def _prototypes(self, loader: DataLoader) -> Prototypes:
        task = self.task
        totals = torch.zeros(task.classes, task.num_features, dtype=torch.float64)
        images = torch.zeros(task.classes, dtype=torch.int64)
        for features, labels in map_batches(task, loader, lambda batch: (task(batch), batch["label"])):
            means, counts = class_means(features.double().cpu(), labels.cpu(), task.classes)
            totals += counts[:, None] * means
            images += counts
        return Prototypes((totals / images.clamp(min=1)[:, None]).float(), images > 0)

    @property
    def local(self) -> Prototypes:
        """The client's own prototypes: those of the current stage, and older ones of classes that are not in it."""
        return self.old.renewed(self.current)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Predicts by the nearest global prototype (GLDP Eq. 13); an image's score is its distance to it."""
        features = self.task(batch)
        prediction = self.task.predict(features, batch)
        assert prediction.logits is not None
        head_logits, common, local = prediction.logits, self.common_prototypes, self.local
        known = common.known if self.candidates == "all" else common.known & self.met
        common_logits = common.logits(features)
        logits = _restricted(common_logits, known, head_logits)
        score = torch.where(known.any().to(head_logits.device), -logits.amax(1), prediction.image_score)
        others = {
            "all": _restricted(common_logits, common.known, head_logits),
            "lp": _restricted(local.logits(features), local.known, logits),
            "head": head_logits,
        }
        return Prediction(score, logits=logits, others=others)


def _restricted(logits: Tensor, known: Tensor, fallback: Tensor) -> Tensor:
    """Restricts logits [B, K] to known classes, bool [K]; returns ``fallback`` [B, K] if no class is known."""
    # Without a branch, which an exported graph cannot contain.
    known = known.to(logits.device)
    return torch.where(known.any(), logits.masked_fill(~known, -torch.inf), fallback)


class GLDPServer(FedAvgServer):
    """The server, which averages bases (GLDP Eq. 5) and updates the prototypes of all clients (GLDP Eq. 11).

    Args:
        beta: Share of the older global prototypes in their moving average.
        weighted: Whether the average is weighted by data size; in GLDP Eq. 5 clients have equal weights.
    """

    merges_sums = False

    def __init__(self, client: GLDPClient, beta: float = 0.5, weighted: bool = False) -> None:
        super().__init__(client)
        within("method.server", 0, 1, beta=beta)
        self.beta, self.weighted = beta, weighted
        self.classes = client.task.classes
        self.auxiliary = packed(Prototypes.none(self.classes, client.task.num_features))

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Computes ``Theta = mean mu_i`` (GLDP Eq. 5) and ``C = beta C + (1 - beta) mean C_i`` (GLDP Eq. 11)."""
        messages = [update.message for _, update in sorted(updates.items())]
        vectors, classes = (torch.cat([m[name] for m in messages]) for name in (VECTORS, CLASSES))
        mean, holders = class_means(vectors.double(), classes, self.classes)
        earlier = Prototypes.unpack(self.auxiliary[VECTORS], self.auxiliary[CLASSES], self.classes)
        self.auxiliary = packed(earlier.moved(Prototypes(mean.float(), holders > 0), self.beta))
        self.weights = self.mean_weights(updates, equal=not self.weighted)
        self.report = {"classes_known": float(len(self.auxiliary[CLASSES]))}


def packed(prototypes: Prototypes) -> Message:
    """Packs prototypes for a message."""
    return dict(zip((VECTORS, CLASSES), prototypes.pack(), strict=True))


def local_relation(own: Tensor, counts: Tensor, old: Prototypes, temperature: float = 1.0) -> Tensor:
    """Computes the local prototype relation, ``L_LP = sum_n KL(old_n || own_n)`` (GLDP Eq. 7).

    Prototypes are embeddings, not distributions: the relation compares the softmax over their coordinates.

    Args:
        own: The batch's prototypes [K, D], with gradient.
        counts: Number of the batch's images of each class, int64 [K].
        old: Older prototypes; classes without a prototype or an image are left out.
        temperature: Temperature of the softmax.

    Returns:
        A scalar, in nats; zero where no class is left.
    """
    log_old = (old.vectors.to(own) / temperature).log_softmax(1)
    return _divergences(log_old, (own / temperature).log_softmax(1), counts, old.known)


def _divergences(log_old: Tensor, log_new: Tensor, counts: Tensor, known: Tensor) -> Tensor:
    """Computes the sum of KL(old || new), given their logarithms [K, n], over known classes in the batch."""
    compared = (counts > 0) & known.to(counts.device)
    divergence = F.kl_div(log_new, log_old, log_target=True, reduction="none").sum(1)
    return torch.where(compared, divergence, 0).sum()


def global_relation(own: Tensor, counts: Tensor, common: Prototypes) -> Tensor:
    """Computes the global-local prototype relation, ``L_GP = sum_n T_n / T MSE(own_n, common_n)`` (GLDP Eq. 10).

    Args:
        own: The batch's prototypes [K, D], with gradient.
        counts: Number of the batch's images of each class, int64 [K].
        common: Prototypes of all clients; classes without a prototype are left out.

    Returns:
        A scalar; zero where no class is left.
    """
    share = counts / counts.sum() * common.known.to(counts.device)
    return (share * (own - common.vectors.to(own)).square().mean(1)).sum()


def _sent(client: GLDPClient, received: Message, sent: Message) -> list[Shown]:
    """Lists what an upload shows of single images: its base, and its prototypes, means of features of this base."""
    task = client.task
    base = {name: value.to(task.device) for name, value in sent.items() if name in task.state_dict()}

    def features(batch: Mapping[str, Any]) -> Tensor:
        value: Tensor = functional_call(task, base, (batch,))
        return value

    return [*weights_sent(client, received, sent), SharedPrototypes(sent[VECTORS], sent[CLASSES], features)]


def exchanges(client: GLDPClient) -> Exchanges:
    """Lists FedAvg's exchanges, with evidence of prototypes beside that of weights."""
    return with_exchanges(client, evidence=replace(WEIGHTS, sent=_sent))
