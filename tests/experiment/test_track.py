"""What a round becomes as numbers by name for the tracker."""

from types import SimpleNamespace

from lit_fedad.experiment.track import Tracking, flat_metrics
from lit_fedad.federation.round_report import RoundReport


def test_what_training_measures_is_not_named_as_what_evaluation_measures():
    """In rounds without an evaluation the accuracy on training images would stand for that on test images."""
    trained = RoundReport(1, "train", [0], scalars={"accuracy": 0.9}, per_client={0: {"accuracy": 0.9}})
    assert not {"accuracy/mean", "clients/accuracy/0"} & flat_metrics(trained).keys()
    assert flat_metrics(trained)["training_accuracy"] == 0.9
    assert flat_metrics(trained)["clients/training_accuracy/0"] == 0.9


def test_the_result_names_a_run_whose_id_comes_late():
    """A run of seconds ends before a new database has answered."""
    tracking, run = Tracking(), SimpleNamespace(rates={}, extras={})
    tracking._tracker = SimpleNamespace(run_id=None, wait_for_id=lambda: "late")
    tracking.on_rounds_end(run)
    assert run.extras["tracking_run_id"] == "late"
