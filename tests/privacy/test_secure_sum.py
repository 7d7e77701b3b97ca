"""Secure aggregation in the round loop: sums are those of a plain run, drop-outs are recovered, no more is seen."""

import gc
import os
import types
from collections import Counter

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from safetensors.torch import load, save

from lit_fedad.contracts import SUM, Exchange, Sums, TensorSpec, Update, senders
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Channel, Half
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.privacy.protocol import Gathering
from lit_fedad.privacy.secure_aggregation import Parties, SecureSum, SumForm
from lit_fedad.robust.aggregation import RobustAggregation
from lit_fedad.robust.weights import NormClipping

VALUES = {0: [1.0, 3.0], 1: [5.0, 0.5, 2.0], 2: [7.0], 3: [-2.0, 4.0], 4: [0.25, 0.125, 8.0, 1.0]}
SKIP = ClientSampler(on_failure="skip")


@pytest.fixture
def summed(toy, toy_server, monkeypatch):
    """Builds the toy federation with secure sums."""

    monkeypatch.setattr(os, "fsync", lambda handle: None)  # else, waiting for the disk takes most of the time

    def make(values=None, **overrides):
        monkeypatch.setattr(toy_server, "merges_sums", True)
        return toy(values=values or VALUES, secure_sum=SecureSum(), **overrides)

    return make


def test_sums_are_those_of_the_plain_run(toy, summed, tmp_path):
    plain = toy(values=VALUES, folder=tmp_path / "plain").run()
    secure = summed(folder=tmp_path / "secure").run()
    for one, other in zip(plain, secure, strict=True):
        # The toy server of the plain run adds up in single precision.
        assert other.scalars["weight"] == pytest.approx(one.scalars["weight"], rel=1e-6)
        assert other.scalars["loss"] == pytest.approx(one.scalars["loss"], abs=1e-6)
        assert other.participants == one.participants
        assert other.elements_up == one.elements_up


def test_numbers_of_narrow_range_are_masked_in_32_bits(toy, summed, tmp_path, monkeypatch):
    plain = toy(values=VALUES, rounds=1, folder=tmp_path / "plain").run()[0]
    federation = summed(rounds=1, folder=tmp_path / "secure")
    spec = {"w": TensorSpec((1,), low=-8, high=8)}
    monkeypatch.setattr(type(federation.client), "upload_spec", lambda self: spec)
    widths, play = set(), federation.transport.play

    def watched(*args):
        outcome = play(*args)
        widths.update(load(result.blob)["w"].dtype for result in outcome.values.values())
        return outcome

    monkeypatch.setattr(federation.transport, "play", watched)
    assert federation.run()[0].scalars["weight"] == pytest.approx(plain.scalars["weight"], rel=1e-5)
    assert widths == {torch.int32}


def test_a_resumed_run_is_the_same_whatever_the_keys(summed, tmp_path):
    whole = summed(folder=tmp_path / "whole").run()
    summed(folder=tmp_path / "parts", rounds=2).run()
    assert [r.scalars for r in summed(folder=tmp_path / "parts").run()] == [r.scalars for r in whole]


@pytest.mark.parametrize("gone", [{2}, {0, 4}])
def test_clients_that_drop_out_after_their_offers_are_recovered(summed, toy, tmp_path, gone):
    fails = {(1, client) for client in gone}
    report = summed(fails=fails, sampler=SKIP, rounds=1, folder=tmp_path / "a").run()[0]
    left = {client: values for client, values in VALUES.items() if client not in gone}
    plain = toy(values=left, rounds=1, folder=tmp_path / "b").run()[0]
    assert report.participants == sorted(left)
    assert set(report.failures) == gone
    assert report.scalars["weight"] == pytest.approx(plain.scalars["weight"], rel=1e-6)


def test_with_three_of_five_gone_the_round_is_lost(summed):
    fails = {(2, 0), (2, 1), (2, 3)}
    with refusal("2 of 5 clients are left, and a secure sum needs 3: the round is lost") as lost:
        summed(fails=fails, sampler=SKIP).run()
    assert "the disk is full" in str(lost.value)


