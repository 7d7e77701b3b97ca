"""CReFF: the classifier is re-trained on federated features, which stand for all clients' images (Shang et al., 2022).

Weights are FedAvg's, number for number. Beside them the server learns features whose class-wise gradients are those of
the clients' images, and from these alone, the same number of each class, a classifier that predicts in FedAvg's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Message, MessageSpec, Predictors, Task, TensorSpec, Update, spec_of
from lit_fedad.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.parts.functional import with_weights
from lit_fedad.tasks.classifier import Classifier

WEIGHT, BIAS = "retrained.weight", "retrained.bias"
GRADIENTS, CLASSES = "gradients.values", "gradients.classes"


class CReFFClient(FedAvgClient):
    """A client: trains as in FedAvg, and sends what its classes would make of the re-trained classifier.

    The original augments images by DiffAug before their gradient is taken; here the task's own views take its place.
    The re-trained classifier predicts, and never trains.

    Args:
        task: A `Classifier`.
        local_epochs: E.
        draws: Over how many draws of images the gradient of a class is averaged.
        batch: Images a draw; all images of a class that has fewer.

    Raises:
        UserError: If nothing is drawn.
    """

    needs = Classifier
    task: Classifier

    def __init__(self, task: Classifier, local_epochs: int = 1, draws: int = 10, batch: int = 32) -> None:
        super().__init__(task, local_epochs)
        if min(draws, batch) < 1:
            raise UserError(f"method.client.draws={draws}, batch={batch}: both must be at least 1")
        self.draws, self.batch = draws, batch
        self.retrained: Message = {}
        self._received: Message = {}

    def receive(self, broadcast: Message) -> None:
        """Takes over FedAvg's weights, and apart from them the re-trained classifier."""
        self._received = {n: entry for n, entry in broadcast.items() if n not in (WEIGHT, BIAS)}
        self.retrained = {n: broadcast[n] for n in (WEIGHT, BIAS)}
        super().receive(self._received)

    @property
    def predictors(self) -> Predictors:
        """Only the server's model is meant to predict."""
        return replace(super().predictors, own=False)

    def broadcast_spec(self) -> MessageSpec:
        """Declares FedAvg's weights, and the re-trained classifier."""
        classifier = self.task.classifier
        return {**self.shared_spec(), **spec_of({WEIGHT: classifier.weight, BIAS: classifier.bias})}

    def upload_spec(self) -> MessageSpec:
        """Declares the weights, and the gradients of any number of classes."""
        gradient = (None, self.task.classes, self.task.num_features + 1)
        return {
            **self.shared_spec(),
            GRADIENTS: TensorSpec(gradient),
            CLASSES: TensorSpec((None,), torch.int64),
        }

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Puts the re-trained classifier in the place of FedAvg's; there is no other model."""
        self.task.classifier.load_state_dict({"weight": self.retrained[WEIGHT], "bias": self.retrained[BIAS]})

    def send(self, loader: DataLoader) -> Message:
        """The trained weights, and the gradient of each class that the client holds."""
        return {**super().send(loader), **self._class_gradients(loader)}

    @torch.no_grad()
    def _class_gradients(self, loader: DataLoader) -> Message:
        """Under the weights received, not those trained since; normalisation layers are in evaluation mode."""
        batches = list(loader)
        images, labels = (torch.cat([batch[name] for batch in batches]) for name in ("image", "label"))
        classes = labels.unique()
        received = {name: entry.to(self.device) for name, entry in self._received.items()}
        with self.context.seeded("class gradients"):
            gradients = [
                with_weights(
                    self.task, received, partial(self._gradient, images=images[labels == label], label=label)
                )
                for label in classes
            ]
        return {GRADIENTS: torch.stack(gradients), CLASSES: classes}

    def _gradient(self, task: Task, images: Tensor, label: Tensor) -> Tensor:
        """Of one class, in the re-trained classifier [K, d + 1]."""
        features = []
        for _ in range(self.draws):
            drawn = images[torch.randperm(len(images))[: self.batch]].to(self.device)
            features.append(task(task.view({"image": drawn, "label": label.expand(len(drawn))})))
        classifier = torch.column_stack([self.retrained[WEIGHT], self.retrained[BIAS]]).to(self.device)
        target = F.one_hot(label, len(classifier)).to(self.device)
        return cross_entropy_gradient(classifier, torch.cat(features), target).cpu()


