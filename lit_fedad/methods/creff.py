"""CReFF: a classifier re-trained on federated features that represent all clients' images (Shang et al., 2022).

Weights are exactly FedAvg's. The server also learns features whose class-wise gradients match those of the clients'
images, the same number for each class, and trains a classifier on them that replaces FedAvg's for prediction.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Free, Message, MessageSpec, Task, TensorSpec, Update, class_list, spec_of
from lit_fedad.contracts.compute import one_thread
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, by_class
from lit_fedad.core.bounds import above, at_least
from lit_fedad.methods.fedavg import FedAvgServer, ServerModelClient
from lit_fedad.methods.parts.functional import gathered, take_step, with_weights
from lit_fedad.tasks.classifier import Classifier

WEIGHT, BIAS = "retrained.weight", "retrained.bias"
GRADIENTS, CLASSES = "gradients.values", "gradients.classes"


class CReFFClient(ServerModelClient):
    """A client that trains as in FedAvg, and sends the gradient of each of its classes in the re-trained classifier.

    A class's gradient is that of the loss of its images with respect to the weight and bias of the classifier. The
    paper augments images by DiffAug before their gradient is computed; here the task's views replace DiffAug. Clients
    predict with the re-trained classifier and do not train it.

    Args:
        draws: Number of draws of images over which the gradient of a class is averaged.
        batch: Images per draw; if a class has fewer, each draw takes all of them.

    Raises:
        UserError: If `draws` or `batch` is below 1.
    """

    needs = Classifier
    own_model = False
    task: Classifier

    def __init__(self, task: Classifier, local_epochs: int = 1, draws: int = 10, batch: int = 32) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 1, draws=draws, batch=batch)
        self.draws, self.batch = draws, batch
        self._received: Message = {}

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the re-trained classifier."""
        classifier = self.task.classifier
        return spec_of({WEIGHT: classifier.weight, BIAS: classifier.bias})

    def receive(self, message: Message) -> None:
        """Loads FedAvg's weights, and keeps them for the gradients."""
        super().receive(message)
        self._received = {name: entry for name, entry in message.items() if name not in self.auxiliary}

    def upload_spec(self) -> MessageSpec:
        """Declares the weights, and gradients [n, K, d + 1] of any number n of classes."""
        classes = self.task.classes
        gradient = (Free("classes", classes), classes, self.task.num_features + 1)
        return {**self.shared_spec(), GRADIENTS: TensorSpec(gradient), CLASSES: class_list(classes)}

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Replaces FedAvg's classifier by the re-trained one; there is no other predictor."""
        self.task.classifier.load_state_dict({"weight": self.auxiliary[WEIGHT], "bias": self.auxiliary[BIAS]})

    discloses = (TRAINED_WEIGHTS, by_class("gradients of the classifier, one a class of the site's images"))

    def send(self, loader: DataLoader) -> Message:
        """Returns the trained weights, and the gradient of each class of the client's images."""
        return {**super().send(loader), **self._class_gradients(loader)}

    @torch.no_grad()
    def _class_gradients(self, loader: DataLoader) -> Message:
        """Computes gradients under the received weights, with normalisation layers in evaluation mode."""
        images, labels = gathered(loader, "image", "label")
        classes = labels.unique()
        received = {name: entry.to(self.device) for name, entry in self._received.items()}
        with self.context.seeded("class gradients"):
            gradients = []
            for label in classes:
                gradient = partial(self._gradient, images=images[labels == label], label=label)
                gradients.append(with_weights(self.task, received, gradient))
        return {GRADIENTS: torch.stack(gradients), CLASSES: classes}

    def _gradient(self, task: Task, images: Tensor, label: Tensor) -> Tensor:
        """Computes the gradient [K, d + 1] of one class with respect to the re-trained classifier."""
        features = []
        for _ in range(self.draws):
            drawn = images[torch.randperm(len(images))[: self.batch]].to(self.device)
            features.append(task(task.view({"image": drawn, "label": label.expand(len(drawn))})))
        classifier = torch.column_stack([self.auxiliary[WEIGHT], self.auxiliary[BIAS]]).to(self.device)
        target = F.one_hot(label, len(classifier)).to(self.device)
        return cross_entropy_gradient(classifier, torch.cat(features), target).cpu()


