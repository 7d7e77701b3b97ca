"""Figures of a run's predictions of test images, by kind of anomalies."""

from __future__ import annotations

from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.figures.anomaly import draw_heatmaps
from lit_fedad.experiment.figures.calibration import draw_calibration, draw_scores
from lit_fedad.experiment.figures.semantic import show_representations
from lit_fedad.experiment.run import Run, RunCallback


class Predictions(RunCallback):
    """A callback that draws decisions and scores, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws the figures in the folder ``figures``."""
        if not run.config["evaluation"]["pictures"] or run.model.task.kind != "anomaly":
            return
        if run.fabric.is_global_zero and run.decisions:
            draw_calibration(run)
            draw_scores(run)
        if isinstance(run.data.images, SemanticSet):
            show_representations(run)
        elif isinstance(run.data.images, ImageSet):
            draw_heatmaps(run)
