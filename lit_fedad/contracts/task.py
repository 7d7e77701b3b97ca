"""Tasks define what is learnt and how images are scored."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts.randomness import Context
from lit_fedad.contracts.state import take_sizes
from lit_fedad.core.errors import UserError, not_there


class Prediction(NamedTuple):
    """The prediction of a task for a batch. High scores are anomalous.

    Attributes:
        image_score: One score for each image [B].
        anomaly_map: One score for each pixel [B, H, W]; None for tasks that do not localise.
        logits: Class logits [B, K] of classification tasks.
        others: Logits [B, K] of the method's other classifiers (`Predictors.heads`), by name.
    """

    image_score: Tensor
    anomaly_map: Tensor | None = None
    logits: Tensor | None = None
    others: Mapping[str, Tensor] = {}


class Task(L.LightningModule):
    """What is learnt and how images are scored; can also be trained by a plain ``lightning.Trainer``.

    A step is ``view -> forward -> objective``, a prediction ``forward -> embedding -> predict``, so that methods can
    regularise, shift or share features in between. Subclasses implement `forward`, `predict` and, where they train,
    `objective`.

    Attributes:
        kind: Kind of task, which selects the metrics.
        prepares: Whether `refresh` computes something from local data.
        trains: Whether there are weights to train.
        trains_on_bank: Whether training uses what `refresh` recomputes; False where only predictions use it.
        methods: Where nothing is trained, the methods that fit the task, as an error message names them.
        learning_rate: Learning rate of the optimiser.
        weight_decay: Weight decay of the optimiser.
        local_buffers: Buffers computed from local data, which are not shared as weights are.
        free_buffers: Buffers whose sizes may differ from one state to another, such as a bank of all images.
        scoring_buffers: Buffers that `embedding` does not depend on, such as the bank that `predict` scores by.
        output_modules: Submodules between features and output, which methods with personal heads do not share.
        num_features: Channels of the features.
        round: The current round of the federation, for schedules; 0 outside of a federation.
    """

    kind: Literal["anomaly", "classification"] = "anomaly"
    prepares: bool = False
    trains: bool = True
    trains_on_bank: bool = True
    methods: str = "local or centralised, and rounds=0"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    local_buffers: tuple[str, ...] = ()
    free_buffers: tuple[str, ...] = ()
    scoring_buffers: tuple[str, ...] = ()
    output_modules: tuple[str, ...] = ()
    num_features: int
    round: int = 0

    @property
    def images_behind(self) -> int | None:
        """Smallest number of images that may decide a shared value; None for all images that are trained with.

        It depends on the task's settings. Sites take it as the number of images behind weights (`Disclosure.images`).
        It is 1 for a loss of the hardest patches of a batch, all of which may belong to one image.
        """
        return None

    def view(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the input of one training step: an augmentation or a sample of the batch; by default the batch."""
        return batch

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes features. Call the task itself, so that forward hooks of methods apply.

        Args:
            batch: A batch of the data module, or a view of one.

        Returns:
            Features [B, num_features] or [B, positions, num_features].
        """
        raise not_there(self, "forward")

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the training loss.

        Args:
            features: Features of the view.
            batch: The view.

        Returns:
            ``loss``, and other scalars to track.

        Raises:
            UserError: Where nothing is trained.
        """
        if self.trains:
            raise not_there(self, "objective")
        raise UserError(f"task {type(self).__name__} has nothing to train: give METHOD={self.methods}")

    def embedding(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes the representation from which `predict` scores the images of a batch; by default their features.

        Clients whose states differ only in ``scoring_buffers`` share the same embedding.
        """
        return self(batch)

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores the images of a batch.

        Args:
            features: The `embedding` of the whole batch.
            batch: The batch.
        """
        raise not_there(self, "predict")

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the loss of a random view of a batch."""
        view = self.view(batch)
        return self.objective(self(view), view)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores a batch; uses the ``embedding`` in the batch instead of computing it, if there is one."""
        embedding = batch.get("embedding")
        return self.predict(self.embedding(batch) if embedding is None else embedding, batch)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds the optimiser of all trainable parameters; by default Adam."""
        return torch.optim.Adam(self.trainable, lr=self.learning_rate, weight_decay=self.weight_decay)

    def setup(self, stage: str) -> None:
        """Refuses training by a plain Trainer where the task has no parameters to train."""
        if stage == "fit" and not (self.trains and self.trainable):
            raise UserError(
                f"task {type(self).__name__} has nothing to train: a Trainer can predict alone, once"
                " task.refresh(loader, Context(seed=0, round=0), first=True) has seen the images"
            )

    def on_fit_start(self) -> None:
        """Prepares the task from the images of a plain Trainer, unless training resumes from a checkpoint."""
        if self.trainer.ckpt_path is None:
            self.refresh(self._trainer_loader(), Context(seed=0, round=0), first=True)

    def on_train_epoch_end(self) -> None:
        """Prepares the task again with the current weights; in a federation, the method calls `refresh` instead."""
        if self._trainer is not None:
            self.refresh(self._trainer_loader(), Context(seed=0, round=self.current_epoch + 1))

    def _trainer_loader(self) -> DataLoader:
        self.trainer.fit_loop.setup_data()
        return cast("DataLoader", self.trainer.train_dataloader)

    def images_of(self, batch: Mapping[str, Any]) -> Tensor:
        """Returns the images of a batch.

        Raises:
            UserError: If the batch holds only cached feature maps.
        """
        if "image" not in batch:
            raise UserError(
                f"task {type(self).__name__} needs images, not cached features alone; set cache.enabled=false"
            )
        return batch["image"]

    def refresh(self, loader: DataLoader, context: Context, first: bool = False) -> None:
        """Computes from local data what training or predictions need with the current weights; by default nothing.

        Args:
            loader: Local batches in a fixed order.
            context: Round and randomness.
            first: Whether this is the first call, before any training. Values that do not change with the weights (a
                centre, a subspace) are computed only then; values that do (a bank) are computed every time.
        """

    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Replaces randomly initialised weights by those of another run, before anything is trained.

        Args:
            weights: Entries of the state by name; entries that are missing keep their initial values.
        """
        self.load_state_dict(weights, strict=False)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Loads a state; `free_buffers` are resized to it first."""
        take_sizes(self, self.free_buffers, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def learned_state(task: Task) -> dict[str, Tensor]:
    """Returns the state of a task that training changes: all but the frozen backbone."""
    return {name: entry for name, entry in task.state_dict().items() if "backbone" not in name.split(".")}


class StandardisedTask(Task):
    """A task whose features can be standardised to mean 0 and variance 1 with statistics pooled over clients.

    Attributes:
        standardise: Whether features are standardised.
        shrinkage: See `channel_scale`.
        vectors_per_image: Number of feature vectors of an image.
        channels: Channels C of the features before standardisation.
    """

    standardise: bool = False
    shrinkage: float = 1.0
    vectors_per_image: int = 1
    channels: int

    def channel_moments(self, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """Computes the number, mean [C] and variance [C] of local features before standardisation."""
        raise not_there(self, "channel_moments")

    def load_statistics(self, mean: Tensor, scale: Tensor) -> None:
        """Loads the mean [C] and the scale [C] with which features are standardised."""
        raise not_there(self, "load_statistics")


def channel_scale(variance: Tensor, shrinkage: float) -> Tensor:
    """Computes the scale of features from their variance: ``sqrt(v + shrinkage * mean v)``, plus 1e-5.

    Without shrinkage, channels that hardly vary in training would dominate all others after standardisation.

    Args:
        variance: Variance of each channel [C].
        shrinkage: Share of the mean variance over channels that is added to the variance of each channel.

    Returns:
        Scale of each channel [C].
    """
    return (variance + shrinkage * variance.mean()).sqrt() + 1e-5


def cosine_decay(round: int, rounds: int) -> float:
    """Computes the factor of a round's learning rates, ``(1 + cos(pi (t - 1) / T)) / 2`` in round t of T.

    Args:
        round: Round t; before round 1 the factor is 1.
        rounds: Number of rounds T; after them the factor is 0.

    Example:
        >>> [round(cosine_decay(t, 2), 3) for t in (0, 1, 2, 3)]
        [1.0, 1.0, 0.5, 0.0]
    """
    done = min(max(round - 1, 0) / max(rounds, 1), 1.0)
    return 0.5 * (1 + math.cos(math.pi * done))
