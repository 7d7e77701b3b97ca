"""Values of journal records, in the form and within the limits that MLflow accepts."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fedad.core.text import redact

Record = dict[str, Any]
"""One line of a journal: ``{"kind", "scope", "values", "time"}``, its time in milliseconds."""

MAX_ITEMS = {"metrics": 1000, "params": 100, "tags": 100}
"""Number of values that one MLflow request takes, by the kind of record, so that one record is one request."""

_MAX_NAME = 250
_MAX_TEXT = 6000
_MAX_DIGEST = 36


def metric_values(values: Mapping[str, float]) -> dict[str, float]:
    """Returns metrics under names that MLflow accepts, without values that are not finite.

    Example:
        >>> metric_values({"pixel_auroc@0.3": 0.25, "loss": math.nan})
        {'pixel_auroc_0.3': 0.25}
    """
    return {_name(name): float(value) for name, value in values.items() if math.isfinite(value)}


def text_values(values: Mapping[str, object]) -> dict[str, str]:
    """Returns parameters or tags as texts of 6,000 characters at most, without passwords, under names MLflow accepts.

    Example:
        >>> text_values({"federation.lr": 1e-3, "layers": ["a", "b"]})
        {'federation.lr': '0.001', 'layers': "['a', 'b']"}
    """
    return {_name(name): _text(value) for name, value in values.items()}


def artifact_values(path: Path, folder: Path) -> dict[str, str]:
    """Returns the name of a file or directory with a fingerprint of its current state.

    Args:
        path: File or directory.
        folder: The run's folder. A name inside it is relative, so that the folder can be moved before it is sent.

    Returns:
        One item: the name, and number, total bytes and latest change of the files.
    """
    path, folder = path.resolve(), folder.resolve()
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
    return {name: _fingerprint(path)}


def dataset_values(
    name: str, source: str, digest: str, profile: Mapping[str, object]
) -> dict[str, dict[str, str]]:
    """Returns a data set's description by its name."""
    profile_text = json.dumps(profile, default=str)
    return {name: {"source": redact(source), "digest": digest[:_MAX_DIGEST], "profile": profile_text}}


def _name(text: str) -> str:
    """Replaces the characters that MLflow does not allow in a name."""
    return re.sub(r"[^\w.\-/ ]", "_", text)[:_MAX_NAME]


def _text(value: object) -> str:
    text = redact(str(value))
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _fingerprint(path: Path) -> str:
    """Tells a changed file or directory from an unchanged one without reading it."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    stats = [file.stat() for file in files if file.is_file()]
    size = sum(stat.st_size for stat in stats)
    return f"{len(stats)} files, {size} bytes, {max((stat.st_mtime_ns for stat in stats), default=0)}"
