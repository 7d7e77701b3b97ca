"""The server's end of the way to sites, against carriers that lose, forge and repeat."""

import json
import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import save

from lit_fedad.contracts import Context, Exchange, TensorSpec
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import sha256
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.evaluator import ClientQuery, LocalQuery
from lit_fedad.federation.transport import Pose, Sent
from lit_fedad.sites.messages import Reply, Request, digest
from lit_fedad.sites.refusals import Code, text_of
from lit_fedad.sites.remote import NoReply, Sites
from lit_fedad.sites.status import Contact

CONTEXT = Context(seed=0, round=2, exchange=1)


class Script:
    """A carrier whose replies are written down; keeps the requests."""

    def __init__(self, *replies):
        self.replies, self.requests, self.most = list(replies), [], []

    def carry(self, requests, most):
        self.most.append(most)
        self.requests.append({client: Request.from_bytes(blob) for client, blob in requests.items()})
        for client, found in self.replies.pop(0).items():
            step = self.requests[-1][client].step
            yield client, replace(found, step=step).to_bytes() if isinstance(found, Reply) else found


class Count(ClientQuery[int]):
    name = "decisions"
    numbers = {"at": 0.5}

    def spec(self):
        return {"n": TensorSpec((1,), torch.int64, low=0, high=9)}

    def unpack(self, message):
        return int(message["n"])


def sites(*replies):
    carrier = Script(*replies)
    asked, fabric = Request("hello", "0" * 16, ["method=fedavg"], 0), Fabric(accelerator="cpu", devices=1)
    return Sites(carrier, asked, ["north", "east"], fabric, defaultdict(Contact)), carrier


def good(payload=b"", **values):
    return Reply(payload=payload, **values)


def counted(number):
    return good(Channel().up.pack({"n": torch.tensor([number])}, Count().spec(), CONTEXT, "a site"))


def checkpoint(transport, folder):
    """A complete checkpoint of a transport."""
    folder = folder / "round_100001"
    folder.mkdir()
    transport.save(folder, None)
    (folder / "server.pt").write_bytes(b"")
    files = {path.name: sha256(path) for path in folder.iterdir()}
    (folder / "meta.json").write_text(json.dumps({"round": 1, "identity": "", "images": "", "files": files}))
    return folder


def test_a_site_starts_from_what_the_server_took_in():
    lost = {0: good(b"a"), 1: NoReply("did not answer within 5 seconds")}
    transport, carrier = sites(lost, {0: good(b"b"), 1: good(b"c", scalars={"loss": 2.0})})
    first = transport.play(Sent(Exchange(), CONTEXT, {0: b"x", 1: b"y"}), ())
    transport.settle(first.values)
    assert {c: result.blob for c, result in first.values.items()} == {0: b"a"}
    assert first.failures == {1: "did not answer within 5 seconds"}
    second = transport.play(Sent(Exchange(), replace(CONTEXT, round=3), {0: b"x", 1: b"y"}), ())
    transport.settle({1})
    assert second.values[1].scalars == {"loss": 2.0}
    assert [(o[0].step, o[0].base, o[1].base) for o in carrier.requests] == [(1, 0, 0), (2, 1, 0)]
    assert transport.bases == {0: 1, 1: 2}
    request = carrier.requests[0][1]
    assert (request.kind, request.round, request.exchange, request.payload) == ("play", 2, 1, b"y")


def test_clients_of_two_calls_in_one_exchange_have_each_their_step():
    transport, _ = sites({0: good()}, {1: good()})
    transport.play(Sent(Exchange(), CONTEXT, {0: b"x"}), ())
    transport.play(Sent(Exchange(), CONTEXT, {1: b"x"}), ())
    transport.settle({0, 1})
    assert transport.bases == {0: 1, 1: 2}


def test_a_site_that_is_away_costs_a_round_one_timeout(tmp_path):
    """It gets no more requests until the next round, even if the coordinator is started again in between."""
    lost, long = {0: counted(1), 1: NoReply("gone")}, {0: good(), 1: NoReply("too long", away=False)}
    transport, carrier = sites(long, lost, {0: counted(2)}, {0: counted(3)}, {0: good(), 1: good()})
    everyone, after = {0: b"x", 1: b"y"}, Context(seed=0, round=3)
    transport.play(Sent(Exchange(), CONTEXT, everyone), ())
    first = transport.ask(Count(), Sent(Exchange(), after, everyone), Pose(2))
    second = transport.ask(Count(), Sent(Exchange(), after, everyone), Pose(2))
    assert (first.failures, first.values) == ({1: "gone"}, {0: 1})
    assert (second.failures, second.values) == ({1: "gone"}, {0: 2})

    again, _ = sites()
    again.carrier = carrier
    again.restore(checkpoint(transport, tmp_path))
    assert again.ask(Count(), Sent(Exchange(), after, everyone), Pose(2)).values == {0: 3}
    assert set(again.play(Sent(Exchange(), after, everyone), ()).values) == {0, 1}
    assert [sorted(requests) for requests in carrier.requests] == [[0, 1], [0, 1], [0], [0], [0, 1]]