def test_the_policy_to_stop_at_the_first_failure_holds(summed):
    with pytest.raises(UserError, match="round 1, client 2: RuntimeError: the disk is full"):
        summed(fails={(1, 2)}).run()


@pytest.fixture
def lose_replies(monkeypatch):
    """Makes the replies of some clients to a step of the sum get lost."""
    confer = Parties.confer

    def lose(step, gone):
        def lost(self, now, client, blob):
            if now == step and client in gone:
                raise UserError("no reply came")
            return confer(self, now, client, blob)

        monkeypatch.setattr(Parties, "confer", lost)

    return lose


@pytest.mark.parametrize(
    ("step", "gone", "taken"), [("offer", {1, 2}, [0, 3, 4]), ("reveal", {1, 2}, [0, 1, 2, 3, 4])]
)
def test_clients_may_drop_out_of_every_step(summed, toy, tmp_path, lose_replies, step, gone, taken):
    lose_replies(step, gone)
    report = summed(sampler=SKIP, rounds=1, folder=tmp_path / "a").run()[0]
    # Shares of three are enough, and a masked sum that has arrived stays in the sum.
    assert report.participants == taken
    plain = toy(values={c: VALUES[c] for c in taken}, rounds=1, folder=tmp_path / "b").run()[0]
    assert report.scalars["weight"] == pytest.approx(plain.scalars["weight"], rel=1e-6)


@pytest.mark.parametrize(
    ("step", "gone", "sampler", "said"),
    [
        ("offer", {1}, ClientSampler(), "round 1, client 1: no reply came"),
        ("reveal", {1}, ClientSampler(), "round 1, client 1: no reply came"),
        (
            "offer",
            {1, 2, 3},
            SKIP,
            "2 of 5 clients take part, and a secure sum needs 3: the round is lost; .*",
        ),
        (
            "reveal",
            {1, 2, 3},
            SKIP,
            "2 of 5 clients have revealed shares, and .* needs 3: the round is lost; .*",
        ),
    ],
)
def test_lost_replies_end_the_round_as_the_policy_says(summed, lose_replies, step, gone, sampler, said):
    lose_replies(step, gone)
    with pytest.raises(UserError, match=said):
        summed(sampler=sampler, rounds=1).run()


def test_a_message_of_another_form_is_refused_and_left_out(summed, monkeypatch):
    federation = summed(sampler=SKIP, rounds=1)
    play = federation.transport.play

    def forged(*args):
        outcome = play(*args)
        outcome.values[3].blob = save({"w": torch.zeros(2, dtype=torch.int64)})
        return outcome

    monkeypatch.setattr(federation.transport, "play", forged)
    report = federation.run()[0]
    assert report.participants == [0, 1, 2, 4]
    assert "shape (2,), declared as (1)" in report.refused[3]


def test_an_offer_that_cannot_be_read_is_refused_and_named_and_three_others_are_enough(
    summed, tmp_path, monkeypatch
):
    values, confer = {client: VALUES[client] for client in range(4)}, Parties.confer
    monkeypatch.setattr(
        Parties, "confer", lambda self, *given: b"{}" if given[:2] == ("offer", 3) else confer(self, *given)
    )
    report = summed(values, sampler=SKIP, rounds=1, folder=tmp_path / "a").run()[0]
    assert report.participants == [0, 1, 2]
    assert "an offer to a secure sum, and cannot be read" in report.refused[3]
    monkeypatch.setattr(Parties, "confer", confer)
    three = summed({client: VALUES[client] for client in range(3)}, rounds=1, folder=tmp_path / "b").run()[0]
    assert three.scalars["weight"] == pytest.approx(report.scalars["weight"], rel=1e-6)


