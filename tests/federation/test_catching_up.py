"""Clients that fail before round 1 catch up, and a run that was interrupted knows who has."""

from dataclasses import replace

import pytest
import torch

from lit_fedad.contracts import Exchange, Exchanges
from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler


class Prepare(Exchange):
    """A set-up exchange in which client 1 fails a number of times; whoever comes later receives its message then."""

    name, joining, discloses = "prepare", "play", ()

    def __init__(self, failures, up=False, weight=0.0):
        self.failures, self.up, self.weight, self.prepared = failures, up, weight, []

    def send(self, client, loader):
        if client.context.client == 1 and self.failures > 0:
            self.failures -= 1
            raise RuntimeError("the disk is full")
        self.prepared.append(client.context.client)
        return {"w": torch.full((1,), self.weight)} if self.up else {}

    def validate(self, server, client_id, update):
        if client_id == 1 and self.weight:
            raise UserError("its weight cannot be that of images")

    def aggregate(self, server, updates):
        pass


@pytest.fixture
def prepared(toy):
    """The tiny method with `Prepare` before round 1."""

    def make(*setup, **parts):
        federation = toy({0: [1.0], 1: [2.0], 2: [3.0]}, sampler=ClientSampler(on_failure="skip"), **parts)
        setup = [one if isinstance(one, Prepare) else Prepare(one) for one in setup]
        exchanges = Exchanges(tuple(setup), federation.exchanges.rounds)
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
    before = prepared(Prepare(1, up=True), rounds=1).run()[0]
    once = before.bytes_down[0]
    assert before.bytes_down == {0: once, 1: 2 * once, 2: once}
    assert before.bytes_up == dict.fromkeys(range(3), before.bytes_up[0])
    assert min(once, before.bytes_up[0]) > 0


def test_who_cannot_catch_up_with_one_exchange_is_not_asked_for_the_next(prepared):
    first, second = Prepare(99), Prepare(0)
    prepared(first, second, rounds=2).run()
    assert first.prepared == second.prepared == [0, 2]


def test_who_sent_what_was_refused_before_round_1_is_not_asked_for_it_again(prepared):
    setup = Prepare(0, up=True, weight=5.0)
    before, *_ = prepared(setup, rounds=2).run()
    assert list(before.refused) == [1]
    assert setup.prepared == [0, 1, 2]
