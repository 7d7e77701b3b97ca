"""The round loop on a method small enough to play by hand."""

from contextlib import nullcontext

import pytest
import torch
from helpers.toy_federation import by_hand
from safetensors.torch import save

from lit_fedad.contracts import Predictors
from lit_fedad.core.client_names import NUMBERS, ClientNames
from lit_fedad.core.errors import UserError
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.federation.sampling import ClientSampler


def test_golden_numbers(toy):
    history = toy().run()
    assert [r.scalars["weight"] for r in history] == pytest.approx(by_hand(3), rel=1e-6)
    assert history[0].scalars["loss"] == pytest.approx((1 * 0.5 + 3 * (8 + 2 + 0.5) / 3) / 4)


def test_identical_clients_are_one_client(toy, tmp_path):
    many = toy(values={c: [2.0, 2.0] for c in range(4)}, folder=tmp_path / "many").run()
    one = toy(values={0: [2.0, 2.0]}, folder=tmp_path / "one").run()
    assert [r.scalars["weight"] for r in many] == [r.scalars["weight"] for r in one]


def test_client_order_does_not_matter(toy, tmp_path):
    values = {0: [1.0, 3.0], 1: [5.0, 0.5, 2.0], 2: [7.0]}
    forward = toy(values=values, folder=tmp_path / "a").run()
    backward = toy(values=dict(reversed(values.items())), folder=tmp_path / "b").run()
    assert [r.scalars for r in forward] == [r.scalars for r in backward]


def test_a_round_that_the_privacy_budget_does_not_pay_for_is_not_begun(toy):
    """A run that is resumed counts what it has released before."""

    class Two:
        def released_in(self, exchanges, client):
            return len(exchanges)

        def check(self, releases, what):
            if releases > 2:
                raise UserError(f"{what} would be sum {releases}")

    for rounds in (1, 3):
        federation = toy(rounds=rounds)
        federation.plan = Two()
        with pytest.raises(UserError, match="round 3 would be sum 3") if rounds > 1 else nullcontext():
            federation.run()
    assert [report.noised_sums for report in federation.history] == [1, 1]


def test_a_client_without_data_has_no_effect(toy, tmp_path):
    values = {0: [1.0], 1: [4.0, 4.0, 4.0]}
    with_empty = toy(values={**values, 2: []}, folder=tmp_path / "a").run()
    without = toy(values=values, folder=tmp_path / "b").run()
    assert [r.scalars for r in with_empty] == [r.scalars for r in without]


def test_resumed_equals_uninterrupted(toy, tmp_path):
    values = {0: [1.0, 3.0], 1: [5.0, 0.5, 2.0], 2: [7.0, 1.0]}
    settings = {"values": values, "sampler": ClientSampler(fraction=0.67)}
    whole = toy(folder=tmp_path / "whole", rounds=6, **settings).run()
    for stop in range(1, 6):
        history = toy(folder=tmp_path / "parts", rounds=stop, **settings).run()
    history = toy(folder=tmp_path / "parts", rounds=6, **settings).run()
    assert [r.scalars for r in history] == [r.scalars for r in whole]
    assert history[-1].metrics == whole[-1].metrics  # personal states too: visits of each client


def test_a_checkpoint_half_written_is_ignored(toy, tmp_path):
    toy(rounds=2).run()
    partial = tmp_path / "checkpoints" / ".partial_100003"
    partial.mkdir()
    (partial / "server.pt").write_bytes(b"half")
    assert [r.round for r in toy(rounds=3).run()] == [1, 2, 3]


def test_another_configuration_is_refused(toy, tmp_path):
    toy(rounds=1).run()
    federation = toy(rounds=2)
    federation.checkpoints.identity = "other"
    with pytest.raises(UserError, match=f"{tmp_path}.*another configuration"):
        federation.run()


def test_a_failing_client_stops_the_run_in_one_line(toy):
    with pytest.raises(UserError, match=r"^round 2, client 1: RuntimeError: the disk is full$"):
        toy(fails={(2, 1)}).run()


