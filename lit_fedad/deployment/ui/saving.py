"""What the operator's page writes into a run's folder: thresholds, as versions of its detector."""

from __future__ import annotations

from lit_fedad.deployment.new_rate import save_rate
from lit_fedad.deployment.ui.reading import RunView, expected_alarms
from lit_fedad.experiment.run_folder import RunFolder


def save_threshold(view: RunView, client: int, product: str | None, threshold: float) -> tuple[str, int]:
    """Makes a version with the rate of false alarms that a threshold has, and makes it the default.

    Args:
        view: The run.
        client: The client whose threshold it is.
        product: The product whose threshold it is; None for any.
        threshold: Score above which images are anomalous.

    Returns:
        What was done, in words; and the number of the version that was the default.

    Raises:
        UserError: If it cannot be saved.
    """
    home, rate = RunFolder(view.path).home, _rate(view, client, product, threshold)
    with home.locked():
        before = home.default_version()
        number = save_rate(home, rate)
        folder = home.choose_version(number)
    limit = folder.calibration().rule(client, rate, product).threshold
    return (
        f"Version {number} is the default: at most {rate:.2%} false alarms, at all clients; here the threshold is"
        f" {limit:.6g}. An exported detector keeps its own until it is exported again.",
        before,
    )


def choose_version(view: RunView, number: int) -> str:
    """Makes a version of a run the default again; says so in words.

    Raises:
        UserError: If there is no such version.
    """
    home = RunFolder(view.path).home
    with home.locked():
        home.choose_version(number)
    return f"Version {number} is the default again."


def _rate(view: RunView, client: int, product: str | None, threshold: float) -> float:
    """Finds the rate that has a threshold: a larger one may be promised by fewer, more specific scores."""
    assert view.calibration is not None
    scores = view.shipped(client, product).scores
    while True:
        rate, _ = expected_alarms(scores, threshold, 0)
        deciding = view.calibration.rule(client, rate, product).scores
        if deciding.total >= scores.total:
            return rate
        scores = deciding