class CReFFServer(FedAvgServer):
    """The server, which averages as FedAvg does, learns federated features and re-trains a classifier on them.

    It reports the matching loss before and after its steps, summed over the classes of the round.

    Args:
        client: A client, for the initial weights; the first re-trained classifier is the initial one.
        features_per_class: Number of federated features of each class; the features are kept between rounds.
        matching_steps: Steps of SGD per round that match the features' gradients with the clients'.
        matching_rate: Learning rate of matching.
        retraining_epochs: Passes over the features to train a new classifier by SGD.
        retraining_rate: Learning rate of re-training.
        batch_size: Features per step of re-training.

    Raises:
        UserError: If the number of features, steps or epochs, or the batch size, is below 1, or a rate not above 0.
    """

    merges_sums = False
    state_names = ("features", "seen")

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
        at_least("method.server", 1, features_per_class=features_per_class, matching_steps=matching_steps)
        at_least("method.server", 1, retraining_epochs=retraining_epochs, batch_size=batch_size)
        above("method.server", 0, matching_rate=matching_rate, retraining_rate=retraining_rate)
        self.features_per_class = features_per_class
        self.matching_steps, self.matching_rate = matching_steps, matching_rate
        self.retraining_epochs, self.retraining_rate = retraining_epochs, retraining_rate
        self.batch_size = batch_size
        self.classes, self.num_features = client.task.classes, client.task.num_features
        initial = client.task.classifier.state_dict()
        self.auxiliary = {
            name: initial[entry].to("cpu", copy=True) for name, entry in ((WEIGHT, "weight"), (BIAS, "bias"))
        }
        self.features: Tensor | None = None
        self.seen = torch.zeros(self.classes, dtype=torch.bool)

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages weights, matches the features of the clients' classes, and re-trains the classifier."""
        super().aggregate(updates)
        with one_thread():
            self._learn([update.message for update in updates.values()])

    def _learn(self, messages: list[Message]) -> None:
        """Matches the features and re-trains the classifier."""
        if self.features is None:
            shape = (self.classes, self.features_per_class, self.num_features)
            self.features = torch.randn(shape, generator=self.context.generator("federated features"))
        present, gradients = mean_gradients(
            *(torch.cat([m[name] for m in messages]) for name in (GRADIENTS, CLASSES))
        )
        device = self.device
        classifier = torch.column_stack([self.auxiliary[WEIGHT], self.auxiliary[BIAS]]).to(device)
        features, classes, targets = (
            part.to(device) for part in (self.features[present], present, gradients)
        )
        matched, before, after = match(
            features, classes, targets, classifier, self.matching_steps, self.matching_rate
        )
        self.features = self.features.index_copy(0, present, matched.cpu())
        self.seen = self.seen.index_fill(0, present, True)
        self.report = {"matching_loss_before": before, "matching_loss_after": after}
        self.auxiliary = self._retrain(self.features[self.seen].to(device))

    def _retrain(self, features: Tensor) -> Message:
        """Re-trains a classifier on the features of all classes seen so far [C, n, d]."""
        labels = self.seen.nonzero().repeat_interleave(features.shape[1]).to(features.device)
        with self.context.seeded("classifier re-training"):
            fresh = nn.Linear(self.num_features, self.classes).to(features.device)
            rate, epochs = self.retraining_rate, self.retraining_epochs
            weight, bias = train_classifier(
                fresh, features.flatten(0, 1), labels, epochs, rate, self.batch_size
            )
        return {WEIGHT: weight.cpu(), BIAS: bias.cpu()}


