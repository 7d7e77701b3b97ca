"""Figures over a run's rounds."""

import math

from lit_fedad.experiment.figures.history import draw_curves
from lit_fedad.federation.round_report import RoundReport


def test_a_metric_that_was_never_defined_has_no_figure(tmp_path):
    """Empty axes say nothing: as of a mean over clients whose thresholds call nothing normal."""
    values = {"auroc": {0: 0.5, 1: math.nan}, "fe_calibrated": {0: math.nan, 1: math.nan}}
    metrics = {name: {"per_client": by_client} for name, by_client in values.items()}
    draw_curves([RoundReport(1, "train", [0, 1], metrics=metrics)], tmp_path)
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["auroc.png"]
