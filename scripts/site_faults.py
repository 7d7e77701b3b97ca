"""Kills, stops, delays and garbles three sites and their coordinator at random moments, and reports what became of it.

    python scripts/site_faults.py --faults 50 --seed 0

Small federations of real site processes are played one after another until so many faults were done to them. Each must
end, by the same command; and it must end as one whose sites were absent where an order was lost: server, states of the
sites, metrics and calibration. The exit status is 1 if one does not.
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

import lit_fedad  # noqa: F401  (before torchvision, which it makes importable beside a CPU-only torch)

# The campaign lives beside the test that plays it.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.site_faults import KINDS, Campaign

say = partial(print, flush=True)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=50, help="number of faults, of all kinds in turns")
    parser.add_argument("--seed", type=int, default=0, help="which sites, which moments, which bytes")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = Campaign(Path(folder), given.seed, say).run(given.faults)
    say(f"seed {given.seed}: {sum(found.faults.values())} faults in {found.runs} federations")
    for kind in KINDS:
        say(f"  {kind}: {found.faults[kind]}")
    say(f"{found.orders} orders, {found.lost} lost for good, {found.refused} garbage replies")
    for cause, count in found.causes.items():
        say(f"the same command continued {count} times after: {cause}")
    say(
        f"{len(found.bad)} differences from federations without those sites, {time.perf_counter() - began:.0f} s"
    )
    for line in found.bad:
        say(f"  {line}")
    sys.exit(bool(found.bad))
