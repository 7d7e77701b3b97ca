"""A site's own detector: what a run has left at a site whose model never leaves it, as later commands take it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_fedad.config import Config
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.experiment.trained_client import TrainedClient
from lit_fedad.metrics.conformal import Calibration, ScoreCounts


class OwnDetector:
    """The folder of a detector that ``lit-fedad predict``, ``watch`` and ``export`` take as a run's.

    Args:
        folder: The folder.
        config: The run's configuration at this site.
        task: Name of the task's type.
        site: Name of the site.
        client: Its number.
        sizes: Its training images by product or class.
        backbone: Name and source of the frozen features (`Model.provenance`).
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        task: str,
        site: str,
        client: int,
        sizes: Mapping[str, float],
        backbone: Mapping[str, Any],
    ) -> None:
        self.folder, self.config, self.client = RunFolder(folder), config, client
        counts = [[0] * len(sizes)] * client + [[int(size) for size in sizes.values()]]
        self.result = {
            "sites": {site: {"client": client}},
            "method": config["method"]["name"],
            "task": task,
            "data": "sites",
            "partition": {
                "strategy": "sites",
                "products": list(sizes),
                "sizes": [sum(own) for own in counts],
                "counts": counts,
            },
            "backbone": backbone,
            "seed": config["seed"],
            "rounds": config["rounds"],
            "last": {"round": config["rounds"]},
            "config": config,
            "tracking_run_id": None,
        }

    @property
    def complete(self) -> bool:
        """Whether later commands find a detector in the folder."""
        return (self.folder.path / "result.json").exists()

    def calibrate(self, scores: Mapping[str, ScoreCounts]) -> None:
        """Writes counts of the calibration scores of the site's images, by product."""
        self.folder.save_json("calibration.json", Calibration({self.client: scores}, shared=False).to_json())

    def write(self, client: TrainedClient) -> None:
        """Writes what the client predicts with.

        Raises:
            UserError: If the folder holds the detector of another configuration, or cannot be written.
            OSError: If the client's file cannot be written.
        """
        self.folder.claim(self.config)
        self.folder.save_json("result.json", {**self.result, "own_client": client.write(self.folder.path)})
