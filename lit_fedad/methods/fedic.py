"""FEDIC: calibrated distillation on the server, for long-tailed classes (Shang et al., ICME 2022).

The server fine-tunes the averaged model, combines the clients' models and the fine-tuned one to a teacher, and distils
the teacher into the averaged model. It holds public images, and labelled images, equally many of each class, that were
taken from the clients' images. No other method uses these labelled images: this gives FEDIC an advantage in a
comparison.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Message, Update
from lit_fedad.contracts.state import detached
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.bounds import above, at_least
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.methods.fedavg import FedAvgServer, ServerModelClient
from lit_fedad.methods.parts.functional import apply_in_chunks, copied, divergence, take_step
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks.classifier import Classifier

_FROZEN_BATCH = 128  # images per forward pass of a frozen encoder


class FEDICClient(ServerModelClient):
    """A client that trains and sends as in FedAvg; only the server's model predicts."""

    needs = Classifier
    task: Classifier

    def __init__(self, task: Classifier, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)


class FEDICServer(FedAvgServer):
    """The server, which averages weights by data size and distils a calibrated teacher into the averaged model.

    After the averaging a round has three parts, each of ``steps`` steps of Adam: the fine-tuning of a copy on labelled
    images, the training of a `Calibration`, which is kept between rounds, and the distillation. Adam's state is reset
    in each round; the released code keeps it and uses a weight decay of 2e-4. Teachers are in evaluation mode and
    images are not augmented, so that teachers process each image once per round.

    Args:
        public: Unlabelled auxiliary images uint8 [P, 3, S, S].
        server_labelled: Labelled images that no client holds, the same number of each class. A trained server predicts
            without either kind of image.
        steps: Steps of each part; 0 gives FedAvg.
        labelled_batch: Labelled images per step.
        auxiliary_batch: Auxiliary images per step.
        learning_rate: Learning rate of Adam.
        temperature: Temperature of the softmax in distillation.

    Raises:
        UserError: If a setting is out of range.
    """

    merges_sums = False
    state_names = ("calibration",)

    def __init__(
        self,
        client: FEDICClient,
        public: Tensor | None = None,
        server_labelled: LabelledDataset | None = None,
        steps: int = 100,
        labelled_batch: int = 20,
        auxiliary_batch: int = 128,
        learning_rate: float = 1e-3,
        temperature: float = 2.0,
    ) -> None:
        super().__init__(client)
        at_least("method.server", 0, steps=steps)
        at_least("method.server", 1, labelled_batch=labelled_batch, auxiliary_batch=auxiliary_batch)
        above("method.server", 0, learning_rate=learning_rate, temperature=temperature)
        self.task = copied(client.task)
        self.calibration = Calibration(client.task.classes, client.task.num_features)
        self.public, self.server_labelled = public, server_labelled
        self.steps, self.labelled_batch, self.auxiliary_batch = steps, labelled_batch, auxiliary_batch
        self.learning_rate, self.temperature = learning_rate, temperature

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Checks that distillation is possible.

        Raises:
            UserError: If there are no public or no labelled images, or their sizes differ.
        """
        self._images()

    def _images(self) -> tuple[Tensor, LabelledDataset]:
        """Returns the public and the labelled images."""
        public, labelled = self.public, self.server_labelled
        if public is None or labelled is None:
            raise UserError(
                "FEDIC's server learns from images of its own: give public=synthetic, folder or packed, and"
                " partition=task_stream partition.server_labelled=20 (labelled images of each class)"
            )
        if public.shape[1:] != labelled[0]["image"].shape:
            raise UserError(
                f"public images have {public.shape[-1]} pixels a side, the clients' {labelled[0]['image'].shape[-1]};"
                " leave public.size out"
            )
        return public, labelled

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Averages the weights, then fine-tunes, calibrates, and distils into the averaged model.

        Raises:
            UserError: If training diverges.
        """
        super().aggregate(updates)
        if self.steps:
            with self.context.seeded("distillation"):  # dropout draws random numbers
                self._distil([update.message for update in updates.values()])
            self.task.to("cpu")

    def _distil(self, clients: Sequence[Message]) -> None:
        public, labelled = self._images()
        task, count, device = self.task, len(labelled), self.launched.device
        batches = self._batches("auxiliary images", len(public), self.auxiliary_batch)
        used, auxiliary = batches.to(device).unique(return_inverse=True)
        labelled_batch = labelled.__getitems__(range(count))
        # Labelled images come first; teachers process only those auxiliary images that are drawn in some step.
        images = torch.cat([labelled_batch["image"], labelled.normalise(public[used.cpu()])]).to(device)
        labels = labelled_batch["label"].to(device)
        if isinstance(task.encoder, FrozenEncoder):  # its features never change: they replace the images
            task.to(device)
            images = torch.cat([task.encoder.features(part) for part in images.split(_FROZEN_BATCH)])

        def label_loss(batch: Tensor) -> Tensor:
            return F.cross_entropy(self._outputs(images[batch])[0], labels[batch])

        task.to(device)
        outputs = [self._outputs_of(model, images) for model in clients]
        logits = torch.stack([client_logits for client_logits, _ in outputs])
        features = torch.stack([client_features for _, client_features in outputs]).mean(0)

        task.load_state_dict(self.weights, strict=False)
        tuning_loss = self._train(task, label_loss, self._batches("fine-tuning", count, self.labelled_batch))
        tuned, _ = self._outputs_of(learned_state(task), images)

        calibration = self.calibration.to(device)
        calibration_loss = self._train(
            calibration,
            lambda batch: F.cross_entropy(
                calibration(logits[:, batch], features[batch], tuned[batch]), labels[batch]
            ),
            self._batches("calibration", count, self.labelled_batch),
        )
        with torch.no_grad():
            teacher = calibration(logits, features, tuned)[count:]
        self.calibration.to("cpu")

        def teacher_loss(batch: Tensor) -> Tensor:
            return divergence(self._outputs(images[count + batch])[0], teacher[batch], self.temperature)

        task.load_state_dict(self.weights, strict=False)
        distillation_loss = self._train(
            task,
            lambda unlabelled, batch: 0.5 * teacher_loss(unlabelled) + 0.5 * label_loss(batch),
            auxiliary,
            self._batches("teaching images", count, self.labelled_batch),
        )
        state = task.state_dict()
        self.weights = detached({name: state[name] for name in self.weights})
        self.report = {
            "fine_tuning_loss": tuning_loss,
            "calibration_loss": calibration_loss,
            "distillation_loss": distillation_loss,
        }

    def _batches(self, purpose: str, count: int, size: int) -> Tensor:
        """Draws the images of each step, without repetition within a step: int64 [steps, size]."""
        uniform = torch.ones(count).expand(self.steps, count)
        return torch.multinomial(uniform, min(size, count), generator=self.context.generator(purpose))

    def _outputs(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes logits [B, K] and features [B, D] under the task's current weights."""
        with self.launched.autocast():
            features = self.task({"image": images})
            logits = self.task.classifier(features)
        return logits.float(), features.float()

    def _outputs_of(self, model: Message, images: Tensor) -> tuple[Tensor, Tensor]:
        """Computes logits [N, K] and features [N, D] of all images under a model's weights, in evaluation mode."""
        logits, features = zip(*apply_in_chunks(self.task, model, images, self._outputs), strict=True)
        return torch.cat(logits), torch.cat(features)

    def _train(self, module: nn.Module, loss: Callable[..., Tensor], *batches: Tensor) -> float:
        """Trains a module by one step of Adam for each row of ``batches``; returns the last step's loss."""
        optimizer = torch.optim.Adam(module.parameters(), lr=self.learning_rate)
        module.train()
        for step in zip(*batches, strict=True):
            last = take_step(optimizer, loss(*step), "method.server.learning_rate")
        module.eval()
        return last


class Calibration(nn.Module):
    """The calibrated teacher, a combination of the clients' models and the fine-tuned one.

    The clients' logits l_j are averaged with weights proportional to ``sigmoid(u . l_j + b)``, then scaled and shifted
    class by class. A gate ``sigmoid(v . h)``, with h the mean of their features, mixes the result with the fine-tuned
    model's logits:
    ``gate * calibrated + (1 - gate) * tuned``. No parameter depends on the number of clients. Initially u = 1, scale 1,
    shift 0 and gate 1/2.

    Args:
        classes: Number of classes K.
        width: Number of features D.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.u, self.b = nn.Parameter(torch.ones(classes)), nn.Parameter(torch.zeros(()))
        self.scale, self.shift = nn.Parameter(torch.ones(classes)), nn.Parameter(torch.zeros(classes))
        self.v = nn.Parameter(torch.zeros(width))

    def forward(self, logits: Tensor, features: Tensor, tuned: Tensor) -> Tensor:
        """Computes the teacher's logits [B, K].

        Args:
            logits: The clients' logits [C, B, K].
            features: Mean of the clients' features [B, D].
            tuned: The fine-tuned model's logits [B, K].
        """
        # The weights are sigmoids divided by their sum, computed as logarithms so that the sum cannot underflow.
        weight = F.logsigmoid(logits @ self.u + self.b).softmax(0)
        calibrated = self.scale * (weight[..., None] * logits).sum(0) + self.shift
        gate = (features @ self.v).sigmoid()[:, None]
        return gate * calibrated + (1 - gate) * tuned
