"""What a message says about single images: the statistics by which membership is inferred.

The method says what its messages show (`Evidence`); sums over images are read by their own declaration. All statistics
are high for members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_fedad.audits.lira import confidence
from lit_fedad.contracts import (
    Client,
    Evidence,
    ImageSums,
    Message,
    Update,
    image_sums_of,
    nothing_to_attack,
)
from lit_fedad.contracts.evidence import (
    ChangedLayer,
    SharedBank,
    SharedModel,
    SharedMoments,
    SharedPrototypes,
    SharedSubspace,
    Shown,
)
from lit_fedad.contracts.state import detached
from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import Batch
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.federation.loop import Federation
from lit_fedad.memory.knn import nearest
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.subspace import least_residuals
from lit_fedad.privacy.noised_sums import Noised, clipped_parts


def observe(federation: Federation, client: int) -> Message:
    """Turns the live client into one that knows no more than an observer of its messages.

    Args:
        federation: The federation, within an exchange.
        client: Number of the client. It has just received the message of the server's exchange, and its personal
            state is that of a client before the run.

    Returns:
        The server's message to it.
    """
    context = federation.server.context
    stage = federation.data.at(min(context.round, federation.rounds)).stages[client]
    return receive(federation, client, stage, detached(federation.pool.initial))


def receive(federation: Federation, client: int, stage: int, state: dict[str, Any]) -> Message:
    """Gives the live client a personal state, lets it receive the server's message, and returns this message."""
    context = federation.server.context
    exchange = federation.exchanges.at(context)
    blob = federation.sender.pack(exchange, [client], context)[client]
    return federation.runner.activate(exchange, replace(context, client=client, stage=stage), state, blob)


def evidence_of(federation: Federation) -> Evidence:
    """Returns what the messages of a federation's method show.

    Raises:
        UserError: If the method does not say so, and has no sums over images to attack either.
    """
    exchanges, client = federation.exchanges, federation.client
    if exchanges.evidence is not None:
        return exchanges.evidence
    if any(image_sums_of(exchange, client) is not None for exchange in (*exchanges.setup, *exchanges.rounds)):
        return Evidence()
    raise UserError(
        f"{type(client).__name__}: its method does not say what its messages show of single images; give its Exchanges"
        " an evidence (docs/extend.md)"
    )


def adversary_view(federation: Federation, client: int, update: Update) -> Client:
    """Turns the live client into the predictor that an observer of a client's upload can build, and returns it.

    Raises:
        UserError: If uploads of this method cannot score images.
    """
    predict = evidence_of(federation).predict
    if predict is None:
        raise nothing_to_attack(federation.client)
    observe(federation, client)
    predict(federation.server, federation.client, update)
    federation.client.eval()
    return federation.client


COLUMNS: dict[str, tuple[str, ...]] = {
    "bank": ("largest distance", "mean distance", "10 % quantile of distances"),
    "moments": ("largest residual", "mean residual", "Mahalanobis distance"),
    "subspace": ("largest residual", "mean residual"),
    "sum": ("product with the sum",),
    "prototypes": ("prototype score",),
    "update": ("direction of the last layer",),
    "predictor": ("confidence or image score",),
}
"""Names of statistics, by the kind of message part that they are computed from."""

WHO = {"sent": "what clients send", "received": "what the server sends to all"}
"""The two sides of an exchange."""

# Share of the variance in the directions of least variance, whose residual tells most; and ridge of all directions.
_OUTSIDE = 0.01
_SHRINKAGE = 0.1  # of the covariance of logits, towards its mean variance


