"""Which runs `scripts/screenshots.py` pictures."""

import importlib.util
from pathlib import Path

import pytest

from lit_fedad.errors import UserError
from lit_fedad.tracking.reading import TrackedRun

_PATH = Path(__file__).parents[2] / "scripts" / "screenshots.py"
_SPEC = importlib.util.spec_from_file_location("screenshots", _PATH)
screenshots = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(screenshots)


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
    assert [found.run_id for found in screenshots.two_runs(runs)] == chosen


def test_one_complete_run_is_not_enough():
    runs = [
        run("a", "fedavg"),
        run("b", "local", status="FAILED"),
        run("c", "local", **{"mlflow.parentRunId": "a"}),
    ]
    with pytest.raises(UserError, match="no two complete runs of one experiment"):
        screenshots.two_runs(runs)
