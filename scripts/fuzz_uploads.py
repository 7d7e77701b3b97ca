"""Forges messages of clients, of all methods and exchanges, and reports what became of them.

    python scripts/fuzz_uploads.py --trials 10000 --seed 0 --out report.md
    python scripts/fuzz_uploads.py --only "fedavg, classifier" --number 30      # one trial again

Small honest runs are recorded; each trial forges one client's message of one exchange, lets the server open and merge
it beside the honest ones, compares its state with that of the honest run, and plays the next honest turn and messages.
The exit status is 1 if any trial crashed, poisoned, or left a state that honest rounds cannot use.
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

# The campaign lives beside the tests that play it.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.fuzz import campaign

say = partial(print, flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10_000, help="trials of all methods together")
    parser.add_argument("--seed", type=int, default=0, help="what is forged")
    parser.add_argument("--only", help="a part of the name of method, task and variant")
    parser.add_argument("--number", type=int, help="one trial of each, by its number")
    parser.add_argument("--out", type=Path, help="Markdown file for the table")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found, began = [], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        every = [name for name in campaign.plays(True) if (given.only or "") in ", ".join(filter(None, name))]
        each = -(-given.trials // len(every))
        for method, task, variant in every:
            stage = campaign.stage(method, task, variant, Path(folder))
            numbers = range(each) if given.number is None else [given.number]
            own = [campaign.play(stage, number, given.seed) for number in numbers]
            say(f"{time.perf_counter() - began:6.0f} s  {stage.recording.name}: {len(own)} trials")
            for line in campaign.bad(own):
                say(f"          {line}")
            found += own
    report = f"Seed {given.seed}, {len(found)} trials.\n\n{campaign.tabulated(found)}\n"
    say(report)
    if given.out:
        given.out.write_text(report)
    sys.exit(bool(campaign.bad(found)))
