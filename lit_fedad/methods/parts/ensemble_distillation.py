"""Self-supervised ensemble distillation (SED) of all clients' models into one, on public images (FADngs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import psutil
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lit_fedad.contracts import Context, Message
from lit_fedad.errors import UserError
from lit_fedad.guards.bounds import above, at_least
from lit_fedad.tasks.contrastive import Contrastive


class InstanceQueues:
    """First-in, first-out queues of every teacher's last Q embeddings, initially random directions.

    Args:
        teachers: Number of teachers C.
        size: Embeddings per queue Q.
        width: Dimensions of an embedding D.
        generator: Draws the initial directions.
        device: Device of the queues.

    Attributes:
        keys: Unit vectors [C, Q, D].

    Raises:
        UserError: If the queues do not fit into memory.
    """

    def __init__(
        self, teachers: int, size: int, width: int, generator: torch.Generator, device: torch.device
    ) -> None:
        self.check(teachers, size, width, device)
        self.keys = torch.empty(teachers, size, width, device=device)
        for keys in self.keys:
            keys.copy_(F.normalize(torch.randn(size, width, generator=generator), dim=1))
        self._next = 0

    @staticmethod
    def check(teachers: int, size: int, width: int, device: torch.device) -> None:
        """Checks that queues of a given size fit into memory.

        Raises:
            UserError: If the queues do not fit.
        """
        needed = 4 * teachers * size * width
        on_cpu = device.type == "cpu"
        free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info(device)[0]
        if size < 1 or needed > free:
            raise UserError(
                f"distillation.queue={size}: the queues of {teachers} teachers take {needed / 2**20:,.0f} MiB and"
                f" {free / 2**20:,.0f} MiB are free; give a queue of 1 to {max(free // (8 * teachers * width), 1):,}"
            )

    def push(self, embeddings: Tensor) -> None:
        """Replaces the oldest entries by a batch.

        Args:
            embeddings: Unit vectors of all teachers [C, B, D].
        """
        size = self.keys.shape[1]
        embeddings = embeddings[:, -size:]
        places = (self._next + torch.arange(embeddings.shape[1], device=self.keys.device)) % size
        self.keys[:, places] = embeddings
        self._next = (self._next + embeddings.shape[1]) % size


class _LogSumExp(torch.autograd.Function):
    """``log sum_j e^{z . d_j / tau}`` with a gradient that stores no [B, Q]: a weighted mean of the keys."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, keys: Tensor, temperature: float, own: Tensor | None) -> Tensor:
        value, mean = attend(z, keys, temperature, own)
        ctx.save_for_backward(mean)
        ctx.temperature = temperature
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (mean,) = ctx.saved_tensors
        return gradients[0][:, None] * mean / ctx.temperature, None, None, None


