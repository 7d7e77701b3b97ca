"""Self-supervised ensemble distillation (SED) of all clients' models into one, on public images (FADngs)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import psutil
import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from lit_fedad.contracts import Context, Message
from lit_fedad.contracts.state import detached
from lit_fedad.core.bounds import above, at_least, below_one
from lit_fedad.core.errors import UserError
from lit_fedad.methods.parts.functional import take_step
from lit_fedad.tasks.contrastive import Contrastive


class InstanceQueues:
    """First-in, first-out queues of every teacher's last Q embeddings, initially random directions.

    A teacher embeds each image only once a round, so an image that is queued again has the same key. A queue therefore
    stores each key once, together with the number of times that it is queued.

    Args:
        embeddings: Unit vectors of all public images under every teacher [C, P, D].
        size: Embeddings per queue Q.
        generator: Draws the initial directions.
    """

    def __init__(self, embeddings: Tensor, size: int, generator: torch.Generator) -> None:
        teachers, _, width = embeddings.shape
        self._random = torch.empty(teachers, size, width, dtype=embeddings.dtype, device=embeddings.device)
        for keys in self._random:
            keys.copy_(F.normalize(torch.randn(size, width, generator=generator), dim=1))
        self._embeddings, self._size = embeddings, size
        self._queued = torch.empty(0, dtype=torch.int64, device=embeddings.device)

    @staticmethod
    def check(teachers: int, size: int, width: int, device: torch.device) -> None:
        """Checks that queues of a given size fit into memory.

        Raises:
            UserError: If the queues do not fit.
        """
        needed = 4 * teachers * size * width
        on_cpu = device.type == "cpu"
        free = psutil.virtual_memory().available if on_cpu else torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise UserError(
                f"distillation.queue={size}: the queues of {teachers} teachers take {needed / 2**20:,.0f} MiB and"
                f" {free / 2**20:,.0f} MiB are free; give a queue of 1 to {max(free // (8 * teachers * width), 1):,}"
            )

    def push(self, images: Tensor) -> None:
        """Replaces the oldest entries by the embeddings of a batch.

        Args:
            images: Positions of the public images [B].
        """
        self._random = self._random[:, len(images) :]
        self._queued = torch.cat([self._queued, images])[-self._size :]

    def keys(self) -> tuple[Iterator[Tensor], Tensor]:
        """Returns the different keys [K, D] of one teacher after the other, and how often each is queued [K]."""
        images, counts = self._queued.unique(return_counts=True)
        once = counts.new_ones(self._random.shape[1])
        keys = (
            torch.cat([random, embeddings[images]])
            for random, embeddings in zip(self._random, self._embeddings, strict=True)
        )
        return keys, torch.cat([once, counts])


def attend(
    z: Tensor,
    keys: Tensor,
    temperature: float | Tensor,
    own: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes normaliser and mean of the similarity distribution over a queue (FADngs Eq. 11 and FADngs Eq. 12).

    Args:
        z: Unit vectors [B, D].
        keys: Unit vectors [K, D].
        temperature: Temperature tau; a tensor [B, 1] gives each vector its own.
        own: One additional key for each vector [B, D].
        counts: How often each key is queued [K]; None if each is queued once.

    Returns:
        ``log sum_j e^{z . d_j / tau}`` [B], and the mean of the keys under the distribution [B, D].
    """
    z = z / temperature
    logits = z @ keys.T if counts is None else torch.addmm(counts.to(z).log(), z, keys.T)
    own_logits = None if own is None else (z * own).sum(1)
    largest = logits.amax(1) if own_logits is None else logits.amax(1).maximum(own_logits)
    shares = logits.sub_(largest[:, None]).exp_()  # in place, and the only exponentials of a tensor [B, K]
    total, mean = shares.sum(1), shares @ keys
    if own is not None and own_logits is not None:
        own_share = (own_logits - largest).exp()
        total, mean = total + own_share, mean + own_share[:, None] * own
    return largest + total.log(), mean / total[:, None]


