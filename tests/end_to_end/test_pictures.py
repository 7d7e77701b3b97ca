"""A run draws what suits its kind of data, and nothing where no pictures are wanted."""

import pytest
from helpers.small_tasks import STREAM

DRAWN = ("evaluation.pictures=1",)
IN_TURN = ("partition=products_in_turn", "partition.order=[gravel,grain]", "partition.clients=2")
CLASSES = (*STREAM, "method.client.base_epochs=1", "method.client.head_epochs=2")
DETECTOR = {"partition", "heatmaps", "scores", "calibration", "i_auroc", "p_auroc", "pro", "aupr"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("method=fedavg",), {*DETECTOR, "loss", "communication"}),
        (("method=federated_bank", *IN_TURN, "rounds=2"), DETECTOR),
        (("method=gldp", *CLASSES), {"partition", "selection_accuracy", "loss", "communication"}),
    ],
)
def test_pictures_suit_the_data(lab, settings, expected):
    out, _ = lab.finished(*settings, *DRAWN)
    assert expected <= {path.stem for path in (out / "figures").glob("*.png")}
    assert all(path.stat().st_size > 1000 for path in (out / "figures").glob("*.png"))


@pytest.mark.slow
def test_no_pictures_are_drawn_where_none_are_wanted(lab):
    out, _ = lab.finished("method=federated_bank")
    assert not list(out.rglob("*.png"))
