"""FedNova: clients' changes are divided by their numbers of steps before they are averaged (Wang et al., 2020)."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Exchanges, Message, MessageSpec, Task, TensorSpec, Update
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, counted
from lit_fedad.core.bounds import below_one
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import weighted_mean
from lit_fedad.methods import fedavg
from lit_fedad.methods.fedavg import WEIGHTS, FedAvgServer, with_exchanges
from lit_fedad.methods.parts.client_bases import AnchoredClient


class FedNovaClient(AnchoredClient):
    """A client that sends the weights after its mean step, ``x + (y_i - x) / |a_i|_1``, and the length ``|a_i|_1``.

    ``a_i`` holds the weights of the gradients in ``y_i - x``. Its sum is the number of steps; with momentum rho step k
    adds ``1 + rho + ... + rho^(k-1)`` to it, because earlier gradients take part in the step too (FedNova Sec. 4).
    """

    def __init__(self, task: Task, local_epochs: int = 1) -> None:
        super().__init__(task, local_epochs)
        self._step_length = self._length = 0.0

    def on_train_start(self) -> None:
        """Copies the received weights x, and resets the length."""
        super().on_train_start()
        self._step_length = self._length = 0.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Adds the step to the length."""
        self._step_length = 1.0 + optimizer.param_groups[0].get("momentum", 0.0) * self._step_length
        self._length += self._step_length

    def shared_spec(self) -> MessageSpec:
        """Declares the shared entries as exact: the server would multiply a codec's rounding by the number of steps."""
        return {name: replace(entry, exact=True) for name, entry in super().shared_spec().items()}

    discloses = (TRAINED_WEIGHTS, counted("steps of the round"))

    def send(self, loader: DataLoader) -> Message:
        """Returns the weights after a mean step, and the length; running statistics are sent as they are."""
        message, length = super().send(loader), max(self._length, 1.0)
        for name, received in self.anchor.items():
            x = received.cpu()
            message[name] = x + (message[name] - x) / length
        return {**message, "length": torch.tensor(length)}

    def upload_spec(self) -> MessageSpec:
        """Declares the shared entries and the length."""
        return {**super().upload_spec(), "length": TensorSpec((), low=1, counted=True)}


class FedNovaServer(FedAvgServer):
    """The server, which takes the mean step as often as clients do on average: ``x += tau sum_i p_i (z_i - x)``.

    ``z_i`` are the weights that the clients send, ``p_i`` their shares of images, and ``tau = sum_i p_i |a_i|_1``
    (FedNova Eq. 7).

    Raises:
        UserError: If the optimiser's momentum is 1 or more.
    """

    merges_sums = True

    def __init__(self, client: FedNovaClient) -> None:
        super().__init__(client)
        momentum = client.configure_optimizers().param_groups[0].get("momentum", 0.0)
        below_one("task", momentum=momentum)  # a task of one's own may not check it
        self.max_length_per_image = client.local_epochs / (1 - momentum)
        """Largest length per image, reached with batches of one image."""

    def validate(self, client_id: int, update: Update) -> None:
        """Checks the length: a client that exaggerates it would move the weights of all too far."""
        length, max_length = float(update.message["length"]), self.max_length_per_image * update.num_samples
        # The length in a sum of rounded messages may exceed the true one slightly.
        if length > max_length * 1.001:
            raise UserError(
                f"the client claims a way of {length:g} steps, and its images allow {max_length:g}"
            )

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Moves the weights by tau mean steps; running statistics are averaged."""
        merged = weighted_mean(updates)
        tau = merged.pop("length").double()
        for name in self.trained:
            x = self.weights[name].double()
            merged[name] = (x + tau * (merged[name].double() - x)).to(merged[name].dtype)
        self.weights = merged


def predict_with_weights(server: FedNovaServer, client: Client, update: Update) -> None:
    """Loads the trained weights y_i, which follow from the upload and its length; see `Evidence`."""
    message = dict(update.message)
    length = message.pop("length")
    for name in server.trained:
        message[name] = server.weights[name] + length * (message[name] - server.weights[name])
    fedavg.predict_with_weights(server, client, replace(update, message=message))


def exchanges(client: FedNovaClient) -> Exchanges:
    """Lists FedAvg's exchanges; audits recompute trained weights from an upload (`predict_with_weights`)."""
    return with_exchanges(client, evidence=replace(WEIGHTS, predict=predict_with_weights))