class CReFFServer(FedAvgServer):
    """The server: FedAvg; beside it learns federated features, and re-trains a classifier on them.

    Args:
        client: A client, for the initial weights; the first re-trained classifier is the initial one.
        features_per_class: Federated features of each class; they live on between rounds.
        matching_steps: Steps of SGD a round that match their gradients with the clients'.
        matching_rate: Its learning rate.
        retraining_epochs: Passes over the features that train a fresh classifier, by SGD.
        retraining_rate: Its learning rate.
        batch_size: Its features a step.

    Raises:
        UserError: If there is no feature, step, epoch or batch.
    """

    kept = ("retrained", "features", "seen")

    def __init__(
        self,
        client: CReFFClient,
        features_per_class: int = 100,
        matching_steps: int = 100,
        matching_rate: float = 0.1,
        retraining_epochs: int = 300,
        retraining_rate: float = 0.01,
        batch_size: int = 32,
    ) -> None:
        super().__init__(client)
        if min(features_per_class, matching_steps, retraining_epochs, batch_size) < 1:
            raise UserError(
                f"method.server.features_per_class={features_per_class}, matching_steps={matching_steps},"
                f" retraining_epochs={retraining_epochs}, batch_size={batch_size}: all must be at least 1"
            )
        self.features_per_class = features_per_class
        self.matching_steps, self.matching_rate = matching_steps, matching_rate
        self.retraining_epochs, self.retraining_rate = retraining_epochs, retraining_rate
        self.batch_size = batch_size
        self.classes, self.num_features = client.task.classes, client.task.num_features
        initial = client.task.classifier.state_dict()
        self.retrained: Message = {
            name: initial[own].to("cpu", copy=True) for name, own in ((WEIGHT, "weight"), (BIAS, "bias"))
        }
        self.features: Tensor | None = None
        self.seen = torch.zeros(self.classes, dtype=torch.bool)
        self._losses: dict[str, float] = {}

    def broadcast(self, client_id: int) -> Message:
        """The weights, and the re-trained classifier."""
        return {**self.weights, **self.retrained}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages weights; matches the features of the classes that clients hold; re-trains the classifier."""
        uploads = {
            client: Update({n: update.message[n] for n in self.weights}, update.num_samples)
            for client, update in updates.items()
        }
        self.weights = weighted_mean(uploads)
        with one_thread():
            self._learn([update.message for update in updates.values()])

    def _learn(self, messages: list[Message]) -> None:
        """Everything but the weights."""
        if self.features is None:
            shape = (self.classes, self.features_per_class, self.num_features)
            self.features = torch.randn(shape, generator=self.context.generator("federated features"))
        held, gradients = mean_gradients(messages)
        device = self.fabric.device if self.fabric else torch.device("cpu")
        classifier = torch.column_stack([self.retrained[WEIGHT], self.retrained[BIAS]]).to(device)
        matched, before, after = match(
            self.features[held].to(device),
            held.to(device),
            gradients.to(device),
            classifier,
            self.matching_steps,
            self.matching_rate,
        )
        self.features[held] = matched.cpu()
        self.seen[held] = True
        self._losses = {"matching_loss_before": before, "matching_loss_after": after}
        self.retrained = self._retrain(self.features[self.seen].to(device))

    def _retrain(self, features: Tensor) -> Message:
        """On the features of the classes ever seen [C, n, d]; others have none that mean anything."""
        labels = self.seen.nonzero().repeat_interleave(features.shape[1]).to(features.device)
        with self.context.seeded("classifier re-training"):
            fresh = nn.Linear(self.num_features, self.classes).to(features.device)
            weight, bias = train_classifier(
                fresh,
                features.flatten(0, 1),
                labels,
                self.retraining_epochs,
                self.retraining_rate,
                self.batch_size,
            )
        return {WEIGHT: weight.cpu(), BIAS: bias.cpu()}

    def diagnostics(self) -> dict[str, float]:
        """The matching loss before and after its steps, summed over the classes of the round."""
        return self._losses


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps a block to one thread: small steps in a row gain little from more, and sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def cross_entropy_gradient(classifier: Tensor, features: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy in a linear classifier: ``(softmax - target)^T (z, 1) / B``.

    Args:
        classifier: Weight and bias side by side [K, d + 1].
        features: z [..., B, d].
        targets: One-hot, or its broadcast [..., B, K].

    Returns:
        [..., K, d + 1], the last column of the bias.

    Example:
        >>> cross_entropy_gradient(torch.zeros(2, 2), torch.tensor([[3.0]]), torch.tensor([[1, 0]]))
        tensor([[-1.5000, -0.5000],
                [ 1.5000,  0.5000]])
    """
    weight, bias = classifier[:, :-1], classifier[:, -1]
    residual = F.linear(features, weight, bias).softmax(-1) - targets
    return residual.mT @ F.pad(features, (0, 1), value=1.0) / features.shape[-2]


