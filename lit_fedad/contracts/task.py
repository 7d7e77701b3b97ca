"""What is learnt, and how it scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts.context import Context


class Prediction(NamedTuple):
    """What a task says about a batch. High scores are anomalous.

    Attributes:
        image_score: One score an image [B].
        anomaly_map: One score a pixel [B, H, W]; None for tasks that do not localise.
        logits: Class logits [B, K] of classification tasks.
        others: Logits [B, K] of the method's other classifiers (`Predictors.heads`), by name.
    """

    image_score: Tensor
    anomaly_map: Tensor | None = None
    logits: Tensor | None = None
    others: Mapping[str, Tensor] = {}


class Task(L.LightningModule):
    """What is learnt and how it scores; trains just as well under a plain ``lightning.Trainer``.

    A step is ``view -> forward -> objective``, a prediction ``forward -> predict``: methods that regularise, shift or
    share features step in between. Subclasses implement `forward`, `objective`, `predict` and Lightning's
    ``configure_optimizers``.

    Attributes:
        kind: Which metrics judge it.
        prepares: Whether `prepare` takes something from local data.
        local_buffers: Buffers made from local data, which are never shared as weights are.
        output_modules: Submodules between features and output; methods with personal heads keep these.
        num_features: Channels of the features.
        round: The round of the federation that is played, for schedules; 0 outside of one.
    """

    kind: Literal["anomaly", "classification"] = "anomaly"
    prepares: bool = False
    local_buffers: tuple[str, ...] = ()
    output_modules: tuple[str, ...] = ()
    num_features: int
    round: int = 0

    def view(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draws what one training step looks at: an augmented batch, or a sample of it; by default the batch."""
        return batch

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Computes features; call the task itself, so that forward hooks of methods apply.

        Args:
            batch: A batch of the data module, or a view of one.

        Returns:
            Features [B, num_features] or [B, positions, num_features].
        """
        raise NotImplementedError

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Computes the training loss.

        Args:
            features: Features of the view.
            batch: The view.

        Returns:
            ``loss``, and other scalars to track.
        """
        raise NotImplementedError

    def predict(self, features: Tensor, batch: Mapping[str, Any]) -> Prediction:
        """Scores images.

        Args:
            features: Features of the whole batch.
            batch: The batch.
        """
        raise NotImplementedError

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the loss of a random view."""
        view = self.view(batch)
        return self.objective(self(view), view)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores a batch."""
        return self.predict(self(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds one optimiser of all that trains."""
        raise NotImplementedError

    def prepare(self, loader: DataLoader, context: Context) -> None:
        """Takes from local data what training needs before its first step and lacks (a bank, a centre)."""

    def refresh(self, loader: DataLoader, context: Context) -> None:
        """Renews what `prepare` made, under the weights as they are now. Default: nothing."""

    def learned_state(self) -> dict[str, Tensor]:
        """Returns the state that training changes: everything but the frozen backbone."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("backbone.")}


class StandardisedTask(Task):
    """A task whose features may be brought to mean 0 and variance 1, by statistics that clients can pool.

    Attributes:
        standardise: Whether they are.
    """

    standardise: bool = False

    def channel_moments(self, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """Computes number, mean [C] and variance [C] of local features before they are standardised."""
        raise NotImplementedError

    def load_statistics(self, mean: Tensor, scale: Tensor) -> None:
        """Takes over what features are standardised by, both [C]."""
        raise NotImplementedError


def channel_scale(variance: Tensor) -> Tensor:
    """Computes what features are divided by [C] from their variance [C]: its root, kept off zero."""
    return variance.sqrt() + 1e-5