def test_a_site_that_is_away_is_asked_in_no_other_exchange_of_the_round():
    transport, carrier = sites({1: NoReply("gone")}, {1: good()})
    later = replace(CONTEXT, exchange=2)
    for context in (CONTEXT, later):
        outcome = transport.play(Sent(Exchange(), context, {1: b"y"}), ())
        assert outcome.failures == {1: "gone"}
    assert len(carrier.requests) == 1
    assert transport.play(Sent(Exchange(), replace(CONTEXT, round=3), {1: b"y"}), ()).failures == {}


def test_a_site_that_was_away_before_round_1_is_asked_to_catch_up_with_the_same_exchange(tmp_path):
    transport, _ = sites({1: NoReply("gone")}, {1: good()})
    sent = Sent(Exchange(), replace(CONTEXT, round=0), {1: b"y"})
    assert transport.play(sent, ()).failures == {1: "gone"}
    checkpoint(transport, tmp_path)
    assert transport.play(sent, ()).failures == {}


def test_a_site_that_does_not_say_who_it_is_may_answer_later():
    transport, _ = sites({0: NoReply("did not connect")}, {0: counted(2)})
    assert transport.hello([0]).failures == {0: "did not connect"}
    assert transport.ask(Count(), Sent(Exchange(), CONTEXT, {0: b"x"}), Pose(1)).values == {0: 2}


def test_masked_messages_come_with_their_envelopes_each_time():
    """Replies that are masked may be four times as long."""
    transport, carrier = sites({0: good()}, {0: good()}, {0: good()})
    transport.largest = lambda exchange: 1000
    for envelopes in (None, {0: b"keys"}, {0: b"keys"}):
        transport.play(Sent(Exchange(), CONTEXT, {0: b"x"}), (), envelopes)
    assert [(requests[0].sealed, requests[0].payload) for requests in carrier.requests] == [
        (0, b"x"),
        (4, b"keysx"),
        (4, b"keysx"),
    ]
    assert [most - carrier.most[0] for most in carrier.most] == [0, 3000, 3000]


def test_a_site_that_answers_is_noted_as_seen(tmp_path):
    transport, _ = sites({0: good(), 1: NoReply("gone")})
    transport.play(Sent(Exchange(), CONTEXT, {0: b"x", 1: b"y"}), ())
    seen = transport.contacts[0].last_seen
    assert seen is not None
    assert transport.contacts[1].last_seen is None
    folder = checkpoint(transport, tmp_path)
    again, _ = sites()
    again.contacts[1].last_seen = 7.0  # since it was started again
    again.restore(folder)
    assert [again.contacts[client].last_seen for client in (0, 1)] == [seen, 7.0]


@pytest.mark.parametrize(
    ("forged", "cause"),
    [
        (b"garbage", "the site sent bytes that hold no message"),
        (good(b"garbage"), "the client sent bytes that hold no message"),
        (Reply(code=Code.FAILED, numbers=[7.0]), "failed; entry 7 of its log"),
        (Reply(step=7).to_bytes(), "answered request 7 instead of 1"),
    ],
)
def test_a_site_that_answers_nonsense_has_failed(forged, cause):
    transport, carrier = sites({0: counted(3), 1: forged})
    outcome = transport.ask(Count(), Sent(Exchange(), CONTEXT, {0: b"", 1: b""}), Pose(1, keep=True))
    assert outcome.values == {0: 3}
    assert outcome.failures[1].startswith(cause)
    assert transport.bases == {0: 1, 1: 0}
    request = carrier.requests[0][0]
    assert (request.kind, request.question, request.numbers, request.keep) == (
        "ask",
        "decisions",
        {"at": 0.5},
        True,
    )


def test_an_answer_out_of_its_form_is_refused():
    transport, _ = sites({0: good(torch_bytes(12)), 1: counted(0)})
    outcome = transport.ask(Count(), Sent(Exchange(), CONTEXT, {0: b"", 1: b""}), Pose(1))
    assert outcome.values == {1: 0}
    assert outcome.failures == {0: "the client sent 'n' with values from 12 to 12, declared from 0 to 9"}
    assert transport.bases == {0: 0, 1: 0}


def torch_bytes(number):
    return save({"n": torch.tensor([number])})


