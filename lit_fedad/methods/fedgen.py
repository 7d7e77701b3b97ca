"""FedGen: a generator of features, learnt from the clients' heads, regularises local training (Zhu et al., ICML 2021).

The server trains a generator of features that the clients' output layers assign to the requested label. It sends the
generator with the weights, and from round 2 clients train their output layer on generated features.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Message, MessageSpec, Update, spec_of
from lit_fedad.contracts.state import detached
from lit_fedad.core.bounds import above, at_least
from lit_fedad.methods.parts.client_bases import COUNTS, CountingClient, CountingServer
from lit_fedad.methods.parts.functional import take_step
from lit_fedad.tasks.classifier import Classifier

GENERATOR = "generator."
_GENERATED_EPOCHS = 20  # local epochs of a round that use generated features, as in the released code
_DECAY = 0.98  # factor per round of the weights of both losses and of the generator's learning rate


class FeatureGenerator(nn.Module):
    """Generates features [B, C] of labels from noise that is uniform on [0, 1].

    Args:
        classes: Number of classes K.
        features: Number of features C.
        noise: Length of a noise vector.
        hidden: Number of hidden units.
    """

    def __init__(self, classes: int, features: int, noise: int = 64, hidden: int = 512) -> None:
        super().__init__()
        self.classes, self.noise = classes, noise
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
        )

    def forward(self, labels: Tensor, noise: Tensor | None = None) -> Tensor:
        """Generates features of labels [B], from noise [B, N]; noise comes from torch's global CPU generator."""
        noise = torch.rand(len(labels), self.noise) if noise is None else noise
        return self.layers(torch.cat([noise.to(labels.device), F.one_hot(labels, self.classes).float()], 1))


def diversity(noise: Tensor, features: Tensor) -> Tensor:
    """Computes ``exp(-mean_ij d_2(u_i, u_j) d_1(z_i, z_j))``: near 1 where different noise gives equal features.

    Args:
        noise: Noise u [B, N]; d_2 is the mean square of differences.
        features: Features z [B, C]; d_1 is the mean of absolute differences.
    """
    products = (noise[:, None] - noise).square().mean(2) * (features[:, None] - features).abs().mean(2)
    return (-products.mean()).exp()


class FedGenClient(CountingClient):
    """A client that also trains on generated features, and sends how many images of each class it has.

    From round 2, with g = ``weight * 0.98^(t - 1)``, it minimises ``CE(x, y) + n / B g CE(head(G(y')), y') +
    g KL(softmax head(G(y)) || p(x))``. Labels y' are drawn uniformly from the classes that occurred in any round. B is
    the size of a full batch, as in the released code: divided by the images of a client's last, short batch, the middle
    term would be up to B times as large, and training would diverge.

    Args:
        weight: Weight of both losses; 0 gives FedAvg.
        generated: Number n of features that are generated in a step.
        batch_size: Number B of images in a full batch.
        noise: Length of the generator's noise vectors.
        hidden: Number of the generator's hidden units.
    """

    def __init__(
        self,
        task: Classifier,
        local_epochs: int = 1,
        weight: float = 10.0,
        generated: int = 32,
        batch_size: int = 32,
        noise: int = 64,
        hidden: int = 512,
    ) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, weight=weight)
        at_least("method.client", 1, generated=generated, batch_size=batch_size, noise=noise, hidden=hidden)
        self.weight, self.generated, self.batch_size = weight, generated, batch_size
        self.generator = FeatureGenerator(task.classes, task.num_features, noise, hidden)
        self.generator.requires_grad_(False)
        self._epoch = 0

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the generator, and the largest number of images of each class in a round so far."""
        return {**spec_of(_named(self.generator.state_dict())), COUNTS: self.counts_spec()}

    def receive(self, message: Message) -> None:
        """Loads the weights and the generator."""
        super().receive(message)
        weights = {n.removeprefix(GENERATOR): w for n, w in self.auxiliary.items() if n.startswith(GENERATOR)}
        self.generator.load_state_dict(weights)

    def on_train_start(self) -> None:
        """Resets the count of epochs, and sets the generator to evaluation mode."""
        self._epoch = -1
        self.generator.eval()

    def on_train_epoch_start(self) -> None:
        """Counts epochs."""
        self._epoch += 1

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss plus those of generated features."""
        present = self.auxiliary[COUNTS].nonzero()[:, 0]
        if not self.weight or self.context.round < 2 or self._epoch >= _GENERATED_EPOCHS or not len(present):
            return self.task.training_step(batch, batch_idx)
        view = self.task.view(batch)
        features = self.task(view)
        outputs = self.task.objective(features, view)
        labels, head = view["label"], self.task.classifier
        drawn_labels = present[torch.randint(len(present), (self.generated,))].to(labels.device)
        teacher = F.cross_entropy(head(self.generator(drawn_labels)).float(), drawn_labels)
        target = head(self.generator(labels)).float().softmax(1).detach()
        latent = F.kl_div(head(features).float().log_softmax(1), target, reduction="batchmean")
        weight = self.weight * _DECAY ** (self.context.round - 1)
        loss = outputs["loss"] + weight * (self.generated / self.batch_size * teacher + latent)
        return {**outputs, "loss": loss, "teacher": teacher, "latent": latent}


