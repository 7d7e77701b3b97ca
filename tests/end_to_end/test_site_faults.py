"""Sites and a coordinator that are killed, stopped, late or garbled, in processes of their own.

The whole campaign: ``python scripts/site_faults.py --faults 50``.
"""

import random

import pytest
from helpers.site_faults import KINDS, Campaign, garbage

from lit_fedad.errors import UserError
from lit_fedad.sites.letters import Reply


@pytest.mark.slow
def test_every_federation_ends_as_if_the_faulty_site_had_been_absent(tmp_path):
    found = Campaign(tmp_path).run(len(KINDS))
    assert found.bad == []
    assert found.faults == dict.fromkeys(KINDS, 1)


def test_noise_and_pieces_of_a_reply_are_no_reply():
    """Of a reply without a message: with one, its numbers are turned into none, which the channel refuses."""
    reply = Reply(scalars={"loss": 1.0}).to_bytes()
    for number in range(50):
        with pytest.raises(UserError, match="the site (sent bytes that hold no letter|has another version)"):
            Reply.from_bytes(garbage(random.Random(number), reply))