def test_every_message_of_a_sum_is_counted(summed, monkeypatch):
    """The invitation, the envelopes and the survivors on the way down; offer, summand and shares on the way up."""
    federation = summed(rounds=1)
    transport, down, up = federation.transport, Counter(), Counter()
    confer, play = transport.confer, transport.play

    def counted_confer(step, blobs):
        outcome = confer(step, blobs)
        down.update({client: len(blob) for client, blob in blobs.items()})
        up.update({client: len(blob) for client, blob in outcome.values.items()})
        return outcome

    def counted_play(sent, scored, envelopes):
        outcome = play(sent, scored, envelopes)
        for blobs in (sent.blobs, envelopes):
            down.update({client: len(blob) for client, blob in blobs.items()})
        up.update({client: len(result.blob) for client, result in outcome.values.items()})
        return outcome

    monkeypatch.setattr(transport, "confer", counted_confer)
    monkeypatch.setattr(transport, "play", counted_play)
    (report,) = federation.run()
    assert (report.bytes_down, report.bytes_up) == (down, up)


def test_a_summand_of_another_form_than_declared_is_not_masked(summed, monkeypatch):
    federation = summed(rounds=1)
    monkeypatch.setattr(federation.client, "send", lambda loader: {"v": torch.zeros(1)})
    with pytest.raises(
        UserError,
        match=r"client 0, client 1, .* client 4: the client sent \['v'\] undeclared and left out \['w'\]",
    ):
        federation.run()


def test_what_was_not_masked_by_the_agreed_keys_loses_the_round(summed, monkeypatch):
    federation = summed(rounds=1)
    monkeypatch.setattr(type(federation.client), "upload_spec", lambda self: {"w": TensorSpec((64,))})
    send = federation.client.send
    monkeypatch.setattr(federation.client, "send", lambda loader: {"w": send(loader)["w"].repeat(64)})
    play = federation.transport.play

    def forged(*args):
        outcome = play(*args)
        outcome.values[3].blob = save({"w": torch.full((64,), 2**40)})
        return outcome

    monkeypatch.setattr(federation.transport, "play", forged)
    # Without the masks that others share with it, 15 of 16 elements are beyond the bound, whatever was sent.
    with pytest.raises(UserError, match="the sum of 'w' is beyond 1e\\+09, which no clients' can be"):
        federation.run()


def test_what_needs_single_uploads_is_refused_before_anything_runs(summed):
    rules = RobustAggregation(weights=NormClipping())
    with pytest.raises(UserError, match="federation.robust judges them: give federation=secure"):
        summed(robust=rules)
    summed(robust=RobustAggregation())
    with pytest.raises(UserError, match=r"leave federation\.channel\.up out"):
        summed(channel=Channel(up=Half()))
    with pytest.raises(UserError, match="needs 3 clients, and 2 take part"):
        summed(values={0: [1.0], 1: [2.0]})


def test_methods_whose_uploads_are_no_sums_are_refused_before_anything_runs(toy, toy_server, monkeypatch):
    with pytest.raises(UserError, match="needs each message of exchange 'train', not their sum"):
        toy(values=VALUES, secure_sum=SecureSum())
    monkeypatch.setattr(toy_server, "merges_sums", True)

    class Median(toy_server):
        merges_sums = False

        def aggregate(self, updates):
            self.w = torch.stack([update.message["w"] for update in updates.values()]).median(0).values

    with pytest.raises(UserError, match="Median needs each message of exchange 'train', not their sum"):
        toy(values=VALUES, secure_sum=SecureSum(), server=Median())


def test_a_server_that_merges_in_another_way_says_whether_sums_suffice(toy_server):
    with pytest.raises(TypeError, match="Median overrides aggregate: say merges_sums"):

        class Median(toy_server):
            def aggregate(self, updates):
                """Merges in another way than its base."""


@pytest.mark.parametrize("sums", [None, Sums()])
def test_a_client_refuses_a_sum_of_messages_that_do_not_add_up(sums):
    exchange = Exchange()
    exchange.sums = sums
    with refusal("a sum of exchange 'answer', whose messages have none"):
        SumForm.of(exchange, None, None)


