"""Plays federations of sites with faults at random moments, and reports what became of them.

    python scripts/site_faults.py --faults 50 --seed 0 --out report.md
    python scripts/site_faults.py --faults 50 --seed 0 --only 7          # one run again
    python scripts/site_faults.py --faults 50 --seed 0 --flower 40       # over Flower; no run begins after 40 minutes

Coordinator and sites are processes of their own. Each run has one to three faults; its server, personal states, metrics
and decisions are compared, bit for bit, with a run in which nothing went wrong, but that a site that failed was absent
in the exchanges that it missed.

Over Flower the commands of operators are given. Sites are killed, ended, stopped, revoked and let in again, join, and
renew keys; lines are cut, certificates renewed, disks are full, clocks wrong, the coordinator is killed. A command that
ends early with one line is given again, and each run must end as the one in which nothing went wrong.

The exit status is 1 if any run differs, does not complete, or shows a traceback.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

import lit_fedad  # noqa: F401  (makes torchvision importable beside a CPU-only torch)

# The campaigns live beside the tests that play them.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.site_faults.campaign import Campaign, drawn, tabulated

say = partial(print, flush=True)
_OF_A_RUN = 12  # most faults of a run over Flower


def by_processes(folder: Path, faults: int, seed: int, only: int | None) -> tuple[str, bool]:
    """Returns the report of runs of plain processes, and whether any is wrong."""
    trials, began = [], time.perf_counter()
    campaign = Campaign(folder, seed)
    for number, kinds in enumerate(drawn(faults, seed)):
        if only in (None, number):
            trials.append(campaign.play(number, kinds))
            say(f"{time.perf_counter() - began:6.0f} s  {trials[-1]}")
    report = f"Seed {seed}, {len(trials)} runs.\n\n{tabulated(trials)}\n"
    return report, any(trial.wrong for trial in trials)


def over_flower(folder: Path, faults: int, seed: int, only: int | None, minutes: float) -> tuple[str, bool]:
    """Returns the report of runs over Flower, and whether any is wrong."""
    from helpers.site_faults.over_flower import Played, play

    runs: list[Played] = []
    end, number = time.monotonic() + 60 * minutes, only or 0
    while (left := faults - sum(len(run.fired) for run in runs)) > 0 and time.monotonic() < end:
        runs.append(play(folder / str(number), number, seed, min(left, _OF_A_RUN)))
        say(runs[-1], *(f"    {line}" for line in runs[-1].lines), sep="\n")
        number += 1
        if only is not None:
            break
    kinds = Counter(what.partition(":")[0] for run in runs for _, what in run.fired)
    report = f"Seed {seed}, {len(runs)} runs, {kinds.total()} faults: {dict(kinds)}"
    return report, any(bool(run.wrong) for run in runs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="faults in all runs together")
    parser.add_argument("--seed", type=int, default=0, help="what goes wrong, where and when")
    parser.add_argument("--only", type=int, help="one run, by its number")
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument(
        "--flower", type=float, metavar="MINUTES", help="over Flower; no run begins later than that"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as made:
        chosen = (Path(made), given.faults, given.seed, given.only)
        report, wrong = over_flower(*chosen, given.flower) if given.flower else by_processes(*chosen)
    say(report)
    if given.out:
        given.out.write_text(report)
    sys.exit(wrong)