def sent_statistics(
    federation: Federation, client: int, update: Update, examples: DataLoader
) -> dict[str, Tensor]:
    """Computes the statistics of a client's examples from its upload.

    Args:
        federation: The federation, before its server merges the upload.
        client: Number of the client.
        update: Its upload, or the sum of all uploads; for noised sums what `Noised.released` returns.
        examples: Batches of the images.

    Returns:
        By the names of `COLUMNS`: float64 [n, statistics]. NaN where the upload says nothing about an example.
    """
    received, message = observe(federation, client), update.message
    compute = _OverBatches(federation, examples)
    exchange = federation.exchanges.at(federation.server.context)
    if isinstance(exchange, Noised):
        sums, clip = image_sums_of(exchange, federation.client), exchange.noise.clip
        assert sums is not None
        return {"sum": compute(lambda batch: sum_products(sums, clip, batch, message))}
    statistics = {}
    plain_sums = image_sums_of(exchange, federation.client)
    if message and plain_sums is not None and plain_sums.shapes().keys() == message.keys():
        statistics["sum"] = compute(lambda batch: sum_products(plain_sums, torch.inf, batch, message))
    shown = evidence_of(federation).sent(federation.client, received, message)
    statistics |= {kind: value for part in shown for kind, value in _statistic(part, compute).items()}
    if exchange.trains and any(isinstance(part, SharedModel) for part in shown):
        adversary_view(federation, client, update)
        statistics["predictor"] = compute(lambda batch: _predicted(federation, batch).unsqueeze(1))
    return statistics


def received_statistics(federation: Federation, client: int, examples: DataLoader) -> dict[str, Tensor]:
    """Computes the statistics of a client's examples from what the server sends next; see `sent_statistics`."""
    shown = evidence_of(federation).received(federation.client, observe(federation, client))
    compute = _OverBatches(federation, examples)
    statistics = {kind: value for part in shown for kind, value in _statistic(part, compute).items()}
    if any(isinstance(part, SharedModel) for part in shown):
        statistics["predictor"] = compute(lambda batch: _predicted(federation, batch).unsqueeze(1))
    return statistics


def _statistic(shown: Shown, compute: _OverBatches) -> dict[str, Tensor]:
    """Computes the statistic of a message part, by its name in `COLUMNS`; none for a predictor."""
    match shown:
        case SharedBank(vectors, features):
            return {"bank": compute(lambda batch: bank_statistics(features(batch), vectors))}
        case SharedMoments(mean, covariance, features):
            moments = Moments(1, mean, covariance)
            return {"moments": compute(lambda batch: moments_statistics(features(batch), moments))}
        case SharedSubspace(centre, basis, features):
            return {"subspace": compute(lambda batch: subspace_statistics(features(batch), centre, basis))}
        case SharedPrototypes(means, classes, logits):
            labels = compute(lambda batch: batch["label"]).long()
            return {"prototypes": prototype_scores(compute(logits), labels, means, classes).unsqueeze(1)}
        case ChangedLayer(weight, bias, inputs, logits):

            def directions(batch: Batch) -> Tensor:
                return update_directions(inputs(batch), logits(batch), batch["label"], weight, bias)

            return {"update": compute(directions).unsqueeze(1)}
    return {}


def bank_statistics(features: Tensor, bank: Tensor) -> Tensor:
    """Computes largest, mean and 10 % quantile of the distances of patches [B, P, C] to a bank, negated [B, 3]."""
    distances = nearest(features.flatten(0, 1).float(), bank, 1)[0].view(features.shape[:2])
    return -torch.stack([distances.amax(1), distances.mean(1), distances.quantile(0.1, dim=1)], 1)


def subspace_statistics(features: Tensor, centre: Tensor, basis: Tensor) -> Tensor:
    """Computes largest and mean of the lengths of patches [B, P, C] outside the nearest subspace, negated [B, 2]."""
    norms, _ = least_residuals(features, centre.to(features), basis.to(features))
    return -torch.stack([norms.amax(1), norms.mean(1)], 1)


def moments_statistics(patches: Tensor, moments: Moments) -> Tensor:
    """Computes how far patches lie outside what a client's own mean and covariance say, negated.

    Channels are divided by their deviation. The residual is the length in the directions with the last `_OUTSIDE` of
    the variance; the squared Mahalanobis distance counts all directions, with `_OUTSIDE` added to their variances.
    Without this addition, its mean over the images behind the moments is the number of channels, whatever they show.

    Args:
        patches: Frozen features [B, P, C].
        moments: Moments of the client's patches.
    """
    scale = moments.covariance.diagonal().clamp(min=1e-12).sqrt()
    variances, directions = torch.linalg.eigh(moments.scaled(scale).covariance)
    variances = variances.clamp(min=0)
    outside = variances.cumsum(0) <= _OUTSIDE * variances.sum()
    outside[0] = True
    squares = (((patches.double() - moments.mean) / scale) @ directions).square()
    residuals = squares[..., outside].sum(-1).sqrt()
    mahalanobis = (squares / (variances + _OUTSIDE)).sum(-1).mean(1)
    return -torch.stack([residuals.amax(1), residuals.mean(1), mahalanobis], 1)


