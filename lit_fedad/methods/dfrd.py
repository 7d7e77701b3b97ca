"""DFRD: the server distils the clients' models into their average, on images of a generator (Luo et al., NeurIPS 2023).

arXiv 2309.13546. Clients train as in FedAvg and send their numbers of images of each class. The server trains a
generator of images that differ from each other, and that the ensemble of the clients' models assigns to the requested
class while the averaged model does not. Then it distils the ensemble into the averaged model on images of this
generator and of its moving average. Constants are those of the released code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_fedad.contracts import Message, Update
from lit_fedad.contracts.state import detached
from lit_fedad.core.bounds import above, at_least, within
from lit_fedad.methods.parts.client_bases import COUNTS, CountingClient, CountingServer
from lit_fedad.methods.parts.functional import divergence, frozen, take_step, with_weights
from lit_fedad.models.conditional_gan import ConditionalGenerator
from lit_fedad.models.encoders import refuse_frozen
from lit_fedad.tasks.classifier import Classifier

_ADAM_BETAS = (0.5, 0.999)  # of the generator's optimiser


class DFRDClient(CountingClient):
    """A client that trains as in FedAvg, and also sends how many images of each class it has.

    Args:
        task: A `Classifier` of pixels.

    Raises:
        UserError: If the encoder is frozen.
    """

    def __init__(self, task: Classifier, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)
        refuse_frozen(task.encoder, "method dfrd generates images")


class DFRDServer(CountingServer):
    """FedAvg's server, which distils the clients' models into their average.

    A round has ``steps`` turns. In each turn Adam takes ``generator_steps`` steps on the generator, then SGD takes
    ``distillation_steps`` steps on the averaged model f; both optimisers start anew in each turn. The ensemble is
    ``e(x) = sum_i t_{i,y} f_i(x)``, where ``t_{i,y}`` is client i's share of the images of class y. Labels y are drawn
    in proportion to the images of each class. With h the product of noise and label embedding
    (`ConditionalGenerator.mixed`), x = G(h), and KL at a temperature, the generator minimises
    ``CE(e(x), y) - transfer KL(f(x) || e(x)) + diversity exp(-mean_ij d(h_i, h_j) d(x_i, x_j)) + embedding_bound L_y``.
    The second term is over images that the ensemble classifies correctly and f does not. L_y is the amount by which the
    norm of a label's embedding exceeds the square root of its number of entries. The averaged model minimises
    ``KL(e(x) || f(x)) + replay KL(e(x~) || f(x~))``, with x~ from the moving average of the generators of earlier
    rounds. Normalisation layers keep the averaged running statistics.

    Args:
        image_size: S, the side of the images in pixels.
        channels: Channels of the images.
        mean: Mean of each channel in [0, 1], for the normalisation of images.
        std: Standard deviation of each channel.
        steps: Turns of generator and averaged model in a round; 0 gives FedAvg.
        generator_steps: Steps of the generator in a turn.
        distillation_steps: Steps of the averaged model in a turn.
        batch_size: Images in each step.
        latent: Length of a noise vector.
        width: Channels of the generator's 4 x 4 map.
        generator_rate: Learning rate of the generator.
        learning_rate: Learning rate of the averaged model.
        weight_decay: Weight decay of the averaged model.
        temperature: Temperature of every KL.
        transfer: Weight of the term over images that the averaged model gets wrong.
        diversity: Weight of the images' diversity.
        embedding_bound: Weight of the bound L_y on the labels' embeddings.
        memory: Share of the generators' moving average that a round keeps.
        replay: Weight of the loss on images of the moving average, from round 2.

    Raises:
        UserError: If a setting is out of range.
    """

    merges_sums = False
    state_names = ("generator", "average")

    def __init__(
        self,
        client: DFRDClient,
        image_size: int,
        channels: int = 3,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        steps: int = 10,
        generator_steps: int = 2,
        distillation_steps: int = 5,
        batch_size: int = 64,
        latent: int = 64,
        width: int = 512,
        generator_rate: float = 2e-4,
        learning_rate: float = 0.01,
        weight_decay: float = 1e-4,
        temperature: float = 10.0,
        transfer: float = 1.0,
        diversity: float = 1.0,
        embedding_bound: float = 0.25,
        memory: float = 0.5,
        replay: float = 0.5,
    ) -> None:
        super().__init__(client)
        at_least("method.server", 0, steps=steps, weight_decay=weight_decay)
        at_least(
            "method.server",
            0,
            transfer=transfer,
            diversity=diversity,
            embedding_bound=embedding_bound,
            replay=replay,
        )
        at_least("method.server", 1, generator_steps=generator_steps, distillation_steps=distillation_steps)
        at_least("method.server", 2, batch_size=batch_size)
        above("method.server", 0, generator_rate=generator_rate, learning_rate=learning_rate)
        above("method.server", 0, temperature=temperature)
        within("method.server", 0, 1, memory=memory)
        self.steps, self.generator_steps, self.distillation_steps = steps, generator_steps, distillation_steps
        self.batch_size, self.temperature = batch_size, temperature
        self.generator_rate, self.learning_rate = generator_rate, learning_rate
        self.weight_decay = weight_decay
        self.transfer, self.diversity, self.embedding_bound = transfer, diversity, embedding_bound
        self.memory, self.replay = memory, replay
        self.task = deepcopy(client.task)
        self._network = ConditionalGenerator(
            client.task.classes, image_size, channels, latent, width, mean, std, "method.server"
        )
        self.generator: Message = detached(self._network.state_dict())
        self.average: Message = {}
        """The generator's moving average; empty before the first round."""

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages the weights, then distils the clients' models into the averaged model.

        Raises:
            UserError: If distillation diverges.
        """
        super().aggregate(updates)
        if self.steps:
            messages = [update.message for update in updates.values()]
            counts = torch.stack([message[COUNTS] for message in messages])
            models = [{name: message[name] for name in self.weights} for message in messages]
            with self.context.seeded("distillation"):
                self.distil(counts, models)

    def distil(self, counts: Tensor, models: Sequence[Message]) -> None:
        """Trains the generator, and distils the clients' models into the averaged model, in turn.

        Args:
            counts: Images of each client and class [N, K].
            models: Each client's weights.
        """
        task, network = self.task.to(self.device), self._network.to(self.device)
        task.load_state_dict(self.weights, strict=False)
        task.eval()
        network.load_state_dict(self.generator)
        earlier = deepcopy(network).requires_grad_(False)
        if self.average:
            earlier.load_state_dict(self.average)
        ensemble = Ensemble(counts, models, task, self._logits)
        for _ in range(self.steps):
            with frozen(task):
                generator_loss = self._train_generator(network, ensemble)
            distillation_loss = self._train_average(network, earlier, ensemble)
        self.report = {"generator_loss": generator_loss, "distillation_loss": distillation_loss}
        self.generator, state = detached(network.state_dict()), task.to("cpu").state_dict()
        self.weights = detached({name: state[name] for name in self.weights})
        previous = self.average or self.generator
        self.average = {
            name: self.memory * previous[name] + (1 - self.memory) * entry
            for name, entry in self.generator.items()
        }

    def _train_generator(self, network: ConditionalGenerator, ensemble: Ensemble) -> float:
        optimizer = torch.optim.Adam(network.parameters(), lr=self.generator_rate, betas=_ADAM_BETAS)
        for _ in range(self.generator_steps):
            labels, noise = self._draw(network, ensemble)
            mixed = network.mixed(labels, noise)
            images = network.decode(mixed)
            teacher, student = ensemble(images, labels), self._logits(images)
            loss = (
                F.cross_entropy(teacher, labels)
                - self.transfer * disagreement(teacher, student, labels, self.temperature)
                + self.diversity * diversity(mixed, images)
                + self.embedding_bound
                * (network.embedding(labels).norm(dim=1) - network.latent**0.5).relu().mean()
            )
            last = take_step(optimizer, loss, "method.server.generator_rate")
        return last

    def _train_average(
        self, network: ConditionalGenerator, earlier: ConditionalGenerator, ensemble: Ensemble
    ) -> float:
        sources = [(network, 1.0), *([(earlier, self.replay)] if self.average and self.replay else [])]
        optimizer = torch.optim.SGD(
            self.task.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
        for _ in range(self.distillation_steps):
            losses = []
            for source, weight in sources:
                labels, noise = self._draw(source, ensemble)
                with torch.no_grad():
                    images = source(labels, noise)
                    teacher = ensemble(images, labels)
                losses.append(weight * divergence(self._logits(images), teacher, self.temperature))
            last = take_step(optimizer, torch.stack(losses).sum(), "method.server.learning_rate")
        return last

    def _draw(self, network: ConditionalGenerator, ensemble: Ensemble) -> tuple[Tensor, Tensor]:
        """Draws labels [B] in proportion to the clients' images, and noise [B, N]."""
        labels = torch.multinomial(ensemble.frequencies, self.batch_size, replacement=True)
        noise = torch.randn(self.batch_size, network.latent)
        return labels.to(self.device), noise.to(self.device)

    def _logits(self, images: Tensor) -> Tensor:
        """Computes logits [B, K] under the task's current weights."""
        with self.fabric.autocast() if self.fabric else nullcontext():
            logits: Tensor = self.task.classifier(self.task({"image": images}))
        return logits.float()


