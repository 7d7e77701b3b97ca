"""DBE: a personal bias removes client-specific parts from the shared representation (Zhang et al., NeurIPS 2023)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchange, Exchanges, Message, MessageSpec, Task, TensorSpec, Update
from lit_fedad.contracts.disclosure import summed
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.bounds import at_least, within
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.client_runner import fit
from lit_fedad.methods.fedavg import MEANS, FedAvgClient, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.functional import pooled

MEAN = "mean of features"


def shift_features(task: Task, _: Any, features: Tensor) -> Tensor:
    """Adds the task's ``offset`` to the features [..., C] that its forward returns; used as a forward hook."""
    assert isinstance(task.offset, nn.Parameter)
    return features + task.offset


class DBEClient(FedAvgClient):
    """A client with a personal bias on its features; it keeps their mean without the bias near that of all clients.

    It minimises ``L + kappa mean_C (1/2 (r - g)^2)``. Here r is a running mean of the batches' features without the
    bias, which begins at 0 in every round. The global mean g is the mean of the clients' r after a first period of
    local training with neither bias nor regulariser, as in the authors' code. The weights of that period are dropped.

    If distances alone decide, as in a memory bank, the bias moves images and bank alike and changes no prediction.

    Args:
        kappa: Weight of the regulariser; with 0 only the personal bias remains. The authors use 50 for a small
            convolutional network.
        momentum: Weight of the newest batch in r.
    """

    def __init__(self, task: Task, local_epochs: int = 1, kappa: float = 1.0, momentum: float = 1.0) -> None:
        super().__init__(task, local_epochs)
        at_least("method.client", 0, kappa=kappa)
        within("method.client", 0, 1, momentum=momentum)
        self.kappa, self.momentum = kappa, momentum
        task.offset = self.offset = nn.Parameter(torch.zeros(task.num_features))
        task.register_forward_hook(shift_features)
        self.running = torch.zeros(task.num_features)
        self.in_first_period = False

    def shared_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists the entries that FedAvg shares, without the bias."""
        return [name for name in super().shared_keys(learned) if name != "offset"]

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the global mean g [num_features]."""
        return {MEAN: TensorSpec((self.task.num_features,))}

    def on_train_start(self) -> None:
        """Resets the running mean r to 0."""
        self.running = torch.zeros(self.task.num_features, device=self.device)

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss on shifted features plus the regulariser of the features without the bias."""
        view = self.task.view(batch)
        features = self.task(view)
        outputs = self.task.objective(features, view)
        newest = pooled(features).mean(0) - self.offset
        running = (1 - self.momentum) * self.running + self.momentum * newest
        self.running = running.detach()
        if self.in_first_period:
            return outputs
        drift = 0.5 * (running - self.auxiliary[MEAN].to(running.device)).square().mean()
        return {**outputs, "loss": outputs["loss"] + self.kappa * drift, "drift": drift}


class FeatureMean(Exchange[DBEClient, FedAvgServer]):
    """The set-up exchange in which clients train, send their running mean r, and the server averages these to g."""

    name = "feature mean"
    first_stage = True
    down = False
    trains = True
    sums = MEANS

    discloses = (summed("running mean of the batches' features; the last batch weighs most", images=1),)

    def train(self, client: DBEClient, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains without bias and regulariser, only to compute r; the initial weights are restored afterwards."""
        before = {name: entry.clone() for name, entry in learned_state(client.task).items()}
        client.in_first_period, client.task.round = True, 1
        client.offset.requires_grad_(False)
        try:
            return fit(client, loader, fabric)
        finally:
            client.in_first_period, client.task.round = False, client.context.round
            client.offset.requires_grad_(True)
            client.task.load_state_dict(before, strict=False)

    def send(self, client: DBEClient, loader: DataLoader) -> Message:
        """Returns the mean of the client's features."""
        return {MEAN: client.running.float().cpu()}

    def upload_spec(self, client: DBEClient) -> MessageSpec:
        """Declares one vector [num_features]."""
        return client.auxiliary_spec()

    def aggregate(self, server: FedAvgServer, updates: Mapping[int, Update]) -> None:
        """Averages the means to g, weighted by data size."""
        server.auxiliary = weighted_mean(updates)


def exchanges(client: DBEClient) -> Exchanges:
    """Lists FedAvg's exchanges; the last one before round 1 computes the mean of all clients' features."""
    return with_exchanges(client, FeatureMean())
