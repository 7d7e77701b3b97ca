"""Plays federations of sites with faults at random moments, and reports what became of them.

    python scripts/site_faults.py --faults 50 --seed 0 --out report.md
    python scripts/site_faults.py --faults 50 --seed 0 --only 7          # one run again

Coordinator and sites are processes of their own. Each run has one to three faults; its server, personal states, metrics
and decisions are compared, bit for bit, with a run in which nothing went wrong, but that a site that failed was absent
in the exchanges that it missed. The exit status is 1 if any run differs or does not complete.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import lit_fedad  # noqa: F401  (makes torchvision importable beside a CPU-only torch)

# The campaign lives beside the tests that play it.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.site_faults.campaign import Campaign, drawn, tabulated

say = partial(print, flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="faults in all runs together")
    parser.add_argument("--seed", type=int, default=0, help="what goes wrong, where and when")
    parser.add_argument("--only", type=int, help="one run, by its number")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    trials, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), given.seed)
        for number, kinds in enumerate(drawn(given.faults, given.seed)):
            if given.only in (None, number):
                trials.append(campaign.play(number, kinds))
                say(f"{time.perf_counter() - began:6.0f} s  {trials[-1]}")
    report = f"Seed {given.seed}, {len(trials)} runs.\n\n{tabulated(trials)}\n"
    say(report)
    if given.out:
        given.out.write_text(report)
    sys.exit(any(trial.wrong for trial in trials))