def test_a_message_is_sent_once():
    """It is sent again if it changes, if the site has failed, or if the site has not kept it."""
    away = {0: good(), 1: NoReply("gone")}
    replies = [
        {0: good(), 1: good()},
        away,
        {0: good(), 1: good()},
        {0: Reply(code=Code.AGAIN), 1: good()},
        {0: good()},
    ]
    transport, carrier = sites(*replies, {0: good(), 1: good()})
    for round, blob in enumerate((b"x", b"x", b"x", b"x", b"y")):
        outcome = transport.play(Sent(Exchange(), replace(CONTEXT, round=round), {0: blob, 1: blob}), ())
        transport.settle(outcome.values)
        assert 0 in outcome.values
    sent = [
        {c: request.payload or request.same for c, request in requests.items()}
        for requests in carrier.requests
    ]
    same = digest(b"x")
    assert sent == [
        {0: b"x", 1: b"x"},
        {0: same, 1: same},
        {0: same, 1: b"x"},
        {0: same, 1: same},
        {0: b"x"},
        {0: b"y", 1: b"y"},
    ]
    assert [requests[0].step for requests in carrier.requests] == [1, 2, 3, 4, 4, 5]
    assert transport.bases == {0: 5, 1: 5}


def test_a_site_that_never_keeps_a_message_has_failed():
    transport, carrier = sites({0: good()}, {0: Reply(code=Code.AGAIN)}, {0: Reply(code=Code.AGAIN)})
    transport.play(Sent(Exchange(), CONTEXT, {0: b"x"}), ())
    assert transport.play(Sent(Exchange(), CONTEXT, {0: b"x"}), ()).failures == {0: text_of(Code.AGAIN, [])}
    assert len(carrier.requests) == 3


@pytest.mark.parametrize("code", [Code.AGAIN, Code.STATE])
@pytest.mark.parametrize("blob", [b"x", b"y"])
def test_a_site_that_refuses_for_another_reason_is_not_asked_twice(code, blob):
    """Only a site that has not kept a message is asked again, with the message."""
    refuses = {0: Reply(code=code, numbers=[1.0])}
    transport, carrier = sites({0: good()}, refuses, refuses)
    transport.play(Sent(Exchange(), CONTEXT, {0: b"x"}), ())
    assert set(transport.play(Sent(Exchange(), CONTEXT, {0: blob}), ()).failures) == {0}
    assert len(carrier.requests) == (3 if (code, blob) == (Code.AGAIN, b"x") else 2)


def test_a_reply_that_is_too_long_is_not_read(monkeypatch):
    transport, _ = sites({0: good(b"x" * 100), 1: good(b"x" * 101)})
    transport.largest = lambda exchange: 100
    monkeypatch.setattr("lit_fedad.sites.remote.LONGEST_START", len(replace(good(), step=1).to_bytes()))
    outcome = transport.play(Sent(Exchange(), CONTEXT, {0: b"", 1: b""}), ())
    transport.settle({0, 1})
    assert list(outcome.values) == [0]
    assert re.fullmatch(r"sent \d+, more than \d+ bytes, the most that a reply may have", outcome.failures[1])
    assert transport.bases == {0: 1, 1: 0}


def test_what_cannot_cross_is_refused_before_anything_is_sent():
    transport, carrier = sites()

    def closure(client, number):
        return 1

    with pytest.raises(UserError, match="closure: sites answer queries of a declared form alone"):
        transport.ask(LocalQuery("closure", closure), Sent(Exchange(), CONTEXT, {0: b""}), Pose(1))
    with pytest.raises(UserError, match="with the model that predicts there"):
        transport.ask(Count(), Sent(Exchange(), CONTEXT, {0: b""}), Pose(1, "server"))
    with pytest.raises(UserError, match="with the model that predicts there"):
        transport.ask(Count(), Sent(Exchange(), CONTEXT, {0: b""}), Pose(1, lent={"w": torch.zeros(1)}))
    with pytest.raises(UserError, match="not scored right after training"):
        transport.play(Sent(Exchange(), CONTEXT, {0: b""}), {0})
    assert carrier.requests == []


def test_a_checkpoint_holds_steps(tmp_path):
    reply = {0: good(), 1: good()}
    transport, _ = sites(reply, reply)
    transport.play(Sent(Exchange(), CONTEXT, {0: b"", 1: b""}), ())
    transport.settle({0, 1})
    folder = checkpoint(transport, tmp_path)
    assert transport.settled == {0: 1, 1: 1}
    again, carrier = sites({0: good()})
    again.restore(folder)
    again.play(Sent(Exchange(), CONTEXT, {0: b""}), ())
    assert (carrier.requests[0][0].step, carrier.requests[0][0].base, carrier.requests[0][0].settled) == (
        2,
        1,
        1,
    )
