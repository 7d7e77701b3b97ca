"""Titles of metrics and methods, and texts of numbers, sizes and durations, as they are shown."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

METRIC_TITLES = {
    "i_auroc": "I-AUROC", "p_auroc": "P-AUROC", "pro": "PRO", "aupr": "AUPR",
    "f1_max": "F1-max", "p_ap": "P-AP", "pro_05": "PRO@5%", "spro": "sPRO", "aupimo": "AUPIMO",
    "accuracy": "accuracy", "own_accuracy": "own accuracy", "balanced_accuracy": "balanced accuracy",
    "predicted_classes": "classes predicted",
    "auroc": "AUROC", "fe": "FE", "me": "ME",
    "fe_calibrated": "FE calibrated", "me_calibrated": "ME calibrated",
    "selection_accuracy": "A_sel", "global_accuracy": "A_glo", "local_accuracy": "A_loc",
    "incremental_accuracy": "A_inc", "forgetting": "forgetting",
    "false_alarm_rate": "false alarms", "miss_rate": "misses",
    "false_alarm_rate_foreign": "false alarms, foreign", "miss_rate_foreign": "misses, foreign",
}  # fmt: skip
"""Title of each metric, by its name in results; in the order of tables."""

_ATTACK_TITLES = {
    "sent_largest_auc": "largest AUC", "sent_mean_auc": "mean AUC", "sent_defence_rate": "defence rate",
}  # fmt: skip
# Chance is what the same attack finds where membership is permuted.
_ATTACK_TITLES |= {f"{name}_chance": f"{title}, chance" for name, title in _ATTACK_TITLES.items()}


def metric_title(name: str) -> str:
    """Returns the title of a metric or of an attack's number.

    A metric of a single anomaly set has the title of its family and the set; a metric without a title has its name.

    Example:
        >>> metric_title("fe"), metric_title("fe_calibrated_svhn"), metric_title("auroc_svhn")
        ('FE', 'FE calibrated svhn', 'AUROC svhn')
    """
    if name in METRIC_TITLES or name in _ATTACK_TITLES:
        return METRIC_TITLES.get(name) or _ATTACK_TITLES[name]
    family = metric_family(name)
    return name if family is None else f"{METRIC_TITLES[family]} {name.removeprefix(f'{family}_')}"


def metric_family(name: str) -> str | None:
    """Returns the metric of which a name stands for the value on a single anomaly set; None for any other name.

    Example:
        >>> metric_family("fe_calibrated_svhn"), metric_family("fe_calibrated")
        ('fe_calibrated', None)
    """
    if name in METRIC_TITLES:
        return None
    return max((known for known in METRIC_TITLES if name.startswith(f"{known}_")), key=len, default=None)


def method_title(method: Mapping[str, Any]) -> str:
    """Names a run's method with its paper, or with what it does where it has no paper.

    Args:
        method: The configuration's section ``method``.

    Example:
        >>> [method_title({"name": "bank", "paper": paper}) for paper in ("none: sums of patches", "none")]
        ['bank (sums of patches)', 'bank']
    """
    description = method["paper"].removeprefix("none").removeprefix(": ")
    return f"{method['name']} ({description})" if description else str(method["name"])


def named_version(result: Mapping[str, Any]) -> str:
    """Names the version that a result is of; empty for the run as it was trained."""
    return f", version {result['version']}" if "version" in result else ""


def metric_text(value: float | None) -> str:
    """Formats a metric with three decimals, or as a dash where it is undefined.

    Example:
        >>> metric_text(0.98765), metric_text(None)
        ('0.988', '-')
    """
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def human_bytes(count: float) -> str:
    """Formats a number of bytes, rounded: whole bytes, or two decimals of the decimal unit that leaves less than 1,000.

    Example:
        >>> human_bytes(999), human_bytes(22_478_848), human_bytes(999_999)
        ('999 B', '22.48 MB', '1.00 MB')
    """
    value = float(round(count))
    if value < 1000:
        return f"{value:.0f} B"
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if round(value, 2) < 1000:
            return f"{value:.2f} {unit}"
    return f"{value / 1000:.2f} TB"


def human_seconds(seconds: float) -> str:
    """Formats a duration.

    Example:
        >>> human_seconds(1.84), human_seconds(75), human_seconds(7384)
        ('1.8 s', '1:15', '2:03:04')
    """
    return f"{seconds:.1f} s" if round(seconds, 1) < 60 else clock(seconds)


def clock(seconds: float) -> str:
    """Formats a duration in seconds as minutes:seconds or hours:minutes:seconds.

    Example:
        >>> clock(7), clock(7384)
        ('0:07', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def p_value_text(p_value: float) -> str:
    """Formats a p-value for a caption.

    Example:
        >>> p_value_text(0.012345), p_value_text(1.0)
        ('p = 0.0123', 'p = 1')
    """
    return f"p = {p_value:.3g}"


def promised_text(rates: Iterable[float]) -> str:
    """Formats the rates of false alarms that clients promise: one, or the lowest and the highest.

    Example:
        >>> promised_text([0.01, 0.01]), promised_text([0.334, 0.05, 0.1])
        ('0.01', '0.05 to 0.334 by client')
    """
    ordered = sorted(rates)
    low, high = f"{ordered[0]:g}", f"{ordered[-1]:g}"
    return low if low == high else f"{low} to {high} by client"


def without_value(metrics: Mapping[str, Any]) -> str | None:
    """Names the products that have no part in the first metric's mean over products; None if all have."""
    name = next(
        (name for name, values in metrics.items() if name != "round" and "per_product" in values), None
    )
    if name is None:
        return None
    values = metrics[name]["per_product"]
    lacking = [product for product, value in values.items() if value is None or math.isnan(value)]
    if not lacking:
        return None
    return (
        f"Left out of {metric_title(name)}'s mean over products (it needs normal and anomalous test images of each):"
        f" {', '.join(lacking)}."
    )