def test_a_site_that_fails_is_named(toy):
    names = ClientNames({0: "north", 1: "east"})
    with pytest.raises(UserError, match=r"^round 2, site east: RuntimeError: the disk is full$"):
        toy(fails={(2, 1)}, names=names).run()
    few = ClientSampler(on_failure="skip", min_clients=2)
    with pytest.raises(UserError, match=r"min_clients=\d; .*site east: RuntimeError"):
        toy(fails={(2, 1)}, names=names, sampler=few).run()


def test_a_failing_client_is_left_out(toy):
    history = toy(fails={(2, 1)}, sampler=ClientSampler(on_failure="skip")).run()
    first = by_hand(1)[0]
    assert history[1].participants == [0]
    assert history[1].scalars["weight"] == pytest.approx(first + 0.5 * (1 - first))
    assert history[1].lines(NUMBERS) == ["round 2: client 1 left out: RuntimeError: the disk is full"]


def test_too_few_clients_left(toy):
    with pytest.raises(UserError, match="1 clients finished, .*min_clients=2.*client 1"):
        toy(fails={(1, 1)}, sampler=ClientSampler(on_failure="skip", min_clients=2)).run()


def test_a_non_finite_update_names_client_and_tensor(toy):
    federation = toy()
    send = federation.client.send
    federation.client.send = lambda loader: {
        "w": send(loader)["w"] / (0 if federation.client.context.client == 1 else 1)
    }
    with pytest.raises(UserError, match="round 1, client 1.*'w'.*not finite"):
        federation.run()


def test_a_loss_that_is_not_finite_names_the_client(toy):
    with pytest.raises(UserError, match="round 1, client 1: the loss is not finite"):
        toy(values={0: [1.0], 1: [float("nan")]}).run()


def test_bytes_are_those_of_the_serialised_messages(toy):

    report = toy(rounds=1).run()[0]
    size = len(save({"w": torch.zeros(1)}))
    assert report.bytes_up == {0: size, 1: size} == report.bytes_down
    assert report.elements_up == {0: 1, 1: 1}


def test_evaluation_rounds(toy):
    history = toy(rounds=5, evaluate_every=2).run()
    assert [r.round for r in history if r.metrics] == [2, 4, 5]


def test_nothing_to_play_is_refused_at_once(toy):
    with pytest.raises(UserError, match="rounds=0: this method does nothing before round 1"):
        toy(rounds=0)


def test_a_model_that_round_1_alone_makes_takes_a_round(toy, monkeypatch):
    federation = toy()
    # There is nothing to predict with.
    monkeypatch.setattr(type(federation.server), "broadcast", lambda self, client: {})
    federation.rounds = 0
    with pytest.raises(
        UserError, match="^rounds=0: this method has no model before round 1; give at least 1$"
    ):
        federation.evaluate(0)


def test_any_client_answers_for_a_server_s_model_that_is_the_same_for_all(toy, monkeypatch):
    federation = toy(sampler=ClientSampler(on_failure="skip"))
    federation.run()
    monkeypatch.setattr(type(federation.client), "predictors", Predictors(server_shared=True))

    def answer(client, number):
        if number == 0:
            raise RuntimeError("out of memory")
        return number

    assert federation.ask(3, LocalQuery("number", answer), [0], "server") == {1: 1}
    with pytest.raises(UserError, match="no client can be scored; client 0"):
        federation.ask(3, LocalQuery("number", answer), [0])


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_a_client_that_cannot_take_its_message_over_has_failed(toy, monkeypatch, policy):
    federation = toy(sampler=ClientSampler(on_failure=policy))
    whole = type(federation.client).receive

    def receive(self, message):
        if (self.context.round, self.context.client) == (2, 1):
            raise RuntimeError("does not fit")
        whole(self, message)

    monkeypatch.setattr(type(federation.client), "receive", receive)
    if policy == "fail":
        with pytest.raises(UserError, match="^round 1, client 1: RuntimeError: does not fit$"):
            federation.run()  # the message of round 2 comes with the question after round 1
    else:
        reports = federation.run()
        assert [[*report.failures] for report in reports] == [[], [1], []]
        assert [[*report.unscored] for report in reports] == [[1], [], []]
