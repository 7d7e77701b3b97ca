"""Plays federations over Flower with faults at random moments, by the commands that operators give.

    python scripts/flower_faults.py --faults 50 --seed 0 --minutes 40

Sites are killed, ended, stopped, revoked and let in again, join, and renew keys; lines are cut, certificates renewed,
disks are full, clocks wrong, the coordinator is killed. Where the command ends early with one line, it is given again.
What a run ends with is compared, bit for bit, with a run in which nothing went wrong. The exit status is 1 if any
differs, does not complete, or shows a traceback.
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

# The campaign lives beside the tests that play it.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.site_faults.over_flower import Played, play

say = partial(print, flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="faults in all runs together")
    parser.add_argument("--of-run", type=int, default=12, help="most faults of one run")
    parser.add_argument("--seed", type=int, default=0, help="what goes wrong, where and when")
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--minutes", type=float, default=40.0, help="no run begins later than that")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    runs: list[Played] = []
    end, number = time.monotonic() + 60 * given.minutes, given.first
    while (left := given.faults - sum(len(run.fired) for run in runs)) > 0 and time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(play(Path(folder), number, given.seed, min(left, given.of_run)))
        say(runs[-1], *(f"    {line}" for line in runs[-1].lines), sep="\n")
        number += 1
    kinds = Counter(what.partition(":")[0] for run in runs for _, what in run.fired)
    say(f"seed {given.seed}, {len(runs)} runs, {kinds.total()} faults: {dict(kinds)}")
    sys.exit(any(bool(run.wrong) for run in runs))