def sum_products(sums: ImageSums, clip: float, batch: Batch, released: Message) -> Tensor:
    """Computes the products ``u_i . U`` of what images add with a sum.

    Under noise that is Gaussian and alike in all directions, nothing else in U tells an attacker who knows all other
    images whether an image is in it.

    Args:
        sums: The sums of the client that the exchange's message was sent to.
        clip: Largest norm of what an image adds.
        batch: Images.
        released: The sum U by name, with noise if there is any.

    Returns:
        Products [B, 1].
    """
    (parts,) = clipped_parts(sums, [batch], clip)
    products = [part.flatten(1) @ released[name].double().flatten() for name, part in parts.items()]
    return torch.stack(products).sum(0).unsqueeze(1)


def prototype_scores(logits: Tensor, labels: Tensor, prototypes: Tensor, classes: Tensor) -> Tensor:
    """Computes the score ``(f(x) - mu)' S^-1 (p - mu)`` of mean logits p that a client sent (FedVCK Eq. 11).

    mu is the mean over all examples of a class, members or not, and S the covariance around it. For Gaussian logits
    the score is, up to a constant, the log-likelihood ratio of p with and without x, to first order in 1/n.

    Args:
        logits: Logits of the examples under the weights that the client had received [n, K].
        labels: Their classes, int64 [n].
        prototypes: Mean logits of each class that was sent [c, K].
        classes: These classes [c].

    Returns:
        Scores float64 [n]; NaN for classes of which nothing was sent.
    """
    logits, scores = logits.double(), torch.full((len(labels),), torch.nan, dtype=torch.float64)
    present = labels.unique()
    means = torch.stack([logits[labels == label].mean(0) for label in present])
    deviations = logits - means[torch.searchsorted(present, labels)]
    covariance = deviations.T @ deviations / max(len(logits) - len(present), 1)
    ridge = _SHRINKAGE * covariance.diagonal().mean().clamp(min=1e-12)
    precision = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance)))
    for mean, label in zip(means, present, strict=True):
        for prototype in prototypes[classes == label].double():
            of_class = labels == label
            scores[of_class] = (logits[of_class] - mean) @ precision @ (prototype - mean)
    return scores


def update_directions(
    features: Tensor, logits: Tensor, labels: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Computes how far the last layer moved where an image would have moved it.

    The product of its change with the negative gradient of the image's cross-entropy, which for a linear layer is
    ``sum_k (y_k - p_k) (dW_k . f + db_k)``.

    Args:
        features: Inputs f of the last layer [B, D].
        logits: Logits [B, K] before the change.
        labels: Classes, int64 [B].
        weight: Change dW [K, D].
        bias: Change db [K].

    Returns:
        Products [B], in units of the length of the change.
    """
    directions = nn.functional.one_hot(labels, logits.shape[1]).double() - logits.double().softmax(1)
    length = (weight.double().square().sum() + bias.double().square().sum()).sqrt().clamp(min=1e-12)
    return (directions * (features.double() @ weight.double().T + bias.double())).sum(1) / length


class _OverBatches:
    """Computes a statistic of examples, batch by batch."""

    def __init__(self, federation: Federation, examples: DataLoader) -> None:
        self.fabric, self.examples = federation.fabric, examples

    @torch.no_grad()
    def __call__(self, statistic: Callable[[Batch], Tensor]) -> Tensor:
        values = [statistic(self.fabric.to_device(batch)).double().cpu() for batch in self.examples]
        return torch.cat(values)


def _predicted(federation: Federation, batch: Batch) -> Tensor:
    """Computes a classifier's confidence in the true class, or the negative image score."""
    prediction = predict_batch(federation.client, dict(batch), federation.fabric)
    if prediction.logits is not None and federation.client.task.kind == "classification":
        scores = confidence(prediction.logits.cpu(), batch["label"].cpu())
    else:
        scores = -prediction.image_score.cpu().double()
    if not scores.isfinite().all():
        raise UserError(f"{type(federation.client).__name__}: scores from an upload are not finite")
    return scores
