"""Which runs `scripts/screenshots.py` pictures."""

import runpy
from pathlib import Path

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.tracking.reading import TrackedRun

two_runs = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "screenshots.py"))["two_runs"]


def run(name, method, rounds=1, experiment="textures", status="FINISHED", **tags):
    tags = {"method": method, **tags}
    return TrackedRun(name, "0", experiment, name, status, 0, tags, {"rounds": str(rounds)}, {})


@pytest.mark.parametrize(
    ("runs", "chosen"),
    [
        # Two methods that trained come first, then two methods, then two runs.
        ([run("a", "fedavg"), run("b", "feddymem"), run("c", "local", 0)], ["b", "a"]),
        ([run("a", "feddymem"), run("b", "feddymem"), run("c", "federated_subspace", 0)], ["c", "b"]),
        ([run("a", "feddymem"), run("b", "feddymem"), run("c", "feddymem")], ["c", "b"]),
        ([run("a", "feddymem"), run("b", "fedavg"), run("c", "fedavg", experiment="pcb")], ["b", "a"]),
    ],
)
def test_two_runs_are_found_whatever_the_methods(runs, chosen):
    assert [found.run_id for found in two_runs(runs)] == chosen


def test_one_complete_run_is_not_enough():
    runs = [
        run("a", "fedavg"),
        run("b", "local", status="FAILED"),
        run("c", "local", **{"mlflow.parentRunId": "a"}),
    ]
    with pytest.raises(UserError, match="no two complete runs of one experiment"):
        two_runs(runs)
