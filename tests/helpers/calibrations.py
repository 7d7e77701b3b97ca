"""Calibrations with given thresholds."""

import torch

from lit_fedad.metrics.conformal import Calibration, ScoreCounts


def limits(thresholds):
    """A calibration in which alpha = 0.5 has these thresholds by client, up to one in a thousand."""
    return Calibration(
        {client: {"all": ScoreCounts.of(torch.tensor([value]))} for client, value in thresholds.items()},
        shared=False,
    )