def cross_entropy_gradient(classifier: Tensor, features: Tensor, targets: Tensor) -> Tensor:
    """Computes the gradient of the mean cross-entropy by a linear classifier: ``(softmax - target)^T (z, 1) / B``.

    Args:
        classifier: Weight and bias, concatenated [K, d + 1].
        features: Features z [..., B, d].
        targets: One-hot labels, broadcast to [..., B, K].

    Returns:
        The gradient [..., K, d + 1], with that of the bias in the last column.

    Example:
        >>> cross_entropy_gradient(torch.zeros(2, 2), torch.tensor([[3.0]]), torch.tensor([[1, 0]]))
        tensor([[-1.5000, -0.5000],
                [ 1.5000,  0.5000]])
    """
    weight, bias = classifier[:, :-1], classifier[:, -1]
    residual = F.linear(features, weight, bias).softmax(-1) - targets
    return residual.mT @ F.pad(features, (0, 1), value=1.0) / features.shape[-2]


def mean_gradients(gradients: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Averages the gradient of each class over the clients that hold the class, with equal weights.

    Args:
        gradients: Gradients of all clients' classes [n, K, d + 1].
        classes: Their classes [n].

    Returns:
        The classes that any client holds, ascending [C], and their gradients [C, K, d + 1].
    """
    present, rows = classes.unique(return_inverse=True)
    total = torch.zeros(len(present), *gradients.shape[1:], dtype=torch.float64)
    total.index_add_(0, rows, gradients.double())
    return present, (total / rows.bincount()[:, None, None]).float()


def matching_loss(features: Tensor, classes: Tensor, gradients: Tensor, classifier: Tensor) -> Tensor:
    """Computes the distance of the features' gradients from given ones: the sum of 1 - cosine over their rows.

    The gradient of the bias is one more row.

    Args:
        features: Features of each class [C, n, d].
        classes: The features' classes, int64 [C].
        gradients: Gradients to match [C, K, d + 1].
        classifier: Weight and bias [K, d + 1] with respect to which gradients are computed.

    Returns:
        The sum over classes, in [0, 2 C (K + 1)].
    """
    targets = F.one_hot(classes, len(classifier))[:, None]
    own_gradients = cross_entropy_gradient(classifier, features, targets)
    rows = F.cosine_similarity(own_gradients[..., :-1], gradients[..., :-1], dim=-1)
    biases = F.cosine_similarity(own_gradients[..., -1], gradients[..., -1], dim=-1)
    return (1 - rows).sum() + (1 - biases).sum()


def match(
    features: Tensor, classes: Tensor, gradients: Tensor, classifier: Tensor, steps: int, learning_rate: float
) -> tuple[Tensor, float, float]:
    """Optimises features so that their gradients match given ones, by steps of SGD on `matching_loss`.

    Returns:
        The features [C, n, d], and the loss before and after.
    """
    moved = features.clone().requires_grad_()
    optimizer = torch.optim.SGD([moved], lr=learning_rate)
    for _ in range(steps):
        loss = matching_loss(moved, classes, gradients, classifier)
        take_step(optimizer, loss, "method.server.matching_rate")
    before, after = (matching_loss(z, classes, gradients, classifier) for z in (features, moved.detach()))
    return moved.detach(), float(before), float(after)


@torch.no_grad()
def train_classifier(
    start: nn.Linear, features: Tensor, labels: Tensor, epochs: int, learning_rate: float, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Trains a linear classifier by SGD and cross-entropy; batches are drawn from torch's global generator.

    The gradient is computed in closed form, which is faster than autograd for tens of thousands of small steps.

    Args:
        start: The initial classifier.
        features: Features [N, d].
        labels: Labels, int64 [N].
        epochs: Passes over the features.
        learning_rate: Learning rate of SGD.
        batch_size: Features per step.

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
