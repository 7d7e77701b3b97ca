"""pFedMe: personal models are Moreau envelopes around a shared one (Dinh et al., NeurIPS 2020, Alg. 1)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Exchanges, Task
from lit_fedad.core.bounds import above, at_least
from lit_fedad.federation.client_runner import Train, fit
from lit_fedad.methods.fedavg import MEANS, with_exchanges
from lit_fedad.methods.parts.client_bases import AnchoredClient
from lit_fedad.methods.parts.functional import trainable


class PFedMeClient(AnchoredClient):
    """A client with ``theta = argmin L(theta) + lam/2 |theta - w|^2`` on each batch, then ``w -= eta lam (w - theta)``.

    Both theta and w begin at the received weights; w is kept as the anchor, which moves in this method. The task's
    optimiser takes ``inner_steps`` steps of theta on each batch. The client sends w and predicts with theta; before it
    first takes part it predicts with the received weights. A task with random views draws a new view in each step.

    Near its optimum theta is ``w - grad L / lam``, so that w takes a step ``eta grad L``, as plain SGD does. At the
    default rate, that of the authors' command for convex losses, w hardly moves in a few rounds.

    Args:
        lam: Weight lambda of the distance.
        inner_steps: Steps K of theta on each batch.
        learning_rate: Learning rate eta of w.
    """

    own_model = True
    state_names = ("personal_entries",)

    def __init__(
        self,
        task: Task,
        local_epochs: int = 1,
        lam: float = 15.0,
        inner_steps: int = 5,
        learning_rate: float = 0.005,
    ) -> None:
        super().__init__(task, local_epochs)
        above("method.client", 0, lam=lam, learning_rate=learning_rate)
        at_least("method.client", 1, inner_steps=inner_steps)
        self.lam, self.inner_steps, self.learning_rate = lam, inner_steps, learning_rate
        self.personal_entries: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the loss of theta; before the first step on a batch, w follows the theta of the batch before."""
        if batch_idx % self.inner_steps == 0:
            self._move_shared()
        outputs = self.task.training_step(batch, batch_idx)
        envelope = self.lam / 2 * self.squared_distance(trainable(self.task))
        return {**outputs, "loss": outputs["loss"] + envelope, "envelope": envelope}

    def on_train_end(self) -> None:
        """Moves w a last time, keeps theta, and leaves w in the task, with the running statistics of theta."""
        self._move_shared()
        self.personal_entries = self.shared_state()
        self.task.load_state_dict(self.anchor, strict=False)

    @torch.no_grad()
    def _move_shared(self) -> None:
        """Moves w by ``-eta lam (w - theta)``."""
        for name, theta in trainable(self.task).items():
            self.anchor[name].lerp_(theta, self.learning_rate * self.lam)

    def deploy(self, which: Literal["own", "server"] = "own") -> None:
        """Loads theta into the task."""
        if which == "own":
            self.task.load_state_dict(self.personal_entries, strict=False)


@dataclass(frozen=True)
class Repeated:
    """The batches of a loader, each repeated several times in a row."""

    loader: DataLoader
    times: int

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (batch for batch in self.loader for _ in range(self.times))


class TrainOnRepeated(Train):
    """The exchange in which clients take K steps on each batch."""

    def train(self, client: Client, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains the client by `fit`, on a loader that repeats each batch."""
        assert isinstance(client, PFedMeClient)
        return fit(client, Repeated(loader, client.inner_steps), fabric)  # type: ignore[arg-type]


def exchanges(client: PFedMeClient) -> Exchanges:
    """Lists FedAvg's exchanges, with K steps on each batch."""
    return with_exchanges(client, rounds=(TrainOnRepeated(MEANS),))
