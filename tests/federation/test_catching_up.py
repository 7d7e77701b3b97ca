"""Clients that fail before round 1 catch up, and a run that was interrupted knows who has."""

from dataclasses import replace

import pytest

from lit_fedad.contracts import Exchange, Exchanges
from lit_fedad.federation.sampling import ClientSampler


class Prepare(Exchange):
    """A set-up exchange in which client 1 fails a number of times; whoever comes later receives its message then."""

    name, up, joining, discloses = "prepare", False, "play", ()

    def __init__(self, failures):
        self.failures = failures

    def send(self, client, loader):
        if client.context.client == 1 and self.failures > 0:
            self.failures -= 1
            raise RuntimeError("the disk is full")
        return {}


@pytest.fixture
def prepared(toy):
    """The tiny method with `Prepare` before round 1."""

    def make(failures, **parts):
        federation = toy({0: [1.0], 1: [2.0], 2: [3.0]}, sampler=ClientSampler(on_failure="skip"), **parts)
        exchanges = Exchanges((Prepare(failures),), federation.exchanges.rounds)
        federation.method = replace(federation.method, exchanges=exchanges)
        federation.exchanges = exchanges
        return federation

    return make


@pytest.mark.parametrize(("failures", "there"), [(1, [0, 1, 2]), (99, [0, 2])])
def test_a_complete_run_is_resumed_with_the_clients_that_it_ended_with(prepared, failures, there):
    """Decisions and figures of a run that was killed after its last round are those of the unbroken run."""
    unbroken = prepared(failures)
    unbroken.run()
    resumed = prepared(0)
    resumed.run()
    assert unbroken.clients == resumed.clients == there


def test_who_failed_before_round_1_is_not_scored_until_it_has_caught_up(prepared):
    federation = prepared(1, rounds=1)
    before, after = federation.run()
    assert list(before.metrics["w"]["visits"]) == [0, 2]
    assert list(after.metrics["w"]["visits"]) == [0, 1, 2]


def test_bytes_of_who_catches_up_count_for_the_exchange(prepared):
    federation = prepared(1, rounds=1)
    before = federation.run()[0]
    once = before.bytes_down[0]
    assert before.bytes_down == {0: once, 1: 2 * once, 2: once}
    assert once > 0
