"""Runs that are killed at any moment end bit for bit like those that nobody disturbed, whatever the method."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

KILLS = int(os.environ.get("LIT_FEDAD_KILLS", "12"))
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)

METHODS = {
    "federated_bank": "memory_bank",
    "scaffold": "memory_bank",
    "fedavg": "classifier",
    "gldp": "classifier",
    "fedvck": "classifier",
    "fadngs": "contrastive",
}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_runs_end_like_undisturbed_ones(
    lab, forking, pair_overrides, tmp_path, differences, outcome, method
):
    """LIT_FEDAD_KILLS sets the number of kills of all methods together; they come at seeded shares of a run's time."""
    given = [*pair_overrides(method, METHODS[method]), "rounds=4"]

    def start(name):
        return forking.start(
            ["train", *lab.overrides(f"out={tmp_path / name}", *given)], tmp_path / f"{name}.log"
        )

    began = time.monotonic()
    assert forking.wait(start("straight")) == 0, (tmp_path / "straight.log").read_text()
    duration = time.monotonic() - began
    draw, kills, run, runs = random.Random(method), 0, 0, []
    wanted = max(1, KILLS // len(METHODS))
    first = [*METHODS].index(method)
    while kills < wanted:
        chosen = SIGNALS[(first + kills) % len(SIGNALS)]
        assert len(runs) < 20 * wanted, f"signal {chosen} ends no run"
        process = start(f"run{run}")
        delay = draw.uniform(0, duration)
        time.sleep(delay)
        os.kill(process, chosen)  # a zombie takes it too
        status = forking.wait(process)
        log = tmp_path / f"run{run}.log"
        said = log.read_text() if log.exists() else ""  # killed before it could say a word
        assert "Traceback" not in said, said
        if status == 0:  # too late: a run takes no longer than that, now that the machine has less to do
            duration = delay
            runs.append(run)
            run += 1
        else:
            kills += 1
            # A signal itself ends what has not begun yet.
            assert status in (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 130, 143), said
    assert forking.wait(start(f"run{run}")) == 0, (tmp_path / f"run{run}.log").read_text()
    expected = json.loads((tmp_path / "straight" / "result.json").read_text())
    for number in {*runs, run}:
        result = json.loads((tmp_path / f"run{number}" / "result.json").read_text())
        assert differences(outcome(result), outcome(expected)) == []
        assert differences(lab.state(tmp_path / f"run{number}"), lab.state(tmp_path / "straight")) == []
