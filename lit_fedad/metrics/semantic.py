"""Metrics of semantic anomaly detection, where whole images of foreign classes are the anomalies (FADngs)."""

import math
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from lit_fedad.core.errors import UserError
from lit_fedad.metrics.base import MergeableMetric, check_same_shape, concatenated, flat_copy
from lit_fedad.metrics.functional.bins import as_scores, distinct_bins
from lit_fedad.metrics.functional.curves import auroc, average_precision
from lit_fedad.metrics.functional.histograms import label_histograms

_PERCENTILES = range(45, 56)


def balanced(negative: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """Weights samples so that the normal and the anomalous ones have the same total weight.

    A normal sample weighs n_anomalous / n_normal times as much as an anomalous one. The weights are whole
    numbers in lowest terms, which keeps sums and ties exact: each sample counts as if it were repeated that
    often. With equal numbers both weights are 1.

    Args:
        negative: Counts of normal samples per bin, int64 [bins], not all zero.
        positive: Counts of anomalous samples per bin, alike.
    """
    normal, anomalous = int(negative.sum()), int(positive.sum())
    divisor = math.gcd(normal, anomalous)
    return negative * (anomalous // divisor), positive * (normal // divisor)


def percentile_threshold(negative: Tensor, positive: Tensor) -> int:
    """Finds the threshold of highest accuracy among the 45th to 55th percentile of all samples.

    It uses the labels, and it relies on histograms that are balanced. No score lies between a percentile
    and the sample next below it, so that sample's bin decides as the interpolated percentile would.

    Args:
        negative: See `balanced`.
        positive: See `balanced`.

    Returns:
        Number of the highest bin that is predicted normal; of equally accurate percentiles, the lowest one's.
    """
    normal, anomalous = negative.cumsum(0), positive.cumsum(0)
    total = normal + anomalous
    ranks = torch.tensor(_PERCENTILES, device=total.device) * (total[-1] - 1) // 100
    bins = torch.searchsorted(total, ranks, right=True)
    correct = normal[bins] + anomalous[-1] - anomalous[bins]
    return int(bins[correct.argmax()])


def detection_errors(negative: Tensor, positive: Tensor, threshold: int) -> tuple[Tensor, Tensor]:
    """Computes false error FP / (TP + FP) and missing error FN / (TP + FN), anomalies positive (FADngs Eq. 17).

    That is, one minus precision and one minus recall.

    Args:
        negative: See `balanced`.
        positive: See `balanced`.
        threshold: Number of the highest bin that is predicted normal.

    Returns:
        FE and ME, float64 scalars in [0, 1]. FE is NaN if no sample is predicted anomalous, ME if none is.
    """
    false_positives, true_positives = negative[threshold + 1 :].sum(), positive[threshold + 1 :].sum()
    anomalies = positive.sum()
    false_error = false_positives.double() / (true_positives + false_positives)
    return false_error, (anomalies - true_positives).double() / anomalies


CALIBRATED_ERRORS = ("fe_calibrated", "me_calibrated")
"""Beginnings of the names of errors at a client's own threshold, which follows from the promised rate."""

_ERRORS = ("fe", "me", *CALIBRATED_ERRORS)
_VALUES = ("auroc", "aupr", *_ERRORS)


def semantic_names(anomalies: Sequence[str]) -> tuple[str, ...]:
    """Lists the names of metrics: means over the sets of anomalies and, where there are several, those of each.

    Example:
        >>> semantic_names(["cat", "dog"])[5:8]
        ('me_calibrated', 'auroc_cat', 'aupr_cat')
    """
    sets = ("", *(f"_{name}" for name in anomalies)) if len(anomalies) > 1 else ("",)
    return tuple(f"{name}{suffix}" for suffix in sets for name in _VALUES)


class SemanticMetrics(MergeableMetric):
    """AUROC, AUPR, false error and missing error of image scores, against one or several sets of anomalies.

    Every set is compared on its own with all normal images. The papers' test sets hold as many normal as
    anomalous images; where the numbers differ, the normal images weigh n_anomalous / n_normal, so that AUPR,
    FE and the threshold do not depend on the ratio (see `balanced`). AUROC and ME never do.

    FE and ME are given at two thresholds: the percentile of the test scores with the highest accuracy, which
    uses the test labels (see `percentile_threshold`), and a client's own threshold, which does not (`at_threshold`).

    The state is three float32 numbers an image: score, set, and decision at the client's threshold, NaN without one.

    Args:
        anomalies: Names of the sets of anomalies.

    Raises:
        ValueError: If there is no set of anomalies.
        UserError: If the name of a set makes two values share a name.

    Example:
        >>> metrics = SemanticMetrics(("cat",))
        >>> metrics.update(torch.tensor([1.0, 2.0, 5.0, 3.0, 6.0, 7.0]), torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> {name: round(float(value), 2) for name, value in metrics.at_threshold(5.5).compute().items()}
        {'auroc': 0.89, 'aupr': 0.92, 'fe': 0.33, 'me': 0.33, 'fe_calibrated': 0.0, 'me_calibrated': 0.33}
    """

    scores: list[Tensor]
    sets: list[Tensor]
    decisions: list[Tensor]

    def __init__(self, anomalies: tuple[str, ...]) -> None:
        super().__init__(anomalies)
        if not anomalies:
            raise ValueError("anomalies must name at least one set")
        names = semantic_names(anomalies)
        if len(set(names)) < len(names):
            raise UserError(f"sets of anomalies {anomalies} give two values one name: rename one of the sets")
        self.anomalies = anomalies
        self.lower_is_better = frozenset(name for name in names if name.startswith(("fe", "me")))
        for state in ("scores", "sets", "decisions"):
            self.add_state(state, default=[], dist_reduce_fx="cat")

    def update(self, scores: Tensor, sets: Tensor) -> None:
        """Adds a batch.

        Args:
            scores: Anomaly scores of the images, any real dtype, shape [B].
            sets: 0 for a normal image, a + 1 for one of the a-th set of anomalies, int64, shape [B].

        Raises:
            ValueError: If the shapes differ, or there is no such set.
            UserError: If a score is NaN.
        """
        check_same_shape(scores, sets)
        if ((sets < 0) | (sets > len(self.anomalies))).any():
            raise ValueError(f"sets must lie in 0 .. {len(self.anomalies)}")
        image_scores = flat_copy(as_scores(scores), self.device)
        self.scores.append(image_scores)
        self.sets.append(flat_copy(sets, self.device))
        self.decisions.append(torch.full_like(image_scores, torch.nan))

    def at_threshold(self, threshold: float) -> "SemanticMetrics":
        """Copies the metric with decisions at a client's label-free threshold: higher scores are anomalous."""
        other = deepcopy(self)
        # In double precision: torch would round the threshold to float32.
        other.decisions = [(scores.double() > threshold).float() for scores in self.scores]
        return other

    def compute_local(self) -> dict[str, Tensor]:
        """Computes areas and errors.

        - ``auroc``, ``aupr``: areas under the ROC and the precision-recall curve.
        - ``fe``, ``me``: false and missing error at the threshold that uses the test labels.
        - ``fe_calibrated``, ``me_calibrated``: the same at the label-free threshold; NaN if an image has none.

        Each is the mean over the sets of anomalies. If there are several, every value is also given by set,
        as in ``auroc_<set>``.

        Returns:
            Values by name, float64 scalars. A value is NaN where it is undefined: without an image of a set or
            without a normal one, and for a false error if no image is predicted anomalous. The mean is then NaN
            too: over some of the sets it would be another quantity.
        """
        by_set = [self._against(number) for number in range(1, len(self.anomalies) + 1)]
        values = {name: torch.stack([of_set[name] for of_set in by_set]).mean() for name in _VALUES}
        if len(by_set) > 1:
            for anomaly, of_set in zip(self.anomalies, by_set, strict=True):
                values |= {f"{name}_{anomaly}": value for name, value in of_set.items()}
        return values

    def _against(self, number: int) -> dict[str, Tensor]:
        """Computes the values of all normal images against set number ``number`` of anomalies, from 1."""
        sets = concatenated(self.sets)
        chosen = (sets == 0) | (sets == number)
        labels = sets[chosen] != 0
        undefined = torch.tensor(torch.nan, dtype=torch.float64, device=labels.device)
        if not labels.any() or labels.all():
            return dict.fromkeys(_VALUES, undefined)
        index, count = distinct_bins(concatenated(self.scores)[chosen])
        counts = label_histograms(index, labels, count)
        weighted = balanced(*counts)
        errors = detection_errors(*weighted, percentile_threshold(*weighted))
        decisions = concatenated(self.decisions)[chosen]
        calibrated_errors = undefined, undefined
        if not decisions.isnan().any():
            decision_counts = balanced(*label_histograms(decisions.long(), labels, 2))
            calibrated_errors = detection_errors(*decision_counts, threshold=0)
        areas = {"auroc": auroc(*counts), "aupr": average_precision(*weighted)}
        return areas | dict(zip(_ERRORS, errors + calibrated_errors, strict=True))
