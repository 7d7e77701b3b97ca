"""What a run must know of its data, whether the images are here or stay at their sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lit_fedad.core.config import Config
from lit_fedad.federation.client_runner import ClientData
from lit_fedad.federation.round_report import RoundReport


class Record(NamedTuple):
    """What MLflow records of a run's data.

    Attributes:
        source: Folder or function that they come from.
        digest: Hash of images and partition.
        profile: Numbers of images.
        run_name: Name of the run; empty for that of its folder.
    """

    name: str
    source: str
    digest: str
    profile: Mapping[str, object]
    run_name: str = ""


class RunData(Protocol):
    """The data of all clients of a run."""

    @property
    def module(self) -> ClientData:
        """Training data by client."""

    def lines(self) -> dict[str, str]:
        """Describes the data in short lines, by subject."""

    def section(self, config: Config) -> dict[str, Any]:
        """Returns what ``result.json`` says of the data, of a run of this configuration."""

    def record(self, config: Config) -> Record:
        """Returns what MLflow records of the data, of a run of this configuration."""

    def measures(self, history: Sequence[RoundReport]) -> dict[str, float]:
        """Returns numbers of each client that MLflow records beside those of the reports so far."""

    def save(self, folder: Path) -> None:
        """Writes what belongs into the run's folder."""
