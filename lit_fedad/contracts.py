"""The four contracts of the house: message, task, client, server.

A task says what a client learns and how it scores. A method (a client class and a server class) says what clients
and the server exchange. The federation runs rounds and knows neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.errors import UserError
from lit_fedad.randomness import generator, seeded

Message = dict[str, Tensor]
"""All that ever crosses between a client and the server: flat, named, on the CPU, finite."""

Payload = Mapping[str, "TensorSpec"]
"""What a message must look like: every name with its shape and type."""


@dataclass(frozen=True)
class TensorSpec:
    """The declared form of one tensor of a message.

    Attributes:
        shape: Sizes; None where a size is free.
        dtype: Element type.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Update:
    """What one client sent: its message and the number of training images behind it."""

    message: Message
    num_samples: int


@dataclass(frozen=True)
class Context:
    """Where in the experiment a piece of code runs; the only source of randomness.

    Attributes:
        seed: The experiment's seed.
        round: Set-up exchanges count up to 0, training rounds from 1.
        client: Client number; None on the server.
        exchange: Which exchange of the round, from 0.
        stage: Which of the client's tasks, from 0, where its images come task after task.
    """

    seed: int
    round: int
    client: int | None = None
    exchange: int = 0
    stage: int = 0

    def generator(self, purpose: str) -> torch.Generator:
        """A CPU generator that depends on nothing but seed, purpose, round, exchange and client."""
        return generator(self.seed, self._named(purpose), self.round, self.client)

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seeds torch's global generators for a block and restores them afterwards."""
        with seeded(self.seed, self._named(purpose), self.round, self.client):
            yield

    def _named(self, purpose: str) -> str:
        """Apart from what the first exchange of the round drew for the same purpose."""
        return f"{purpose}, exchange {self.exchange}" if self.exchange else purpose


class Prediction(NamedTuple):
    """What a task says about a batch. High scores are anomalous.

    Attributes:
        image_score: One score an image [B].
        anomaly_map: One score a pixel [B, H, W]; None for tasks that do not localise.
        logits: Class logits [B, K] of classification tasks.
        others: Logits [B, K] of the method's other classifiers (`Client.classifiers`), by name.
    """

    image_score: Tensor
    anomaly_map: Tensor | None = None
    logits: Tensor | None = None
    others: Mapping[str, Tensor] = {}


