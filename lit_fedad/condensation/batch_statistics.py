"""Batch normalisation with the statistics of another batch, so that synthetic images are normalised like real ones."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.core.errors import UserError
from lit_fedad.models.encoders import refuse_frozen

Statistics = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a batch normalisation -> mean [C] and biased variance [C] of its inputs."""


def check_encoder(encoder: nn.Module) -> None:
    """Checks that an encoder has batch normalisation, whose statistics can be recorded, and passes gradients to pixels.

    Raises:
        UserError: If the encoder is frozen, or has no batch normalisation.
    """
    refuse_frozen(encoder, "images are condensed through an encoder that is trained on pixels")
    if not any(isinstance(layer, nn.BatchNorm2d) for layer in encoder.modules()):
        raise UserError(
            "the encoder has no batch normalisation, whose statistics the synthetic images need; choose"
            " task=classifier_convnet with encoder.norm=batch"
        )


@torch.no_grad()
def record(encoder: nn.Module, images: Tensor, times: Tensor | None = None) -> tuple[Tensor, Statistics]:
    """Encodes a batch, normalised by its own mean and biased variance, and records these statistics.

    Neither the encoder nor its running statistics change.

    Args:
        encoder: Encoder from images to features.
        images: A batch [B, C, H, W].
        times: How often each image counts in the batch [B]; None for once.

    Returns:
        Features [B, D] without gradient, and the statistics that normalised them.

    Source:
        FedVCK Eq. 4: mu_l and sigma_l of the real batch.
    """
    statistics: dict[str, tuple[Tensor, Tensor]] = {}
    order = None
    groups = [(len(images), 1)]
    if times is not None:
        order = times.argsort(stable=True)  # images that count equally often form one group
        images = images[order]
        group_times, sizes = times.unique(return_counts=True)
        groups = list(zip(sizes.tolist(), group_times.tolist(), strict=True))

    def measure(name: str, layer: nn.BatchNorm2d, inputs: tuple[Any, ...]) -> None:
        statistics[name] = _moments(inputs[0], groups)
        layer.running_mean, layer.running_var = statistics[name]

    layers = {name: layer for name, layer in encoder.named_modules() if isinstance(layer, nn.BatchNorm2d)}
    with _using_buffers(layers.values()), ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(partial(measure, name)))
        features: Tensor = encoder(images)
    return (features if order is None else features[order.argsort()]), statistics


def _moments(maps: Tensor, groups: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Computes mean and biased variance [C] of each channel of maps [B, C, H, W].

    Args:
        maps: Maps, group by group.
        groups: Number of images of each group, and how often each of them counts.
    """
    # This function is some 25 times faster than var_mean. The buffers only determine the precision of its results.
    precision = torch.promote_types(maps.dtype, torch.float32)
    unused = maps.new_zeros(2, maps.shape[1], dtype=precision)
    sizes = [size for size, _ in groups]
    parts = [torch.batch_norm_update_stats(part, unused[0], unused[1], 0.0) for part in maps.split(sizes)]
    means, variances = (torch.stack(values) for values in zip(*parts, strict=True))
    weights = means.new_tensor([size * times for size, times in groups])[:, None]
    shares = weights / weights.sum()
    mean = (shares * means).sum(0)  # not a matrix product, which autocast would round
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def apply(encoder: nn.Module, images: Tensor, statistics: Statistics) -> Tensor:
    """Encodes images, normalised by recorded statistics of another batch.

    The result is differentiable in the images; the statistics are constants.

    Args:
        encoder: Encoder that `record` was called with.
        images: Images [B, C, H, W].
        statistics: Statistics from `record`.

    Returns:
        Features [B, D]; for the recorded batch, those of `record`.

    Source:
        FedVCK Eq. 4.
    """
    layers = {name: encoder.get_submodule(name) for name in statistics}
    with _using_buffers(layers.values()):
        for name, layer in layers.items():
            layer.running_mean, layer.running_var = statistics[name]
        return encoder(images)


def unconstrained(encoder: nn.Module, images: Tensor) -> Tensor:
    """Encodes a batch, normalised by its own statistics, through which gradients flow.

    The encoder does not change. It may have no batch normalisation.

    Args:
        encoder: Encoder from images to features.
        images: A batch [B, C, H, W].

    Returns:
        Features [B, D].
    """
    layers = [layer for layer in encoder.modules() if isinstance(layer, nn.BatchNorm2d)]
    with _using_buffers(layers):
        for layer in layers:
            layer.running_mean = layer.running_var = None
        features: Tensor = encoder(images)
        return features


@contextmanager
def _using_buffers(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Makes batch normalisations use the statistics in their buffers; restores mode and buffers afterwards."""
    before = [(layer, layer.training, layer.running_mean, layer.running_var) for layer in layers]
    try:
        for layer, *_ in before:
            layer.training = False
        yield
    finally:
        for layer, training, mean, var in before:
            layer.training, layer.running_mean, layer.running_var = training, mean, var
