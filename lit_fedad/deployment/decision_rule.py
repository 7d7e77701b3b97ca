"""The rule by which a deployed detector calls images anomalous."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_fedad.errors import UserError
from lit_fedad.metrics.conformal import Calibration, ScoreCounts, needed_images


@dataclass(frozen=True)
class DecisionRule:
    """A conformal decision: images with a p-value of at most alpha are anomalous.

    Attributes:
        of: Whose normal images calibrate it, in words.
        scores: Their scores.
        alpha: Promised rate of false alarms.
    """

    of: str
    scores: ScoreCounts
    alpha: float

    @property
    def threshold(self) -> float:
        """Score above which images are anomalous; infinity where alpha cannot be promised."""
        return self.scores.threshold(self.alpha)

    @property
    def colour(self) -> float:
        """Score in the middle of heatmaps' colours: the threshold or, without one, the largest calibration score."""
        if math.isfinite(self.threshold):
            return self.threshold
        return float(self.scores.edges[-1]) if self.scores.total else 1.0

    def __str__(self) -> str:
        seen = f"{self.scores.total} calibration images of {self.of}"
        if math.isfinite(self.threshold):
            return f"threshold {self.threshold:.4g}: at most {self.alpha:g} of normal images, by {seen}"
        return f"{seen} are too few to promise {self.alpha:g}: that takes {needed_images(self.alpha)}"


def decision_rule(
    calibration: Calibration, client: int, alpha: float, product: str | None = None
) -> DecisionRule:
    """Chooses a client's decision rule.

    Raises:
        UserError: If alpha is not in (0, 1), or nobody has calibrated with this product.
    """
    if not 0 < alpha < 1:
        raise UserError(f"alpha={alpha} must be above 0 and below 1")
    known = sorted({name for own in calibration.clients.values() for name in own})
    if product is not None and product not in known:
        raise UserError(f"product={product}: calibrated are {', '.join(known) or 'none'}")
    source = calibration.source(client, alpha, product)
    return DecisionRule(source.of, source.scores, alpha)
