"""FEDIC: calibrated distillation on the server, for long-tailed classes (Shang et al., ICME 2022).

The server fine-tunes the average, makes one teacher of the clients' models and the fine-tuned one, and distils it
into the average. For that it holds images of its own: public ones, and labelled ones, as many of every class, taken
out of the clients' pools. No other method sees the latter: in a comparison it is ahead by that much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Context, Message, Predictors, Update
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.parts.functional import look
from lit_fedad.tasks.classifier import Classifier


class FEDICClient(FedAvgClient):
    """A client: trains and sends as under FedAvg; only the server's model is meant to predict.

    Args:
        task: A `Classifier`.
        local_epochs: E.
    """

    needs = Classifier
    task: Classifier

    def __init__(self, task: Classifier, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)

    @property
    def predictors(self) -> Predictors:
        """Only the server's model is meant to predict."""
        return replace(super().predictors, own=False)


class FEDICServer(FedAvgServer):
    """The server: averages weights by data size, and distils a calibrated teacher into the average.

    Three parts of a round follow the average, each of ``steps`` steps of Adam: the fine-tuning of a copy of it on
    labelled images, the training of a `Calibration`, which is carried on from round to round, and the distillation.
    Adam starts anew each round; the released code carries it on too, and decays weights by 2e-4. Teachers are in
    evaluation mode and images are not augmented, so that teachers look at each image once a round.

    Args:
        client: A client, for the initial weights.
        public: Unlabelled auxiliary images uint8 [P, 3, S, S].
        server_labelled: Labelled images that no client holds, as many of each class. A trained server answers
            without either kind.
        steps: Steps of each part; 0 is FedAvg.
        labelled_batch: Labelled images a step.
        auxiliary_batch: Auxiliary images a step.
        learning_rate: Adam's.
        temperature: Divides logits before the softmax in distillation.

    Raises:
        UserError: If a setting is out of range.
    """

    kept = ("calibration",)

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
        if steps < 0 or min(labelled_batch, auxiliary_batch) < 1 or min(learning_rate, temperature) <= 0:
            raise UserError(
                f"method.server.steps={steps}, labelled_batch={labelled_batch}, auxiliary_batch={auxiliary_batch},"
                f" learning_rate={learning_rate}, temperature={temperature}: give batches of at least 1, numbers"
                " above 0, and at least 0 steps"
            )
        self.task = deepcopy(client.task)
        self.calibration = Calibration(client.task.classes, client.task.num_features)
        self.public, self.server_labelled = public, server_labelled
        self.steps, self.labelled_batch, self.auxiliary_batch = steps, labelled_batch, auxiliary_batch
        self.learning_rate, self.temperature = learning_rate, temperature
        self._report: dict[str, float] = {}

    def begin(self, context: Context) -> None:
        """Starts a round; before anything is trained, makes sure that it can be distilled.

        Raises:
            UserError: If there are no public or no labelled images, or their sizes differ.
        """
        super().begin(context)
        if context.round <= 1:
            self._images()

    def _images(self) -> tuple[Tensor, LabelledDataset]:
        """The public and the labelled images."""
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
        """The average; then fine-tuning, calibration, and distillation into the average.

        Raises:
            UserError: If training diverges.
        """
        super().aggregate(updates)
        if self.steps:
            with self.context.seeded("distillation"):  # models may draw, for dropout
                self._distil([update.message for update in updates.values()])
            self.task.to("cpu")

    def _distil(self, clients: Sequence[Message]) -> None:
        public, labelled = self._images()
        task, count, device = self.task, len(labelled), self._launched.device
        batches = self._batches("auxiliary images", len(public), self.auxiliary_batch)
        drawn, auxiliary = batches.to(device).unique(return_inverse=True)
        held = labelled.__getitems__(range(count))
        # Labelled images first; no teacher looks at an auxiliary image that is not drawn.
        images = torch.cat([held["image"], labelled.normalise(public[drawn.cpu()])]).to(device)
        labels = held["label"].to(device)

        def hard(batch: Tensor) -> Tensor:
            return F.cross_entropy(self._look(images[batch])[0], labels[batch])

        task.to(device)
        answers = [self._ask(model, images) for model in clients]
        logits = torch.stack([own for own, _ in answers])
        features = torch.stack([own for _, own in answers]).mean(0)

        task.load_state_dict(self.weights, strict=False)
        tuning = self._train(task, hard, self._batches("fine-tuning", count, self.labelled_batch))
        tuned, _ = self._ask(task.learned_state(), images)

        calibration = self.calibration.to(device)
        calibrating = self._train(
            calibration,
            lambda batch: F.cross_entropy(
                calibration(logits[:, batch], features[batch], tuned[batch]), labels[batch]
            ),
            self._batches("calibration", count, self.labelled_batch),
        )
        with torch.no_grad():
            teacher = calibration(logits, features, tuned)[count:]
        self.calibration.to("cpu")

        def soft(batch: Tensor) -> Tensor:
            return divergence(self._look(images[count + batch])[0], teacher[batch], self.temperature)

        task.load_state_dict(self.weights, strict=False)
        distilling = self._train(
            task,
            lambda seen, batch: 0.5 * soft(seen) + 0.5 * hard(batch),
            auxiliary,
            self._batches("teaching images", count, self.labelled_batch),
        )
        state = task.state_dict()
        self.weights = {name: state[name].detach().to("cpu", copy=True) for name in self.weights}
        self._report = {
            "fine_tuning_loss": tuning,
            "calibration_loss": calibrating,
            "distillation_loss": distilling,
        }

    @property
    def _launched(self) -> Fabric:
        assert self.fabric is not None  # weights are merged in a federation alone
        return self.fabric

    def _batches(self, purpose: str, count: int, size: int) -> Tensor:
        """Which images each step looks at, none twice in a step: int64 [steps, size]."""
        chances = torch.ones(count).expand(self.steps, count)
        return torch.multinomial(chances, min(size, count), generator=self.context.generator(purpose))

    def _look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, K] and features [B, D] under the weights that the task has."""
        with self._launched.autocast():
            features = self.task({"image": images})
            logits = self.task.classifier(features)
        return logits.float(), features.float()

    def _ask(self, model: Message, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, K] and features [N, D] of all images under a model's weights, in evaluation mode."""
        logits, features = zip(*look(self.task, model, images, self._look), strict=True)
        return torch.cat(logits), torch.cat(features)

    def _train(self, module: nn.Module, loss: Callable[..., Tensor], *batches: Tensor) -> float:
        """Adam's steps on a module in training mode, one for each row of ``batches``; the last step's loss."""
        optimizer = torch.optim.Adam(module.parameters(), lr=self.learning_rate)
        module.train()
        for step in zip(*batches, strict=True):
            value = loss(*step)
            if not torch.isfinite(value):
                raise UserError("training on the server diverged; lower method.server.learning_rate")
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        module.eval()
        return float(value.detach())

    def diagnostics(self) -> dict[str, float]:
        """The loss of the last step of each part."""
        return self._report


