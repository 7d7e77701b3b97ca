"""SCAFFOLD: control variates correct the clients' drift (Karimireddy et al., ICML 2020; SCAFFOLD Alg. 1)."""

from collections.abc import Mapping

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Exchanges, Message, MessageSpec, Task, Update, senders, spec_of
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, summed
from lit_fedad.core.bounds import above
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import EQUAL_MEANS, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.client_bases import AnchoredClient
from lit_fedad.methods.parts.functional import trainable

CONTROL = "controls/"
"""Prefix of controls. Sites of version 0.2, which sent changes of controls under ``control/``, are refused by it."""


class ScaffoldClient(AnchoredClient):
    """A client that steps by ``g + c - c_i``, and updates its control ``c_i`` from its change of weights (option II).

    The correction is defined for plain SGD, which replaces the task's optimiser.

    Args:
        learning_rate: Learning rate eta_l of SGD.
    """

    state_names = ("own",)

    def __init__(self, task: Task, local_epochs: int = 1, learning_rate: float = 0.01) -> None:
        super().__init__(task, local_epochs)
        above("method.client", 0, learning_rate=learning_rate)
        self.learning_rate = learning_rate
        self.own = {name: torch.zeros_like(p) for name, p in trainable(task).items()}
        self.change: Message = {}
        self._steps, self._rate = 0, learning_rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Builds plain SGD, without momentum and weight decay."""
        return torch.optim.SGD(trainable(self.task).values(), lr=self.learning_rate)

    def on_train_start(self) -> None:
        """Copies the received weights x, and resets the count of steps."""
        super().on_train_start()
        self._steps = 0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Corrects the gradient to ``g + c - c_i``."""
        for name, parameter in trainable(self.task).items():
            if parameter.grad is not None:
                parameter.grad += self.auxiliary[CONTROL + name].to(parameter) - self.own[name].to(parameter)
        self._steps += 1
        self._rate = optimizer.param_groups[0]["lr"]

    def on_train_end(self) -> None:
        """Updates the control after S steps: ``c_i+ = c_i - c + (x - y) / (S eta_l)``; without a step it stays."""
        if not self._steps:  # with precision 16-mixed gradients can overflow in every step
            self.change = {name: torch.zeros_like(c, device="cpu") for name, c in self.own.items()}
            return
        total_rate = self._steps * self._rate
        new_control = {}
        for name, y in trainable(self.task).items():
            mean_gradient = (self.anchor[name] - y.detach()) / total_rate
            new_control[name] = self.own[name].to(y) - self.auxiliary[CONTROL + name].to(y) + mean_gradient
        self.change = {name: (c - self.own[name].to(c)).cpu() for name, c in new_control.items()}
        self.own = new_control

    discloses = (TRAINED_WEIGHTS, summed("mean gradients of the steps of a round"))

    def send(self, loader: DataLoader) -> Message:
        """Returns the weights y, and the server's control plus the change of the client's: ``c + c_i+ - c_i``."""
        controls = {
            CONTROL + name: self.auxiliary[CONTROL + name].to(c) + c for name, c in self.change.items()
        }
        return {**super().send(loader), **controls}

    def auxiliary_spec(self) -> MessageSpec:
        """Declares the server's control."""
        return spec_of({CONTROL + name: p for name, p in trainable(self.task).items()})

    def upload_spec(self) -> MessageSpec:
        """Declares weights and controls: twice the bytes of FedAvg."""
        return {**self.shared_spec(), **self.auxiliary_spec()}


class ScaffoldServer(FedAvgServer):
    """The server, with ``x += eta_g mean(y - x)`` and ``c += 1/N sum (c_i+ - c_i)``; clients have equal weights.

    Args:
        learning_rate: Learning rate eta_g of the server.
    """

    state_names = ("clients",)
    merges_sums = True
    admits = True

    def __init__(self, client: ScaffoldClient, learning_rate: float = 1.0) -> None:
        super().__init__(client)
        above("method.server", 0, learning_rate=learning_rate)
        self.learning_rate = learning_rate
        self.auxiliary = {CONTROL + name: torch.zeros_like(p, device="cpu") for name, p in client.own.items()}
        self.clients = 0

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Sets the number N of clients; the control is the mean of theirs, to which new clients contribute 0."""
        share = (self.clients or len(sizes)) / len(sizes)
        self.auxiliary = {name: share * control for name, control in self.auxiliary.items()}
        self.clients = len(sizes)

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Updates weights and control."""
        mean = weighted_mean(updates, equal=True)
        share = len(senders(updates)) / self.clients
        for name in self.trained:
            self.weights[name] = torch.lerp(self.weights[name], mean.pop(name), self.learning_rate)
            control = CONTROL + name
            self.auxiliary[control] = torch.lerp(self.auxiliary[control], mean.pop(control), share)
        self.weights.update(mean)


def exchanges(client: ScaffoldClient) -> Exchanges:
    """Lists FedAvg's exchanges; the mean gives all clients equal weights."""
    return with_exchanges(client, rounds=(Train(EQUAL_MEANS),))
