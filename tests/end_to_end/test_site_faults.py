"""Federations of sites with faults at random moments complete, with the digits of those that the faulty sites missed.

The whole campaign: ``python scripts/site_faults.py --faults 50``.
"""

from __future__ import annotations

import signal
from random import Random

import pytest
import torch
from helpers.site_faults.campaign import KINDS, Campaign, drawn
from helpers.site_faults.garbage import garbled

from lit_fedad.contracts import Context
from lit_fedad.contracts.message import spec_of
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Link, Plain
from lit_fedad.sites.messages import Reply

# Drawn anew by another seed; a failure names the run, which scripts/site_faults.py plays again.
SEED = 0
FAULTS = (
    ["coordinator killed", "site stopped for two rounds"],
    ["garbage in a reply", "site killed, back at once", "reply after the deadline"],
)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_a_federation_with_faults_ends_like_one_whose_faulty_sites_were_absent(tmp_path, number):
    trial = Campaign(tmp_path, SEED).play(number, list(FAULTS[number]))
    assert trial.wrong == [], str(trial)


def test_every_kind_of_fault_is_drawn_as_often():
    runs = drawn(50, SEED)
    assert {1, 2, 3} == {len(kinds) for kinds in runs}
    counts = [sum(kinds.count(kind) for kinds in runs) for kind in KINDS]
    assert sum(counts) == 50
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("trial", range(40))
def test_garbage_is_no_reply(trial):
    """Of the bytes that the campaign sends, none is a payload with a message that answers the request."""
    link, message = Link(Plain()), {"w": torch.ones(5, 7)}
    payload = link.pack(message, spec_of(message), Context(0, 1), "the client")
    honest = Reply(step=3, scalars={"loss": 0.5}, payload=payload)
    try:
        found = Reply.from_bytes(garbled(honest.to_bytes(), Random(trial)))
        if found.step == honest.step:
            link.unpack(found.payload, spec_of(message), "the client")
    except UserError:
        return
    assert found.step != honest.step