class Task(L.LightningModule):
    """What is learnt and how it scores; trains just as well under a plain ``lightning.Trainer``.

    A step is ``view -> features -> objective``, a prediction ``features -> predict``: methods that regularise,
    shift or share features step in between. Subclasses implement `encode`, `objective`, `predict` and Lightning's
    ``configure_optimizers``.

    Attributes:
        kind: Which metrics judge it.
        standardise: Whether features are brought to mean 0 and variance 1, by statistics that clients may pool.
        prepares: Whether `prepare` takes something from local data.
        local_buffers: Buffers made from local data, which are never shared as weights are.
        output_modules: Submodules between features and output; methods with personal heads keep these.
        width: Channels of the features.
        round: The round of the federation that is played, for schedules; 0 outside of one.
    """

    kind: Literal["anomaly", "classification"] = "anomaly"
    standardise: bool = False
    prepares: bool = False
    local_buffers: tuple[str, ...] = ()
    output_modules: tuple[str, ...] = ()
    width: int
    round: int = 0

    def __init__(self) -> None:
        super().__init__()
        self.offset: nn.Module = nn.Identity()
        """Stands between `encode` and everything that looks at features; a method may put its own in."""

    def view(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """What one training step looks at: a random view of a batch (augmented, or a sample of it)."""
        return batch

    def encode(self, batch: Mapping[str, Any]) -> Tensor:
        """From images to features.

        Args:
            batch: A batch of the data module, or a view of one.

        Returns:
            Features [B, width] or [B, positions, width].
        """
        raise NotImplementedError

    def features(self, batch: Mapping[str, Any]) -> Tensor:
        """What regularisers and prototypes look at: `encode`, through ``offset``."""
        return self.offset(self.encode(batch))

    def objective(self, features: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The training loss.

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

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """The features."""
        return self.features(batch)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """One step on a random view."""
        view = self.view(batch)
        return self.objective(self.features(view), view)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """Scores a batch."""
        return self.predict(self.features(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimiser of all that trains."""
        raise NotImplementedError

    def channel_moments(self, loader: DataLoader) -> tuple[int, Tensor, Tensor]:
        """Number, mean [C] and variance [C] of what `standardise` is about, over local data."""
        raise NotImplementedError

    def load_statistics(self, mean: Tensor, scale: Tensor) -> None:
        """Takes over what features are standardised by, both [C]."""
        raise NotImplementedError

    def prepare(self, loader: DataLoader, context: Context) -> None:
        """Takes from local data what training needs before its first step and lacks (a bank, a centre)."""

    def refresh(self, loader: DataLoader, context: Context) -> None:
        """Renews what `prepare` made, under the weights as they are now. Default: nothing."""

    def learned_state(self) -> dict[str, Tensor]:
        """The state that training changes: everything but the frozen backbone."""
        return {k: v for k, v in self.state_dict().items() if not k.startswith("backbone.")}


class Client(L.LightningModule):
    """The client side of one method: wraps a task and adds what the method needs.

    One live object serves every client of a process. What belongs to a single client is its `personal_state`, which
    is swapped in before a visit and out after it.

    Args:
        task: What the client learns.
        local_epochs: Passes over the client's data a round (E).
        keep_optimizer: Whether the optimiser's state lives on between rounds. Only right where the server never
            overwrites the weights that it optimises.

    Attributes:
        needs: What kind of task the method works with.
        own_model: Whether what a client has just trained is a model of its own; False where only the server makes
            models that are meant to predict (CReFF, FEDIC).
        classifiers: Names of the method's classifiers beside the main one; predictions carry the logits of each.

    Raises:
        UserError: If the method cannot work with this task, or there is no epoch to train.
    """

    needs: type[Task] = Task
    own_model: bool = True
    classifiers: tuple[str, ...] = ()

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = False) -> None:
        super().__init__()
        self.check_task(type(task))
        if local_epochs < 1:
            raise UserError(f"local_epochs={local_epochs} must be at least 1")
        self.task = task
        self.local_epochs = local_epochs
        self.keep_optimizer = keep_optimizer
        self.context = Context(seed=0, round=0)
        self.epoch = 0
        self._optimizer_state: dict[str, Any] | None = None

    @classmethod
    def check_task(cls, task: type[Task]) -> None:
        """Says why the method cannot work with a kind of task.

        Raises:
            UserError: If it cannot.
        """
        if not issubclass(task, cls.needs):
            raise UserError(
                f"{cls.__name__} works with task {cls.needs.__name__}, not with {task.__name__}; leave task= out"
            )

    def begin(self, context: Context) -> None:
        """Starts a visit: says which client this is now, and in which round."""
        self.context = context
        self.task.round = context.round

    def receive(self, broadcast: Message) -> None:
        """Takes over what the server sent."""
        raise NotImplementedError

    def deploy(self) -> None:
        """Makes the task what predicts, where that is not what trains. Called after `receive`, never before `fit`."""

    def lend(self) -> Message:
        """What the server's model lacks to predict, lent for evaluation alone: not a message of the method."""
        return {}

    def deploy_shared(self, lent: Message) -> None:
        """Makes the task the server's model. Called after `receive`, never before `fit`.

        Args:
            lent: The mean, by data size, over what all clients `lend`.
        """
        self.task.load_state_dict(lent, strict=False)

    def adapt(self, loader: DataLoader) -> None:
        """Renews what depends on weights just taken over and on local data. Called before `fit`, and after `deploy`.

        Args:
            loader: The client's training batches in a fixed order.
        """

    @property
    def setup_phases(self) -> tuple[str, ...]:
        """Names of the exchanges before round 1, in order."""
        return ()

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Names of the exchanges of every round from 1, in order; clients are trained in the first, ``"train"``."""
        return ("train",)

    @property
    def phase(self) -> str:
        """The name of this exchange: one of `setup_phases` or of `exchanges`."""
        return phase(self.context, self.setup_phases, self.exchanges)

    @property
    def uniform(self) -> bool:
        """Whether all clients predict alike, so that scoring one of them scores all."""
        return False

    @property
    def uniform_server(self) -> bool:
        """Whether the server's model is the same for all clients (`deploy_shared`)."""
        return self.uniform

    def training_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> dict[str, Tensor]:
        """One local step; the task's, unless the method adds to it."""
        return self.task.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser of local steps; the task's, unless the method asks for another."""
        return self.task.configure_optimizers()

    def fit(self, loader: DataLoader, fabric: Fabric) -> dict[str, float]:
        """Trains locally: E epochs of `training_step`, with Lightning's hooks of client and task.

        Args:
            loader: The client's training batches.
            fabric: Moves batches, scales precision and runs the backward pass.

        Returns:
            Means over all steps of the loss and of the other scalars that ``training_step`` returned; nothing
            where the task has nothing to train.

        Raises:
            UserError: If training diverges.
        """
        task = self.task
        if not any(parameter.requires_grad for parameter in task.parameters()):
            return {}
        configured = self.configure_optimizers()
        if self._optimizer_state is not None:
            configured.load_state_dict(self._optimizer_state)
        module, optimizer = fabric.setup(self, configured)
        module.mark_forward_method("training_step")
        totals: dict[str, float] = {}
        steps = 0
        task.train()
        self.on_train_start()
        task.on_train_start()
        for epoch in range(self.local_epochs):
            self.epoch = epoch
            self.on_train_epoch_start()
            task.on_train_epoch_start()
            for index, batch in enumerate(loader):
                batch = fabric.to_device(batch)
                task.on_train_batch_start(batch, index)
                outputs = module.training_step(batch, index)
                if not torch.isfinite(outputs["loss"]):
                    raise UserError("the loss is not finite: training has diverged; lower the learning rate")
                optimizer.zero_grad()
                fabric.backward(outputs["loss"])
                self.on_before_optimizer_step(configured)
                optimizer.step()
                self.on_train_batch_end(outputs, batch, index)
                task.on_train_batch_end(outputs, batch, index)
                for name, value in outputs.items():
                    totals[name] = totals.get(name, 0.0) + float(value.detach())
                steps += 1
            task.on_train_epoch_end()
        task.on_train_end()
        self.on_train_end()
        task.eval()
        if self.keep_optimizer:
            self._optimizer_state = configured.state_dict()
        return {name: total / steps for name, total in totals.items()}

    def send(self, loader: DataLoader) -> Message:
        """What goes to the server.

        Args:
            loader: The client's training batches in a fixed order.
        """
        raise NotImplementedError

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int = 0) -> Prediction:
        """The client's own prediction; the task's, unless the method predicts otherwise."""
        return self.task.predict_step(batch, batch_idx)

    def personal_state(self) -> dict[str, Any]:
        """What lives between rounds, is checkpointed, and never leaves the client."""
        return {"optimizer": self._optimizer_state}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client's `personal_state` in."""
        self._optimizer_state = state["optimizer"]


def phase(context: Context, setup: tuple[str, ...], exchanges: tuple[str, ...]) -> str:
    """The name of an exchange.

    Args:
        context: Round and exchange.
        setup: Exchanges before round 1.
        exchanges: Exchanges of a round.
    """
    return exchanges[context.exchange] if context.round > 0 else setup[context.round - 1]


class Server:
    """The server side of one method.

    Args:
        setup: The client's `Client.setup_phases`: exchanges before round 1. They are numbered up to 0, take in every
            client and train nothing: ``("statistics", "memory")`` are rounds -1 and 0.
        exchanges: The client's `Client.exchanges`, which every round from 1 is made of.

    Attributes:
        fabric: Where the server computes and how precisely; None where nothing was launched.
    """

    fabric: Fabric | None = None

    def __init__(self, setup: tuple[str, ...] = (), exchanges: tuple[str, ...] = ("train",)) -> None:
        self.setup, self.exchanges = setup, exchanges
        self.context = Context(seed=0, round=0)

    @property
    def phase(self) -> str:
        """The name of this exchange: one of ``setup`` or of ``exchanges``."""
        return phase(self.context, self.setup, self.exchanges)

    def enrol(self, sizes: Mapping[int, int]) -> None:
        """Learns once, before a run begins or goes on, who the clients are.

        Args:
            sizes: Training images by client, of all clients that hold any.
        """

    def begin(self, context: Context) -> None:
        """Starts a round."""
        self.context = context

    def download_payload(self) -> Payload:
        """The form of what this round's `broadcast` sends."""
        raise NotImplementedError

    def upload_payload(self) -> Payload:
        """The form of what clients send in this round."""
        raise NotImplementedError

    def broadcast(self, client_id: int) -> Message:
        """What a client is sent at the start of the round."""
        raise NotImplementedError

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Takes in what clients sent.

        Args:
            updates: By client, in client order; never empty.
        """
        raise NotImplementedError

    def diagnostics(self) -> dict[str, float]:
        """Numbers worth a curve, after `aggregate`."""
        return {}

    def shared_images(self) -> Mapping[int, tuple[Tensor, Tensor]]:
        """Images that clients have shared, for pictures: by round, uint8 [n, C, H, W] and labels [n]."""
        return {}

    def observe(self, update: Update, client: Client) -> None:
        """Makes of a client the best predictor that an observer of its upload can build. Called before `aggregate`.

        The observer knows the round's broadcast and how clients begin, but no personal state.

        Args:
            update: What the client sent to be merged.
            client: The live client, which has just received this round's broadcast.

        Raises:
            UserError: If the upload says nothing of single images.
        """
        raise UserError(
            f"{type(client).__name__}: what its clients send scores no image: there is nothing to attack"
        )

    def warnings(self) -> list[str]:
        """What a user should be told after `aggregate`, one line each."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """All that a later round depends on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
