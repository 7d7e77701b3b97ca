"""Figure of promised and seen false alarms of a run's decisions."""

from __future__ import annotations

from lit_fedad.evaluation.decisions import pooled_rates
from lit_fedad.experiment.run import Run
from lit_fedad.metrics.conformal import wilson_interval
from lit_fedad.report.calibration_figure import calibration_figure
from lit_fedad.report.figures import save_figure


def draw_calibration(run: Run) -> None:
    """Draws ``calibration.png``: promised and seen false alarms, and misses, of all clients together.

    Args:
        run: A run whose decisions have been judged (`Run.decisions`), on the first process.
    """
    promised = sorted(run.decisions)
    pooled = [pooled_rates(run.decisions[alpha]) for alpha in promised]
    sides = ("own", "foreign")
    figure = calibration_figure(
        promised,
        {side: [rates[side].false_alarm_rate for rates in pooled] for side in sides},
        {
            side: [wilson_interval(rates[side].false_alarms, rates[side].normal) for rates in pooled]
            for side in sides
        },
        {side: [rates[side].miss_rate for rates in pooled] for side in sides},
    )
    save_figure(figure, run.folder.path / "figures" / "calibration.png")