class Ensemble:
    """The clients' models, weighted label by label: ``e(x) = sum_i t_{i,y} f_i(x)``.

    Args:
        counts: Images of each client and class [N, K].
        models: Each client's weights.
        task: The task that the weights belong to; its own weights are replaced during calls.
        logits: Function from normalised images to the task's logits.

    Attributes:
        frequencies: Images of each class over all clients [K].
    """

    def __init__(
        self,
        counts: Tensor,
        models: Sequence[Message],
        task: Classifier,
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        self.frequencies = counts.sum(0).float()
        self._shares = (counts / counts.sum(0).clamp(min=1)).float().to(task.device)
        self._models = [{name: entry.to(task.device) for name, entry in model.items()} for model in models]
        self._task, self._logits = task, logits

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Computes the weighted logits [B, K] of images that were generated for labels [B]."""
        parts = [
            shares[labels, None] * with_weights(self._task, model, lambda _: self._logits(images))
            for shares, model in zip(self._shares, self._models, strict=True)
        ]
        return torch.stack(parts).sum(0)


def disagreement(teacher: Tensor, student: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Computes the mean of ``KL(student || teacher)`` over images that the teacher alone assigns to their label.

    It is 0 if there are no such images. The student's logits are treated as constants.

    Args:
        teacher: The ensemble's logits [B, K].
        student: The average's logits [B, K].
        labels: Labels that the images were generated for [B].
        temperature: Temperature T.
    """
    chosen = (teacher.argmax(1) == labels) & (student.argmax(1) != labels)
    if not chosen.any():
        return torch.zeros((), device=teacher.device)
    return divergence(teacher[chosen], student[chosen].detach(), temperature)


def diversity(mixed: Tensor, images: Tensor) -> Tensor:
    """Computes ``exp(-mean_ij d(h_i, h_j) d(x_i, x_j))``, d the mean square of differences.

    Args:
        mixed: Products h of noise and label embedding [B, N].
        images: Images x [B, C, H, W].
    """
    return (-(_mean_squares(mixed) * _mean_squares(images.flatten(1))).mean()).exp()


def _mean_squares(rows: Tensor) -> Tensor:
    """Computes the mean square of the differences of all pairs of rows [B, B]; no tensor of size B x B x D is made."""
    squares = rows.square().sum(1)
    return (squares[:, None] + squares - 2 * rows @ rows.T).clamp(min=0) / rows.shape[1]