def mean_gradients(messages: list[Message]) -> tuple[Tensor, Tensor]:
    """Averages the gradient of each class over the clients that hold it; they count the same.

    Args:
        messages: Of every client, gradients [n, K, d + 1] and their classes [n].

    Returns:
        The classes that anyone holds, ascending [C], and their gradients [C, K, d + 1].
    """
    held, places = torch.cat([message[CLASSES] for message in messages]).unique(return_inverse=True)
    total = torch.zeros(len(held), *messages[0][GRADIENTS].shape[1:], dtype=torch.float64)
    for message, own in zip(messages, places.split([len(m[CLASSES]) for m in messages]), strict=True):
        total.index_add_(0, own, message[GRADIENTS].double())
    return held, (total / places.bincount()[:, None, None]).float()


def matching_loss(features: Tensor, classes: Tensor, gradients: Tensor, classifier: Tensor) -> Tensor:
    """How far the gradients of features are from given ones: the sum of 1 - cosine over output rows.

    The bias is one more row.

    Args:
        features: Of each class [C, n, d].
        classes: Their classes, int64 [C].
        gradients: To be matched [C, K, d + 1].
        classifier: What they are gradients in [K, d + 1].

    Returns:
        The sum over classes, in [0, 2 C (K + 1)].
    """
    targets = F.one_hot(classes, len(classifier))[:, None]
    found = cross_entropy_gradient(classifier, features, targets)
    rows = F.cosine_similarity(found[..., :-1], gradients[..., :-1], dim=-1)
    biases = F.cosine_similarity(found[..., -1], gradients[..., -1], dim=-1)
    return (1 - rows).sum() + (1 - biases).sum()


def match(
    features: Tensor, classes: Tensor, gradients: Tensor, classifier: Tensor, steps: int, learning_rate: float
) -> tuple[Tensor, float, float]:
    """Moves features until their gradients are the given ones, by SGD on `matching_loss`.

    Args:
        features: Of each class [C, n, d].
        classes: Their classes, int64 [C].
        gradients: To be matched [C, K, d + 1].
        classifier: What they are gradients in [K, d + 1].
        steps: Of SGD.
        learning_rate: SGD's.

    Returns:
        The features [C, n, d]; the loss before and after.
    """
    moved = features.clone().requires_grad_()
    optimizer = torch.optim.SGD([moved], lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        matching_loss(moved, classes, gradients, classifier).backward()
        optimizer.step()
    before, after = (matching_loss(z, classes, gradients, classifier) for z in (features, moved.detach()))
    return moved.detach(), float(before), float(after)


@torch.no_grad()
def train_classifier(
    start: nn.Linear, features: Tensor, labels: Tensor, epochs: int, learning_rate: float, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Trains a linear classifier by SGD and cross-entropy; batches are drawn from torch's global generator.

    The gradient is written out: tens of thousands of small steps would else be spent in autograd.

    Args:
        start: Where it begins.
        features: [N, d].
        labels: int64 [N].
        epochs: Passes.
        learning_rate: SGD's.
        batch_size: Features a step.

    Returns:
        Weight [K, d] and bias [K].
    """
    classifier = torch.column_stack([start.weight, start.bias])
    targets = F.one_hot(labels, len(classifier)).to(features)
    for _ in range(epochs):
        order = torch.randperm(len(features)).to(features.device)
        for rows in order.split(batch_size):
            classifier -= learning_rate * cross_entropy_gradient(classifier, features[rows], targets[rows])
    return classifier[:, :-1].contiguous(), classifier[:, -1].contiguous()
