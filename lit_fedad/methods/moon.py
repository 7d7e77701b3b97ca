"""MOON: contrast of features with those of the global and of the client's last model (Li et al., CVPR 2021)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.contracts import Task
from lit_fedad.core.bounds import above, at_least
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.functional import evaluating, pooled, with_weights


class MoonClient(FedAvgClient):
    """A client that minimises ``L + mu l_con``.

    ``l_con = -log e^{cos(z, z_glob)/tau} / (e^{cos(z, z_glob)/tau} + e^{cos(z, z_prev)/tau})``. Here z is the projected
    feature of an image under the weights in training, z_glob that under the received weights, and z_prev that under
    the weights that the client last sent. The projection head is averaged like the task's weights. In the paper the
    output layer uses its output too; here only the contrast does, so that the task's features do not change.

    Args:
        mu: Weight of the contrast; 0 gives FedAvg.
        temperature: Temperature tau.
        projection: Output width of the two-layer projection head; None for no head.
    """

    state_names = ("previous",)

    def __init__(
        self,
        task: Task,
        local_epochs: int = 1,
        mu: float = 5.0,
        temperature: float = 0.5,
        projection: int | None = 256,
    ) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, mu=mu, projection=projection)
        above("method.client", 0, temperature=temperature)
        self.mu, self.temperature = mu, temperature
        width = task.num_features
        layers = (nn.Linear(width, width), nn.ReLU(), nn.Linear(width, projection)) if projection else ()
        self.projection = task.model_contrast = nn.Sequential(*layers)
        self.previous = self.shared_state()
        self.received: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        """Stores the received weights, and moves the previous ones to the client's device."""
        self.received = {n: entry.to(self.device) for n, entry in self.shared_state().items()}
        self.previous = {n: entry.to(self.device) for n, entry in self.previous.items()}

    def on_train_end(self) -> None:
        """Stores the trained weights, under which the next round computes z_prev."""
        self.previous = self.shared_state()

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss plus the model contrast."""
        view = self.task.view(batch)
        features = self.task(view)
        outputs = self.task.objective(features, view)
        projected = self.projection(pooled(features))
        to_global = F.cosine_similarity(projected, self._projected(self.received, view)) / self.temperature
        to_previous = F.cosine_similarity(projected, self._projected(self.previous, view)) / self.temperature
        contrast = F.softplus(to_previous - to_global).mean()
        return {**outputs, "loss": outputs["loss"] + self.mu * contrast, "contrast": contrast}

    @torch.no_grad()
    def _projected(self, weights: Mapping[str, Tensor], view: Any) -> Tensor:
        with evaluating(self.task):
            return with_weights(self.task, weights, lambda task: self.projection(pooled(task(view))))
