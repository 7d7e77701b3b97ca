"""Common parts of the metrics: states that merge, lists of samples that may be empty, and checks of batches."""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lit_fedad.core.errors import UserError, not_there


def _wrapped(method: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of a class, at each call, as torchmetrics wraps the method of an object."""

    @wraps(method)
    def call(self: Metric, *args: Any, **kwargs: Any) -> Any:
        return wrap(self, MethodType(method, self))(*args, **kwargs)

    return call


class MergeableMetric(Metric):
    """A `torchmetrics.Metric` whose states add up over batches, processes and clients in any order.

    Args:
        settings: Settings that two metrics must share for their states to be merged.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True
    lower_is_better: frozenset[str] = frozenset()
    """Names of the values for which less is better."""

    def __init__(self, *settings: object) -> None:
        # `merge_state` of torchmetrics keeps the value cached by an earlier `compute`, which would go stale.
        super().__init__(compute_with_cache=False)
        self._remove_wrapped_methods()
        self.settings = settings

    def __init_subclass__(cls, **options: Any) -> None:
        """Wraps what a class defines of ``update`` and ``compute``."""
        super().__init_subclass__(**options)
        for name, wrap in (("update", Metric._wrap_update), ("compute", Metric._wrap_compute)):
            if name in vars(cls):
                setattr(cls, name, _wrapped(vars(cls)[name], wrap))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy."""
        super().__setstate__(state)
        self._remove_wrapped_methods()

    def _remove_wrapped_methods(self) -> None:
        """Removes the wrapped methods that torchmetrics keeps in the object.

        These methods refer to the object, which would thus stay in memory until Python's garbage collector looks for
        cycles; and the collector does not know that a histogram is large.
        """
        del self.update, self.compute

    def compute(self) -> dict[str, Tensor]:
        """Computes the values of `compute_local`; with several processes torchmetrics first gathers all states."""
        return self.compute_local()

    def compute_local(self) -> dict[str, Tensor]:
        """Computes values by name, float64 scalars, from the samples of this process alone, such as one client's."""
        raise not_there(self, "compute_local")

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Adds the state of another metric, or its `metric_state`, to this one.

        Args:
            incoming_state: A metric of the same class and settings, or the dictionary of its states.

        Raises:
            ValueError: If class or settings differ, or if a state is missing.
        """
        if isinstance(incoming_state, MergeableMetric) and incoming_state.settings != self.settings:
            raise ValueError(
                f"cannot merge metrics of different settings: {self.settings}, {incoming_state.settings}"
            )
        super().merge_state(incoming_state)
        self._update_count += incoming_state.update_count if isinstance(incoming_state, Metric) else 1


MergeableMetric.compute = _wrapped(MergeableMetric.compute, Metric._wrap_compute)  # type: ignore[method-assign]

M = TypeVar("M", bound=MergeableMetric)


def union(metrics: Iterable[M]) -> M:
    """Merges metrics of disjoint samples, at least one and all of the same settings, into a new one.

    Raises:
        ValueError: If there is none, or their settings differ.
    """
    first, *others = metrics
    merged = deepcopy(first)
    for other in others:
        merged.merge_state(other)
    return merged


def flat_copy(samples: Tensor, device: torch.device) -> Tensor:
    """Copies samples for a list state, flattened, so that later changes of the original have no effect.

    They are float because torchmetrics gathers an empty float tensor from a process that has seen no batch.

    Returns:
        float32 [n].
    """
    return samples.flatten().to(device, torch.float32, copy=True)


def concatenated(samples: list[Tensor] | Tensor) -> Tensor:
    """Concatenates a list state to one tensor, empty if nothing was seen."""
    return dim_zero_cat(samples) if len(samples) else torch.empty(0)


def check_same_shape(scores: Tensor, labels: Tensor) -> None:
    """Checks that scores and labels belong together.

    Raises:
        ValueError: If the shapes differ.
    """
    if scores.shape != labels.shape:
        raise ValueError(
            f"scores {tuple(scores.shape)} and labels {tuple(labels.shape)} must have the same shape"
        )


def check_logits(logits: Tensor, labels: Tensor, classes: int) -> None:
    """Checks that logits and labels are a batch [B, K] and [B] of K classes; a logit of -inf excludes a class.

    Raises:
        ValueError: If shapes differ, or a label is not in 0 .. K - 1.
        UserError: If a logit is NaN.
    """
    if logits.shape != (*labels.shape, classes) or labels.ndim != 1:
        raise ValueError(
            f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} must be [B, {classes}] and [B]"
        )
    if ((labels < 0) | (labels >= classes)).any():
        raise ValueError(f"labels must lie in 0 .. {classes - 1}")
    if logits.isnan().any():
        raise UserError(
            "logits hold NaN: the model has diverged; lower the learning rate or check its inputs"
        )
