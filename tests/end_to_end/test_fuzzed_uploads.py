"""Forged uploads of every method: refused, or at least harmless to the run; and honest ones are never refused.

The whole campaign: ``python scripts/fuzz_uploads.py --trials 10000``.
"""

from __future__ import annotations

import pytest
from helpers.fuzz import campaign
from helpers.nightly import by_method

# Drawn anew by another seed; a failure names the trial, which scripts/fuzz_uploads.py plays again.
SEED, TRIALS = 0, 8
PLAYS = campaign.plays(False)
QUICK = ("fedavg", "classifier", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize(
    ("method", "task", "variant"),
    [QUICK, *by_method([play for play in PLAYS if play != QUICK], pytest.mark.slow)],
)
def test_a_forged_upload_neither_crashes_nor_poisons_nor_stops_later_rounds(folder, method, task, variant):
    stage = campaign.stage(method, task, variant, folder)
    found = [campaign.play(stage, number, SEED) for number in range(TRIALS)]
    assert campaign.bad(found) == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "task", "variant"), by_method(PLAYS))
def test_what_clients_of_one_and_two_images_send_is_never_refused(folder, method, task, variant):
    if method in ("centralised", "nearest_neighbour"):
        pytest.skip("one client holds all images")
    own = campaign.skewed(method, task, SEED, folder)
    recording = campaign.stage(method, task, variant, folder, *own).recording
    assert recording.refused == []
    assert recording.far == []
