"""Accuracy of a client whose classes change over the stages of its stream, and summaries over clients."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lit_fedad.metrics.base import MergeableMetric, check_logits
from lit_fedad.metrics.federated import Summary, defined_mean, summary


class ContinualAccuracy(MergeableMetric):
    """Accuracy and forgetting of one client's model over the M stages of its stream.

    A stage's test data hold the K classes in the proportions of ``weights``. They are not drawn: every image of
    the official test split is predicted, and the share of correct images of each class is weighted. That is the
    expectation over such draws, without their noise.

    The state is two counts a stage and class, images and correct ones, of the model after that stage. The metrics
    of a client's visits, one a stage, merge into its whole history.

    Args:
        weights: Weight of each class in the test data of each stage [M, K]: the number of the client's
            training images of that class in that stage; for balanced test data, 1 for each class it holds then.
        known_only: Whether only classes that the client has met up to the stage are predicted. Softmax heads are then
            compared fairly with prototypes, which know no others.

    Raises:
        ValueError: If weights are not [M, K].

    Example:
        >>> metrics = ContinualAccuracy(torch.tensor([[3, 1, 0], [0, 2, 2]]))
        >>> labels = torch.tensor([0, 1, 2])
        >>> metrics.update(torch.eye(3)[[0, 1, 0]], labels, stage=0)
        >>> metrics.update(torch.eye(3)[[1, 1, 2]], labels, stage=1)  # class 0 is forgotten
        >>> {name: float(value) for name, value in metrics.compute().items()}
        {'accuracy': 0.625, 'incremental_accuracy': 0.8125, 'forgetting': 0.75}
    """

    lower_is_better = frozenset({"forgetting"})
    correct: Tensor
    total: Tensor

    def __init__(self, weights: Tensor, known_only: bool = False) -> None:
        super().__init__(weights.tolist(), known_only)
        if weights.ndim != 2:
            raise ValueError(f"weights {tuple(weights.shape)} must be [stages, classes]")
        self.weights = weights.to(torch.float64, copy=True)
        self.known_only = known_only
        for name in ("correct", "total"):
            self.add_state(name, default=torch.zeros(weights.shape, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor, stage: int) -> None:
        """Adds a batch of the test split, as predicted by the model after a stage.

        Args:
            logits: Class logits [B, K]; -inf for a class that the model cannot predict.
            labels: Classes, int64 [B].
            stage: The stage that the model was trained on last, 0 .. M - 1.

        Raises:
            ValueError: If shapes differ, a label is not in 0 .. K - 1, or there is no such stage.
            UserError: If a logit is NaN.
        """
        stages, classes = self.weights.shape
        check_logits(logits, labels, classes)
        if not 0 <= stage < stages:
            raise ValueError(f"stage {stage} must lie in 0 .. {stages - 1}")
        if self.known_only:
            unknown = (self.weights[: stage + 1] == 0).all(dim=0)
            logits = logits.masked_fill(unknown.to(logits.device), -torch.inf)
        self.correct = self.correct + self._counts(labels[logits.argmax(dim=1) == labels], stage)
        self.total = self.total + self._counts(labels, stage)

    def add(self, counts: Tensor, stage: int) -> None:
        """Adds the counts of one stage.

        Args:
            counts: From `of_stage` of another metric, int64 [2, K].
            stage: The stage that the model was trained on last.
        """
        self.correct[stage] += counts[0]
        self.total[stage] += counts[1]

    def of_stage(self, stage: int) -> Tensor:
        """Returns the numbers of correct images and of images of each class after a stage, int64 [2, K]."""
        return torch.stack([self.correct[stage], self.total[stage]])

    def compute_local(self) -> dict[str, Tensor]:
        """Computes accuracies and forgetting.

        With m the last stage added, and a_lj the accuracy of the model after stage l on the test data of stage j:

        - ``accuracy``: of the model after stage m on the test data of stages 0 .. m together. It is the A_sel, A_loc
          or A_glo of a client, depending on the model that is evaluated and the clients it is averaged over
          (GLDP, evaluation metrics).
        - ``incremental_accuracy``: mean over the stages l added of the accuracy after l on stages 0 .. l together.
        - ``forgetting``: mean over the stages j < m of max_l a_lj - a_mj, j <= l < m. It is negative where accuracy on
          old stages still grows.

        A stage without weight, or not added, counts in no mean or maximum; classes that are not in the test split
        have no weight.

        Returns:
            Values by name, float64 scalars. A value is NaN where nothing is left: ``forgetting`` in the first stage.
        """
        stages = self.total.any(dim=1).nonzero().flatten().tolist()
        last = max(stages, default=0)
        weights = self.weights.to(self.device)
        so_far = self._accuracies(weights.cumsum(dim=0)).diagonal()
        of_stage = self._accuracies(weights)
        after = {stage: of_stage[stage, : stage + 1].tolist() for stage in stages}
        return {
            "accuracy": so_far[last],
            "incremental_accuracy": so_far.nanmean(),
            "forgetting": so_far.new_tensor(forgetting(after) if after else math.nan),
        }

    def _accuracies(self, weights: Tensor) -> Tensor:
        """Computes accuracies of the model after each stage (rows) under each row of class weights [., K] (columns)."""
        recall = (self.correct.double() / self.total).nan_to_num()
        return (recall @ weights.T) / ((self.total > 0).double() @ weights.T)

    def _counts(self, labels: Tensor, stage: int) -> Tensor:
        stages, classes = self.total.shape
        cells = stage * classes + labels
        return cells.bincount(minlength=stages * classes).view(stages, classes).to(self.device)


def forgetting(after: Mapping[int, Sequence[float]]) -> float:
    """Computes the mean over the stages j < m of max_l a_lj - a_mj, j <= l < m (Chaudhry et al., ECCV 2018).

    Args:
        after: Stage l, from 0 -> values a_lj after it on each of the stages j = 0 .. l, NaN where undefined. The
            last stage is m.

    Returns:
        The mean, negative where earlier stages still gain. Stages without a value before m count in no mean or
        maximum. NaN where nothing is left: in the first stage.

    Example:
        >>> round(forgetting({0: [0.9], 1: [0.8, 1.0], 2: [0.7, 0.9, 0.9]}), 3)
        0.15
    """
    last = max(after)
    drops = []
    for old in range(last):
        earlier = [values[old] for stage, values in after.items() if old <= stage < last]
        best = max((value for value in earlier if not math.isnan(value)), default=math.nan)
        drops.append(best - after[last][old])
    return defined_mean(drops)


def summarise_clients(
    values: Mapping[int, Mapping[str, float]], sizes: Mapping[int, int], lower_is_better: Collection[str]
) -> dict[str, Summary]:
    """Summarises values of clients whose samples cannot be pooled, as each has test data of its own.

    Args:
        values: Values by name of every client by client id, NaN where undefined. A client may lack a name.
        sizes: Number of images of every client.
        lower_is_better: Names of the values whose worst is the maximum.

    Returns:
        For every name the mean and the worst over the clients for which the value is defined, their mean weighted by
        size as ``pooled`` (the value expected of an image drawn at random from all their data), and the value of every
        client in ascending order of id. All NaN where no client has the value.
    """
    summaries = {}
    for name in dict.fromkeys(name for of_client in values.values() for name in of_client):
        per_client = {client: values[client].get(name, math.nan) for client in sorted(values)}
        images = {client: sizes[client] for client, value in per_client.items() if not math.isnan(value)}
        total = sum(images.values())
        weighted = math.fsum(per_client[client] * size for client, size in images.items())
        pooled = weighted / total if total else math.nan
        summaries[name] = summary(per_client, pooled, max if name in lower_is_better else min)
    return summaries