class Calibration(nn.Module):
    """Makes one teacher of the clients' models and the fine-tuned one.

    The clients' logits l_j are summed with ``weight_j = sigmoid(u . l_j + b)``, divided by its sum over clients, then
    scaled and shifted class by class. A gate ``sigmoid(v . h)`` of their mean feature h shares the outcome between
    these and the fine-tuned logits: ``gate * calibrated + (1 - gate) * tuned``. No parameter depends on the number
    of clients. It starts with u = 1, nothing scaled or shifted, and an open share of 1/2.

    Args:
        classes: K.
        width: Features D.
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.u, self.b = nn.Parameter(torch.ones(classes)), nn.Parameter(torch.zeros(()))
        self.scale, self.shift = nn.Parameter(torch.ones(classes)), nn.Parameter(torch.zeros(classes))
        self.v = nn.Parameter(torch.zeros(width))

    def forward(self, logits: Tensor, features: Tensor, tuned: Tensor) -> Tensor:
        """The teacher's logits [B, K].

        Args:
            logits: The clients' [C, B, K].
            features: Their mean over clients [B, D].
            tuned: The fine-tuned model's logits [B, K].
        """
        # Sigmoids over their sum; by logarithms, so that the sum cannot vanish.
        weight = F.logsigmoid(logits @ self.u + self.b).softmax(0)
        calibrated = self.scale * (weight[..., None] * logits).sum(0) + self.shift
        gate = (features @ self.v).sigmoid()[:, None]
        return gate * calibrated + (1 - gate) * tuned


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """``KL(softmax(teacher / T) || softmax(student / T))``, the mean over a batch, without the customary factor T^2.

    Args:
        student: Logits [B, K].
        teacher: Logits [B, K].
        temperature: T.
    """
    return F.kl_div(
        (student / temperature).log_softmax(1),
        (teacher / temperature).log_softmax(1),
        log_target=True,
        reduction="batchmean",
    )
