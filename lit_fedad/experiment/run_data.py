"""Describes the data of a run: for the console, its result and MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lit_fedad.core.config import Config
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import Images
from lit_fedad.data.partition import Partition
from lit_fedad.data.transform import ImageTransform
from lit_fedad.federation.client_runner import ClientData
from lit_fedad.federation.round_report import RoundReport


class Record(NamedTuple):
    """The description of a run's data that MLflow records.

    Attributes:
        name, source: Name of the data set, and the folder or function that it comes from.
        digest: Hash of images and partition.
        profile: Numbers of images.
        run_name: Name of the run; empty for the name of its folder.
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
        """The training data of all clients."""

    def lines(self) -> dict[str, str]:
        """Describes the data in short lines, by subject."""

    def section(self, config: Config) -> dict[str, Any]:
        """Returns the section on the data in ``result.json``, for a run of this configuration."""

    def record(self, config: Config) -> Record:
        """Returns the description of the data that MLflow records, for a run of this configuration."""

    def measures(self, history: Sequence[RoundReport]) -> dict[str, float]:
        """Returns numbers of each client that MLflow records in addition to those in the reports so far."""

    def save(self, folder: Path) -> None:
        """Writes the files on the data into the run's folder."""


@dataclass
class Data:
    """Images, their partition to clients, and their loaders.

    Attributes:
        transform: Transform from file to tensor.
        digest: Hash of images and partition.
    """

    images: Images
    partition: Partition
    transform: ImageTransform
    module: FederatedDataModule
    digest: str

    def counts(self) -> np.ndarray:
        """Counts training images by client and product; int64 [clients, products]."""
        return self.partition.counts(self.images)

    def lines(self) -> dict[str, str]:
        """Describes the data in short lines, by subject."""
        images, sizes, kept = self.images, self.partition.sizes, sum(map(len, self.partition.calibration))
        aside = f"; {kept} kept back to set the thresholds" if kept else ""
        return {
            "data": f"{images.name}: {len(images.train)} training, {len(images.test)} test images",
            "clients": f"{len(sizes)}, numbered from 0, train on {', '.join(map(str, sizes))} images{aside}",
        }

    def section(self, config: Config) -> dict[str, Any]:
        """Returns the section on the data in ``result.json``."""
        return {
            "data": self.images.name,
            "partition": {
                "strategy": config["partition"]["_target_"].rpartition(".")[2],
                "sizes": list(self.partition.sizes),
                "counts": self.counts().tolist(),
                "products": self.images.categories,
                "stage_sizes": [list(map(len, stages)) for stages in self.partition.by_stage],
            },
            "stage_rounds": self.module.stage_rounds,
        }

    def record(self, config: Config) -> Record:
        """Returns the description of the data that MLflow records."""
        profile = {"train": len(self.images.train), "test": len(self.images.test)}
        source = str(config["data"].get("root") or config["data"]["_target_"])
        return Record(self.images.name, source, self.digest, profile | {"clients": self.counts().tolist()})

    def measures(self, history: Sequence[RoundReport]) -> dict[str, float]:
        """Returns nothing: reports hold all numbers of clients on this machine."""
        return {}

    def save(self, folder: Path) -> None:
        """Writes ``partition.json``."""
        self.partition.save(folder / "partition.json")
