"""Figures of what a run's detectors predict on test images; which ones depends on the kind of anomalies."""

from __future__ import annotations

from lit_fedad.data.sample import ImageSet
from lit_fedad.data.semantic import SemanticSet
from lit_fedad.experiment.figures.anomaly import draw_heatmaps
from lit_fedad.experiment.figures.semantic import show_representations
from lit_fedad.experiment.run import Run, RunCallback


class Predictions(RunCallback):
    """Draws scores with heatmaps or representations after the last round, unless ``evaluation.pictures`` is 0."""

    def on_rounds_end(self, run: Run) -> None:
        """Draws them, in ``figures``."""
        if not run.config["evaluation"]["pictures"] or run.model.task.kind != "anomaly":
            return
        if isinstance(run.data.images, SemanticSet):
            show_representations(run)
        elif isinstance(run.data.images, ImageSet):
            draw_heatmaps(run)
