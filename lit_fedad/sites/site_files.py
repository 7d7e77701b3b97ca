"""Files that stay at a site: its own detector, and the report of what the detector says of the site's test images."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from lit_fedad.core.config import Config
from lit_fedad.core.files import atomic
from lit_fedad.core.text import csv_cell
from lit_fedad.data.sample import ImageSet
from lit_fedad.evaluation.decisions import EvaluatedImages, limit_of, rates_of
from lit_fedad.evaluation.predict import Predicted
from lit_fedad.experiment.claim import claim
from lit_fedad.experiment.finished_run import TrainedClient
from lit_fedad.experiment.run_data import Data
from lit_fedad.experiment.run_files import save_json
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.metrics.conformal import Calibration, ScoreCounts
from lit_fedad.report.html import escaped, markdown_table
from lit_fedad.sites.site_part import SitePart


class SiteDetector:
    """The folder of a site's detector, which ``lit-fedad predict``, ``watch`` and ``export`` read like a run's folder.

    Args:
        folder: The folder.
        part: The site's part in the run.
        products: Names of all products or classes.
    """

    def __init__(self, folder: Path, part: SitePart, products: Iterable[str]) -> None:
        config = part.config
        self.folder, self.config, self.client = RunFolder(folder), config, part.number
        sizes = {name: part.facts.of_product(name) for name in products}
        counts = [[0] * len(sizes)] * part.number + [list(sizes.values())]
        self.result: dict[str, Any] = {
            "sites": {part.settings.name: {"client": part.number}},
            "method": config["method"]["name"],
            "task": type(part.model.task).__name__,
            "data": "sites",
            "partition": {
                "strategy": "sites",
                "products": list(sizes),
                "sizes": [sum(of_client) for of_client in counts],
                "counts": counts,
            },
            "backbone": part.model.provenance,
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
        """Writes the counts of the calibration scores of the site's images, by product."""
        calibration = Calibration({self.client: scores}, shared=False)
        save_json(self.folder.path, "calibration.json", calibration.to_json())

    def write(self, client: TrainedClient) -> None:
        """Writes the trained client, with which later commands predict.

        Raises:
            UserError: If the folder holds the detector of another configuration, or cannot be written.
            OSError: If the client's file cannot be written.
        """
        claim(self.folder.path, self.config)
        save_json(
            self.folder.path, "result.json", {**self.result, "own_client": client.write(self.folder.path)}
        )


COLUMNS = ("image", "product", "shows", "score", "threshold", "decision")


class SiteReport:
    """The report of one run in the site's folder: ``report.md``, ``decisions.csv`` and ``heatmaps.png``.

    Heatmaps are only drawn if the images are files.

    Args:
        folder: Folder of the report.
        config: The run's configuration; ``evaluation.pictures`` is the number of clearest and of hardest cases drawn.
        data: The site's images.
        images: Products and labels of its test images, by which decisions are judged.
    """

    def __init__(self, folder: Path, config: Config, data: Data, images: EvaluatedImages) -> None:
        self.folder, self.config, self.data, self.images = folder, config, data, images

    def write(self, predicted: Predicted, limits: Mapping[str, float]) -> Path:
        """Writes the report on the predictions of the site's client.

        Args:
            predicted: The client's predictions on the test images.
            limits: Score above which an image is called anomalous, by product.

        Returns:
            The file ``report.md``.
        """
        scores = predicted.scores.double()
        with (
            atomic(self.folder / "decisions.csv") as path,
            path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(map(csv_cell, row) for row in self._rows(scores, limits))
        drawn = self._draw(predicted, limits)
        with atomic(self.folder / "report.md") as path:
            path.write_text(self._page(scores, limits, drawn), encoding="utf-8", errors="surrogateescape")
        return self.folder / "report.md"

    def _rows(self, scores: Tensor, limits: Mapping[str, float]) -> list[tuple[object, ...]]:
        labels, products, images = self.images.labels.tolist(), self.images.products, self.data.images
        rows: list[tuple[object, ...]] = []
        for index, (label, product, score) in enumerate(zip(labels, products, scores.tolist(), strict=True)):
            name, shows = str(index), "anomalous" if label else "normal"
            if isinstance(images, ImageSet):
                name, shows = str(images.test[index].path), images.test[index].defect
            limit = limit_of(limits, product)
            decision = "anomalous" if score > limit else "normal"
            rows.append((name, product or "", shows, f"{score:.6g}", f"{limit:.6g}", decision))
        return rows

    def _draw(self, predicted: Predicted, limits: Mapping[str, float]) -> bool:
        """Draws the clearest and the hardest cases if the images are files and the task localises anomalies.

        A site does not need matplotlib; without it, nothing is drawn.

        Returns:
            Whether the heatmaps were drawn.
        """
        if not predicted.maps or not isinstance(self.data.images, ImageSet) or not find_spec("matplotlib"):
            return False
        from lit_fedad.experiment.figures.predictions import drawn_cases
        from lit_fedad.report.figures import save_figure
        from lit_fedad.report.heatmaps import heatmap_sheet

        captioned = []
        for index, case in drawn_cases(self.data, predicted, self.config["evaluation"]["pictures"]):
            limit = limit_of(limits, self.images.products[index])
            caption = f"{case.caption}, score {float(predicted.scores[index]):.3g}, threshold {limit:.3g}"
            captioned.append(replace(case, caption=caption))
        title = "Test images of this site: clearest cases, then hardest"
        save_figure(heatmap_sheet(captioned, title), self.folder / "heatmaps.png")
        return True

    def _page(self, scores: Tensor, limits: Mapping[str, float], drawn: bool) -> str:
        rows = []
        for product, rate in rates_of(scores, self.images, limits).items():
            limit = limit_of(limits, product)
            threshold = "none: too few calibration images" if math.isinf(limit) else f"{limit:.4g}"
            counts = (rate.normal, rate.false_alarms, rate.anomalous, rate.misses)
            rows.append([escaped(product or "of no product"), *map(str, counts), threshold])
        head = ["product", "normal images", "false alarms", "anomalous images", "misses", "threshold"]
        lines = [
            f"# {self.config['method']['name']} after round {self.config['rounds']}, on this site's test images",
            "",
            "Pictures and decisions stay here. The coordinator has set the thresholds, from counts of calibration"
            " scores; it was told the counts of this table and, after rounds, numbers of test images by bin of their"
            " score.",
            "",
            markdown_table(head, rows),
            "",
            "Every image's score and decision: [decisions.csv](decisions.csv).",
            *(["", "![Heatmaps](heatmaps.png)"] if drawn else []),
        ]
        return "\n".join(lines) + "\n"