@pytest.mark.parametrize("quorum", [0.4, 1.0])
def test_a_quorum_of_no_majority_is_refused(quorum):
    with pytest.raises(UserError, match="quorum"):
        SecureSum(quorum)


def test_senders_are_those_of_single_messages_and_of_sums():
    update = Update({}, 3)
    assert senders({4: update, 2: update}) == [2, 4]
    assert senders({SUM: Update({}, 9, (1, 5))}) == [1, 5]


class _Watch:
    """Records what single clients send, and looks for it in all that the server's objects hold."""

    def __init__(self, federation):
        self.federation, self.single, self.found, self.looked = federation, {}, [], 0

    def sent(self, client, w, share):
        self.single[client] = {float(w), share * float(w), float(round(share * float(w) * 2**29))}

    def look(self, *more):
        """Walks all that can be reached from the server, its receivers and what it is just given."""
        federation = self.federation
        roots = [
            federation.server,
            federation.receiver,
            federation.summing,
            federation.collecting,
            federation.history,
            *more,
        ]
        hidden = {
            id(one) for one in (federation.client, federation.client.task, federation.transport, federation)
        }
        self.looked += 1
        for value in _numbers(roots, hidden):
            for client, own in self.single.items():
                if any(abs(value - number) < 1e-9 * max(1.0, abs(number)) for number in own):
                    self.found.append(client)


def _numbers(roots, hidden):
    """Yields every number in tensors, arrays and serialised messages that references lead to."""
    seen, left = set(hidden), list(roots)
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType, types.FunctionType, types.CodeType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield from one.detach().double().flatten().tolist()
        elif isinstance(one, np.ndarray):
            yield from one.astype(float).flatten().tolist()
            if one.dtype.kind == "u":
                yield from one.view(one.dtype.str.replace("u", "i")).astype(float).flatten().tolist()
        elif isinstance(one, bytes):
            try:
                left.append(load(one))
            except Exception:
                continue
        else:
            left += gc.get_referents(one)


@pytest.mark.parametrize("secure", [False, True])
def test_no_single_sum_is_ever_reachable_from_the_server(toy, summed, tmp_path, monkeypatch, secure):
    values = {c: [v + 0.01 * c for v in own] for c, own in VALUES.items()}
    build = summed if secure else toy
    federation = build(values=values, sampler=SKIP, fails={(2, 1)}, folder=tmp_path)
    watch = _Watch(federation)
    everyone = sum(len(own) for own in values.values())
    client, server, transport = federation.client, federation.server, federation.transport
    send, aggregate, play, broadcast = client.send, server.aggregate, transport.play, server.broadcast

    def watched_send(loader):
        message = send(loader)
        number = client.context.client
        watch.sent(number, message["w"], len(values[number]) / everyone)
        return message

    def watched_aggregate(updates):
        watch.look(updates)
        aggregate(updates)
        watch.look(updates)

    def watched_play(*args):
        outcome = play(*args)
        watch.look(outcome)
        return outcome

    def watched_broadcast(number):
        watch.look()
        return broadcast(number)

    monkeypatch.setattr(client, "send", watched_send)
    monkeypatch.setattr(server, "aggregate", watched_aggregate)
    monkeypatch.setattr(transport, "play", watched_play)
    monkeypatch.setattr(server, "broadcast", watched_broadcast)
    if secure:

        class WatchedGathering(Gathering):
            def add(self, *given):
                watch.look(given)
                super().add(*given)
                watch.look(given)

            def unmask(self, *given):
                watch.look(given)
                found = super().unmask(*given)
                watch.look(given)
                return found

        monkeypatch.setattr("lit_fedad.privacy.secure_aggregation.Gathering", WatchedGathering)
    federation.run()
    assert watch.looked > 10
    # The plain run is the control: there the walk does find every client.
    assert set(watch.found) == (set() if secure else set(values))
