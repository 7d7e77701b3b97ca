"""FedDyn: a regulariser that changes with the rounds aligns the clients' optima (Acar et al., ICLR 2021, Alg. 1)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lit_fedad.contracts import Exchanges, Task, Update, senders
from lit_fedad.core.bounds import above
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import EQUAL_MEANS, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.client_bases import AnchoredClient
from lit_fedad.methods.parts.functional import trainable


class FedDynClient(AnchoredClient):
    """A client that minimises ``L(w) - <g_i, w> + alpha/2 |w - w^t|^2``, then sets ``g_i -= alpha (w_i - w^t)``.

    Args:
        alpha: Weight of the regulariser.

    Attributes:
        gradient: g_i by name of the weight: the gradient of the client's loss at the weights where it last stopped.
    """

    state_names = ("gradient",)

    def __init__(self, task: Task, local_epochs: int = 1, alpha: float = 0.1) -> None:
        super().__init__(task, local_epochs)
        above("method.client", 0, alpha=alpha)
        self.alpha = alpha
        self.gradient = {name: torch.zeros_like(p, device="cpu") for name, p in trainable(task).items()}
        self._gradient_on_device: dict[str, Tensor] = {}

    def on_train_start(self) -> None:
        """Copies the received weights ``w^t``, and moves g_i to their device."""
        super().on_train_start()
        self._gradient_on_device = {name: self.gradient[name].to(p) for name, p in self.anchor.items()}

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Tensor]:
        """Computes the task's loss with the regulariser, which is tracked as ``regulariser``."""
        outputs = self.task.training_step(batch, batch_idx)
        terms = [
            self.alpha / 2 * (p - self.anchor[name]).square().sum()
            - (self._gradient_on_device[name] * p).sum()
            for name, p in trainable(self.task).items()
        ]
        regulariser = torch.stack(terms).sum()
        return {**outputs, "loss": outputs["loss"] + regulariser, "regulariser": regulariser}

    def on_train_end(self) -> None:
        """Updates ``g_i``."""
        self.gradient = {
            name: (self._gradient_on_device[name] - self.alpha * (p.detach() - self.anchor[name])).cpu()
            for name, p in trainable(self.task).items()
        }


class FedDynServer(FedAvgServer):
    """The server: ``h -= alpha/N sum (w_i - w^t)`` over those of the N clients that take part, ``w = mean - h/alpha``.

    All clients have equal weights. The server stores ``h / alpha``, so that it does not need alpha.

    Attributes:
        correction: ``h / alpha`` by name of the weight.
    """

    state_names = ("correction", "clients")
    merges_sums = True
    admits = True

    def __init__(self, client: FedDynClient) -> None:
        super().__init__(client)
        self.correction = {name: torch.zeros_like(self.weights[name]) for name in self.trained}
        self.clients = 0

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Sets the number N of all clients; h is a mean over all of them, to which new clients contribute 0."""
        share = (self.clients or len(sizes)) / len(sizes)
        self.correction = {name: share * correction for name, correction in self.correction.items()}
        self.clients = len(sizes)

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Updates h, then the weights that any client has changed; running statistics are averaged."""
        merged = weighted_mean(updates, equal=True)
        share = len(senders(updates)) / self.clients
        for name in self.moved(updates):
            self.correction[name] = self.correction[name] - share * (merged[name] - self.weights[name])
            merged[name] = merged[name] - self.correction[name]
        self.weights = merged


def exchanges(client: FedDynClient) -> Exchanges:
    """Lists FedAvg's exchanges; the mean gives all clients equal weights."""
    return with_exchanges(client, rounds=(Train(EQUAL_MEANS),))