class FedGenServer(CountingServer):
    """FedAvg's server, which trains the generator on the clients' output layers before it averages.

    It minimises ``sum_k mean a_{k,y} NLL(head_k(G(y)), y) + diversity * L_div``. a_{k,y} is client k's share of the
    images of class y that clients trained on in the round; L_div is the function `diversity`. Each client's count
    begins at 1, as in the released code: a client without a class keeps a small weight, and one image suffices for a
    class to be drawn. The released code has a further, adversarial term, whose weight is 0 there.

    Args:
        client: A client, for the initial weights and the generator.
        steps: Steps of Adam in each round.
        batch_size: Generated features in each step.
        learning_rate: Learning rate of Adam.
        weight_decay: Weight decay of Adam.
        diversity: Weight of L_div.
    """

    merges_sums = False
    state_names = ("generator", "optimizer_state")

    def __init__(
        self,
        client: FedGenClient,
        steps: int = 50,
        batch_size: int = 32,
        learning_rate: float = 3e-4,
        weight_decay: float = 1e-2,
        diversity: float = 1.0,
    ) -> None:
        super().__init__(client)
        at_least("method.server", 0, steps=steps, weight_decay=weight_decay, diversity=diversity)
        at_least("method.server", 2, batch_size=batch_size)  # batch normalisation needs two for a variance
        above("method.server", 0, learning_rate=learning_rate)
        self.steps, self.batch_size, self.diversity = steps, batch_size, diversity
        self.local_epochs = client.local_epochs
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.generator = {name: entry.clone() for name, entry in client.generator.state_dict().items()}
        no_images = torch.zeros(client.task.classes, dtype=torch.int64)
        self.auxiliary = {**_named(self.generator), COUNTS: no_images}
        self.optimizer_state: dict[str, Any] | None = None
        first_layer = client.generator.layers[0]
        assert isinstance(first_layer, nn.Linear)
        noise = client.generator.noise
        self._build = lambda: FeatureGenerator(
            client.task.classes, client.task.num_features, noise, first_layer.out_features
        )

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Trains the generator, then averages the weights."""
        counts = torch.stack([update.message[COUNTS] for update in updates.values()])
        heads = [
            (update.message["classifier.weight"], update.message["classifier.bias"])
            for update in updates.values()
        ]
        self.learn(counts, heads)
        # Clients draw from the classes of all rounds so far, whoever takes part in this one.
        seen = self.auxiliary[COUNTS].maximum(counts.sum(0))
        self.auxiliary = {**_named(self.generator), COUNTS: seen}
        super().aggregate(updates)

    def learn(self, counts: Tensor, heads: list[tuple[Tensor, Tensor]]) -> None:
        """Trains the generator on output layers.

        Args:
            counts: Images of each client and class [N, K].
            heads: Weight [K, C] and bias [K] of each client's output layer.
        """
        smoothed = 1 + self.local_epochs * counts
        shares = (smoothed / smoothed.sum(0)).float().to(self.device)
        present = (smoothed.amax(0) > 1).nonzero()[:, 0]
        if not len(present) or not self.steps:
            return
        layers = [tuple(entry.float().to(self.device) for entry in head) for head in heads]
        with self.context.seeded("generator"):
            generator = self._build().to(self.device).train()
            generator.load_state_dict(self.generator)
            rate = self.learning_rate * _DECAY ** (self.context.round - 1)
            optimizer = torch.optim.Adam(generator.parameters(), lr=rate, weight_decay=self.weight_decay)
            if self.optimizer_state is not None:  # a copy, because the optimiser changes its state in place
                optimizer.load_state_dict(deepcopy(self.optimizer_state))
                optimizer.param_groups[0]["lr"] = rate
            for _ in range(self.steps):
                labels = present[torch.randint(len(present), (self.batch_size,))].to(self.device)
                noise = torch.rand(self.batch_size, generator.noise).to(self.device)
                features = generator(labels, noise)
                teacher = generator_loss(features, labels, shares, layers)
                loss = teacher + self.diversity * diversity(noise, features)
                last = take_step(optimizer, loss, "method.server.learning_rate")
        self.generator = detached(generator.state_dict())
        self.optimizer_state = optimizer.state_dict()
        self.report = {"generator_loss": last, "generator_teacher": float(teacher.detach())}


def _named(generator: Mapping[str, Tensor]) -> Message:
    return {f"{GENERATOR}{name}": entry for name, entry in generator.items()}


def generator_loss(
    features: Tensor, labels: Tensor, shares: Tensor, heads: list[tuple[Tensor, ...]]
) -> Tensor:
    """Computes ``sum_k mean_i a_{k,y_i} NLL(head_k(z_i), y_i)``.

    Args:
        features: Generated features z [B, C].
        labels: Labels y that the features were generated for [B].
        shares: Each client's share a of each class [N, K].
        heads: Weight [K, C] and bias [K] of each client's output layer.
    """
    losses = [F.cross_entropy(F.linear(features, *head), labels, reduction="none") for head in heads]
    return (torch.stack(losses) * shares[:, labels]).mean(1).sum()
