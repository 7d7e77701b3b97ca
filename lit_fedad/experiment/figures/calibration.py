"""Figures of a run's decisions: promised and seen false alarms, and scores beside thresholds."""

from __future__ import annotations

from lit_fedad.evaluation.decisions import pooled_intervals, pooled_rates
from lit_fedad.experiment.calibration import alphas, evaluated_images
from lit_fedad.experiment.run import Run
from lit_fedad.metrics.conformal import ScoreCounts
from lit_fedad.report.calibration_figure import calibration_figure
from lit_fedad.report.client_scores import ClientScores, client_scores_figure
from lit_fedad.report.figures import save_figure

_MOST_CLIENTS = 12


def draw_calibration(run: Run) -> None:
    """Draws ``calibration.png``: promised and seen false alarms, and misses, of all clients together.

    Args:
        run: A run whose decisions have been judged (`Run.decisions`), on the first process.
    """
    promised = sorted(run.decisions)
    pooled = [pooled_rates(run.decisions[alpha]) for alpha in promised]
    intervals = [pooled_intervals(run.decisions[alpha]) for alpha in promised]
    sides = ("own", "foreign")
    figure = calibration_figure(
        promised,
        {side: [rates[side].false_alarm_rate for rates in pooled] for side in sides},
        {side: [interval[side] for interval in intervals] for side in sides},
        {side: [rates[side].miss_rate for rates in pooled] for side in sides},
    )
    save_figure(figure, run.folder.path / "figures" / "calibration.png")


def draw_scores(run: Run) -> None:
    """Draws ``scores.png``: each client's calibration and test scores beside the threshold that it ships.

    The threshold is that for images whose product is not known; where a client has too few scores it may be by those of
    all clients. Of many clients the 12 with most images are drawn.

    Args:
        run: A run whose decisions have been judged, on the first process.
    """
    sizes, alpha = run.data.partition.sizes, alphas(run.config)[0]
    anomalous = evaluated_images(run.config, run.data).labels != 0
    largest = sorted(run.scores, key=lambda client: (-sizes[client], client))[:_MOST_CLIENTS]
    clients = {}
    for client in sorted(largest):
        own, scores = ScoreCounts.union(run.calibration.clients.get(client, {}).values()), run.scores[client]
        clients[client] = ClientScores(
            own.edges.numpy(),
            own.counts.numpy(),
            scores[~anomalous].numpy(),
            scores[anomalous].numpy(),
            run.calibration.threshold(client, alpha),
        )
    save_figure(client_scores_figure(clients), run.folder.path / "figures" / "scores.png")