def attend(z: Tensor, keys: Tensor, temperature: float, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Computes normaliser and mean of the similarity distribution over a queue (FADngs Eq. 11 and FADngs Eq. 12).

    Args:
        z: Unit vectors [B, D].
        keys: Unit vectors [Q, D].
        temperature: Temperature tau.
        own: One additional key for each vector [B, D].

    Returns:
        ``log sum_j e^{z . d_j / tau}`` [B], and the mean of the keys under the distribution [B, D].
    """
    logits = (z / temperature) @ keys.T
    extra = None if own is None else (z * own).sum(1) / temperature
    largest = logits.amax(1) if extra is None else logits.amax(1).maximum(extra)
    shares = logits.sub_(largest[:, None]).exp_()  # the only pass of exponentials over [B, Q]
    total, mean = shares.sum(1), shares @ keys
    if own is not None and extra is not None:
        share = (extra - largest).exp()
        total, mean = total + share, mean + share[:, None] * own
    return largest + total.log(), mean / total[:, None]


def distillation_loss(
    student: Tensor,
    teachers: Tensor,
    queues: Tensor,
    weights: Tensor,
    teacher_temperature: float,
    student_temperature: float,
    own_key: bool = False,
) -> Tensor:
    """Computes the weighted cross-entropy between the teachers' and the student's distributions (FADngs Eq. 13).

    The logarithm of Q_c is linear in the keys except for its normaliser, so that only the mean of the keys under P_c is
    needed: ``-P_c log Q_c = log sum_j e^{z . d_j / tau} - z . sum_j p_j d_j / tau``. No tensor of size B x Q is kept
    from one teacher to the next.

    Args:
        student: The student's unit vectors of a batch [B, D], with gradient.
        teachers: Unit vectors of every teacher [C, B, D].
        queues: Queue of every teacher [C, Q, D].
        weights: Weights w_c of the teachers [C].
        teacher_temperature: Temperature tau of FADngs Eq. 11.
        student_temperature: Temperature tau of FADngs Eq. 12.
        own_key: Whether a teacher's embedding of an image is an additional key, as in the released code.

    Returns:
        The mean over the batch.
    """
    total = torch.zeros((), device=student.device)
    for z, keys, weight in zip(teachers, queues, weights, strict=True):
        own = z if own_key else None
        _, target = attend(z, keys, teacher_temperature, own)
        value = _LogSumExp.apply(student, keys, student_temperature, own)
        total = total + weight * (value - (student * target).sum(1) / student_temperature).mean()
    return total


def teacher_weights(scores: Tensor) -> Tensor:
    """Computes the weights w_c of FADngs Eq. 13 from each teacher's agreement with all teachers.

    Scores are normalised teacher by teacher; w_c is proportional to the Pearson correlation with their mean, or 0 where
    that is negative. If no correlation is positive, all weights are equal.

    Args:
        scores: Anomaly scores of the public images by teacher [C, P].

    Returns:
        Weights that sum to 1 [C].
    """
    scores = scores.double()
    centred = scores - scores.mean(1, keepdim=True)
    normalised = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-300)
    mean = normalised.mean(0)
    agreement = (normalised @ (mean / mean.norm().clamp(min=1e-300))).clamp(min=0)
    uniform = torch.full_like(agreement, 1 / len(agreement))
    return (agreement / agreement.sum() if agreement.sum() > 0 else uniform).float()


class EnsembleDistillation:
    """Self-supervised ensemble distillation (FADngs, Section III-D).

    Args:
        queue: Instances per queue Q.
        epochs: Passes over the public images per round E_g.
        batch_size: Public images per batch.
        learning_rate: Learning rate of SGD.
        decay: Whether the learning rate falls over the rounds as the clients' does, or is constant.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        teacher_temperature: Temperature tau of FADngs Eq. 11. At the paper's 0.5 the distribution over tens of
            thousands of instances is almost uniform, and distillation has no effect.
        student_temperature: Temperature tau of FADngs Eq. 12.
        weighting: Weights w_c by ``pearson`` correlation, or ``uniform``. Without shared densities there are no
            scores to correlate, and weights are uniform.
        own_key: Whether a teacher's embedding of an image is an additional key.
        freeze_normalisation: Whether BatchNorm uses and keeps the averaged running statistics, so that equal teachers
            do not change the student (at a learning rate of 0.003; 0.006 was unstable). Otherwise it uses the
            statistics of public batches, as in the released code, and keeps the running statistics of public images.
    """

    def __init__(
        self,
        queue: int = 65536,
        epochs: int = 5,
        batch_size: int = 128,
        learning_rate: float = 0.03,
        decay: bool = True,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        teacher_temperature: float = 0.07,
        student_temperature: float = 0.07,
        weighting: Literal["pearson", "uniform"] = "pearson",
        own_key: bool = False,
        freeze_normalisation: bool = False,
    ) -> None:
        at_least("method.server.distillation", 1, queue=queue, epochs=epochs, batch_size=batch_size)
        at_least("method.server.distillation", 0, learning_rate=learning_rate, momentum=momentum)
        at_least("method.server.distillation", 0, weight_decay=weight_decay)
        above("method.server.distillation", 0, teacher_temperature=teacher_temperature)
        above("method.server.distillation", 0, student_temperature=student_temperature)
        self.queue, self.epochs, self.batch_size = queue, epochs, batch_size
        self.learning_rate, self.decay = learning_rate, decay
        self.momentum, self.weight_decay = momentum, weight_decay
        self.teacher_temperature, self.student_temperature = teacher_temperature, student_temperature
        self.weighting, self.own_key = weighting, own_key
        self.freeze_normalisation = freeze_normalisation

    def __call__(
        self,
        task: Contrastive,
        start: Message,
        teachers: Mapping[int, Message],
        public: Tensor,
        context: Context,
        fabric: Fabric | None,
    ) -> tuple[Message, dict[str, float]]:
        """Distils the teachers into the student.

        Args:
            task: Model of the student, whose densities give the teachers' scores; it holds the student's weights
                afterwards.
            start: The averaged weights, from which the student starts (FADngs Eq. 10).
            teachers: The weights of each client.
            public: Public images uint8 [P, 3, S, S], or their frozen features [P, C].
            context: The round.
            fabric: Device and precision; None for the CPU in single precision.

        Returns:
            The student's weights, and scalars to track.

        Raises:
            UserError: If training diverges, or the queues do not fit into memory.
        """
        device = fabric.device if fabric else torch.device("cpu")
        task.to(device)
        images = public.to(device)
        embeddings, weights = self._ask_teachers(task, list(teachers.values()), images, fabric)
        task.load_state_dict(start, strict=False)
        draw = context.generator("distillation")
        queues = InstanceQueues(len(teachers), self.queue, embeddings.shape[2], draw, device)
        optimizer = torch.optim.SGD(
            task.parameters(),
            lr=self.learning_rate * (task.decay if self.decay else 1),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        total, steps = 0.0, 0
        task.train()
        if self.freeze_normalisation:
            for module in task.modules():
                module.train(not isinstance(module, _BatchNorm))
        for _ in range(self.epochs):
            for batch in torch.randperm(len(images), generator=draw).split(self.batch_size):
                batch = batch.to(device)
                if len(batch) == 1 and not self.freeze_normalisation:  # one image has no batch statistics
                    continue
                with _precision(fabric):
                    student = task.project(task(as_batch(task, images[batch])))
                loss = distillation_loss(
                    student,
                    embeddings[:, batch],
                    queues.keys,
                    weights,
                    self.teacher_temperature,
                    self.student_temperature,
                    self.own_key,
                )
                if not torch.isfinite(loss):
                    raise UserError("distillation diverged; lower method.server.distillation.learning_rate")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                queues.push(embeddings[:, batch])
                total, steps = total + float(loss.detach()), steps + 1
        task.eval()
        state = task.state_dict()
        student_weights = {name: state[name].detach().to("cpu", copy=True) for name in start}
        report = {
            "distillation_loss": total / max(steps, 1),
            "queue_filled": min(1.0, self.epochs * len(images) / self.queue),
            **{f"teacher_weight_{c}": float(w) for c, w in zip(teachers, weights, strict=True)},
        }
        return student_weights, report

    @torch.no_grad()
    def _ask_teachers(
        self, task: Contrastive, teachers: Sequence[Message], images: Tensor, fabric: Fabric | None
    ) -> tuple[Tensor, Tensor]:
        """Computes every teacher's embeddings [C, P, D], once for all epochs, and the teachers' weights [C]."""
        task.eval()
        rows, scores = [], []
        for weights in teachers:
            task.load_state_dict(weights, strict=False)
            with _precision(fabric):
                features = torch.cat([task(as_batch(task, part)) for part in images.split(500)])
                rows.append(task.project(features))
                represented = task.represent(features)
            known = len(task.densities) > 0
            scores.append(task.densities(represented) if known else torch.zeros_like(represented[:, 0]))
        if self.weighting == "uniform":
            return torch.stack(rows), torch.full((len(rows),), 1 / len(rows), device=images.device)
        return torch.stack(rows), teacher_weights(torch.stack(scores))


def as_batch(task: Contrastive, images: Tensor) -> Mapping[str, Tensor]:
    """Converts images uint8 [B, 3, S, S], or their frozen features [B, C], to a batch as the task's loaders give it."""
    if images.ndim == 2:
        return {"image": images}
    return {"image": (images / 255 - task.mean) / task.std}


def _precision(fabric: Fabric | None) -> Any:
    return fabric.autocast() if fabric else nullcontext()