class _WithGradient(torch.autograd.Function):
    """A function that returns a given value, and passes a given gradient back to its argument."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient, None, None


def distillation_loss(
    student: Tensor,
    teachers: Tensor,
    queues: Iterable[Tensor],
    weights: Tensor,
    teacher_temperature: float,
    student_temperature: float,
    own_key: bool = False,
    counts: Tensor | None = None,
) -> Tensor:
    """Computes the weighted cross-entropy between the teachers' and the student's distributions (FADngs Eq. 13).

    The logarithm of Q_c is linear in the keys except for its normaliser, so that only the mean of the keys under P_c is
    needed: ``-P_c log Q_c = log sum_j e^{z . d_j / tau} - z . sum_j p_j d_j / tau``. The gradient with respect to z is
    the mean of the keys under Q_c minus that under P_c, divided by tau: one pass over a queue gives loss and gradient.
    No tensor of size B x K is kept from one teacher to the next.

    Args:
        student: The student's unit vectors of a batch [B, D], with gradient.
        teachers: Unit vectors of every teacher [C, B, D].
        queues: Queue of every teacher [K, D].
        weights: Weights w_c of the teachers [C].
        teacher_temperature: Temperature tau of FADngs Eq. 11.
        student_temperature: Temperature tau of FADngs Eq. 12.
        own_key: Whether a teacher's embedding of an image is an additional key, as in the released code.
        counts: How often each key is queued [K]; None if each is queued once.

    Returns:
        The mean over the batch.
    """
    constant, size = student.detach(), len(student)
    temperature = constant.new_tensor([student_temperature, teacher_temperature]).repeat_interleave(size)[
        :, None
    ]
    loss, gradient = constant.new_zeros(()), torch.zeros_like(constant)
    for z, keys, weight in zip(teachers, queues, weights, strict=True):
        normalisers, means = attend(
            torch.cat([constant, z]), keys, temperature, z.repeat(2, 1) if own_key else None, counts
        )
        student_mean, teacher_mean = means.split(size)
        loss += weight * (normalisers[:size] - (constant * teacher_mean).sum(1) / student_temperature).mean()
        gradient += weight / (size * student_temperature) * (student_mean - teacher_mean)
    return _WithGradient.apply(student, loss, gradient)


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


@dataclass(frozen=True)
class EnsembleDistillation:
    """Self-supervised ensemble distillation (FADngs, Section III-D).

    Attributes:
        queue: Number Q of embeddings in each queue.
        epochs: Passes E_g over the public images per round.
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

    queue: int = 65536
    epochs: int = 5
    batch_size: int = 128
    learning_rate: float = 0.03
    decay: bool = True
    momentum: float = 0.9
    weight_decay: float = 1e-4
    teacher_temperature: float = 0.07
    student_temperature: float = 0.07
    weighting: Literal["pearson", "uniform"] = "pearson"
    own_key: bool = False
    freeze_normalisation: bool = False

    def __post_init__(self) -> None:
        section = "method.server.distillation"
        at_least(section, 1, queue=self.queue, epochs=self.epochs, batch_size=self.batch_size)
        at_least(section, 0, learning_rate=self.learning_rate, weight_decay=self.weight_decay)
        below_one(section, momentum=self.momentum)
        above(section, 0, teacher_temperature=self.teacher_temperature)
        above(section, 0, student_temperature=self.student_temperature)

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
            UserError: If training diverges.
        """
        device = fabric.device if fabric else torch.device("cpu")
        task.to(device)
        images = public.to(device)
        embeddings, weights = self._teacher_embeddings(task, list(teachers.values()), images, fabric)
        task.load_state_dict(start, strict=False)
        generator = context.generator("distillation")
        queues = InstanceQueues(embeddings, self.queue, generator)
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
            for batch in torch.randperm(len(images), generator=generator).split(self.batch_size):
                batch = batch.to(device)
                if len(batch) == 1 and not self.freeze_normalisation:  # one image has no batch statistics
                    continue
                with _precision(fabric):
                    student = task.project(task(as_batch(task, images[batch])))
                keys, counts = queues.keys()
                loss = distillation_loss(
                    student,
                    embeddings[:, batch],
                    keys,
                    weights,
                    self.teacher_temperature,
                    self.student_temperature,
                    self.own_key,
                    counts,
                )
                total += take_step(optimizer, loss, "method.server.distillation.learning_rate")
                queues.push(batch)
                steps += 1
        task.eval()
        state = task.state_dict()
        student_weights = detached({name: state[name] for name in start})
        report = {
            "distillation_loss": total / max(steps, 1),
            "queue_filled": min(1.0, self.epochs * len(images) / self.queue),
            **{f"teacher_weight_{c}": float(w) for c, w in zip(teachers, weights, strict=True)},
        }
        return student_weights, report

    @torch.no_grad()
    def _teacher_embeddings(
        self, task: Contrastive, teachers: Sequence[Message], images: Tensor, fabric: Fabric | None
    ) -> tuple[Tensor, Tensor]:
        """Computes every teacher's embeddings [C, P, D], once for all epochs, and the teachers' weights [C]."""
        task.eval()
        embeddings, scores = [], []
        for weights in teachers:
            task.load_state_dict(weights, strict=False)
            with _precision(fabric):
                features = torch.cat([task(as_batch(task, part)) for part in images.split(500)])
                embeddings.append(task.project(features))
                vectors = task.represent(features)
            has_densities = len(task.densities) > 0
            scores.append(task.densities(vectors) if has_densities else torch.zeros_like(vectors[:, 0]))
        if self.weighting == "uniform":
            uniform = torch.full((len(embeddings),), 1 / len(embeddings), device=images.device)
            return torch.stack(embeddings), uniform
        return torch.stack(embeddings), teacher_weights(torch.stack(scores))


def as_batch(task: Contrastive, images: Tensor) -> Mapping[str, Tensor]:
    """Converts images uint8 [B, 3, S, S], or their frozen features [B, C], to a batch as the task's loaders give it."""
    if images.ndim == 2:
        return {"image": images}
    return {"image": (images / 255 - task.mean) / task.std}


def _precision(fabric: Fabric | None) -> Any:
    return fabric.autocast() if fabric else nullcontext()
