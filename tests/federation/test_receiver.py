"""What the server does with what it receives: refused messages, merges that fail, clients that fail, spares."""

import pytest
import torch
from helpers.refusals import refusal
from safetensors.torch import save

from lit_fedad.contracts import SUM, Context, Exchange, Exchanges, TensorSpec, Update
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.client_names import NUMBERS
from lit_fedad.core.errors import UserError
from lit_fedad.federation.client_runner import Train
from lit_fedad.federation.loop import Federation
from lit_fedad.federation.sampling import ClientSampler

FIVE = {client: [1.0 + client] * 2 for client in range(5)}


def lying(federation: Federation, client: int, blob: bytes, round: int = 1) -> Federation:
    """Lets a client's bytes be forged after its own check, as on a wire."""
    play = federation.runner.play

    def forge(exchange, data, mask=None):
        result = play(exchange, data)
        if (federation.client.context.client, federation.client.context.round) == (client, round):
            result.blob = blob
        return result

    object.__setattr__(federation.runner, "play", forge)
    return federation


@pytest.mark.parametrize(
    ("blob", "cause"),
    [
        (b"garbage", "sent bytes that hold no message"),
        (save({"w": torch.tensor([float("nan")])}), "not finite"),
        (save({"w": torch.tensor([3e38])}), "values from 3e\\+38"),
        (save({"w": torch.zeros(2)}), "shape"),
        (save({"w": torch.zeros(1), "more": torch.zeros(1)}), "undeclared"),
        (save({"w": torch.tensor([1e5])}), "times as large as what is usual"),
    ],
)
def test_a_message_that_cannot_be_used_costs_its_client_the_round_and_no_more(toy, tmp_path, blob, cause):
    """Also where a client that fails would end the run: a message is not the fault of whoever runs the federation."""
    history = lying(toy(values=FIVE, rounds=2), 2, blob).run()
    assert list(history[0].refused) == [2]
    assert history[0].participants == [0, 1, 3, 4]
    assert history[0].lines(NUMBERS)[0].startswith("round 1: client 2 refused: ")
    assert pytest.importorskip("re").search(cause, history[0].lines(NUMBERS)[0])
    assert "\n" not in history[0].lines(NUMBERS)[0]
    assert history[1].participants == [0, 1, 2, 3, 4]
    others = toy(
        values=FIVE,
        rounds=1,
        fails={(1, 2)},
        sampler=ClientSampler(on_failure="skip"),
        folder=tmp_path / "skipped",
    )
    assert history[0].scalars["weight"] == others.run()[0].scalars["weight"]


def test_bytes_of_a_message_that_is_refused_were_sent(toy):
    report = lying(toy(values=FIVE, rounds=1), 2, b"garbage").run()[0]
    assert report.bytes_up == {
        **dict.fromkeys(range(5), len(save({"w": torch.zeros(1)}))),
        2: len(b"garbage"),
    }


def test_without_the_fewest_clients_a_refused_message_ends_the_run_in_one_line(toy):
    federation = lying(toy(sampler=ClientSampler(min_clients=2)), 1, b"garbage")
    with pytest.raises(UserError, match="1 clients finished, federation.sampler.min_clients=2.*client 1"):
        federation.run()


@pytest.mark.parametrize("alone", [True, False])
def test_a_merge_that_fails_is_laid_to_the_client_without_whom_it_succeeds(toy, monkeypatch, alone):
    """The method's own code may trip over a message of the declared form."""
    federation = toy(values=FIVE, rounds=2)
    aggregate = federation.server.aggregate

    def trips(updates):
        if 3 in updates and (alone or len(updates) > 1) and federation.server.context.round == 1:
            federation.server.w = torch.full((1,), torch.nan)  # half done
            raise IndexError("row 7 is out of range")
        aggregate(updates)

    monkeypatch.setattr(federation.server, "aggregate", trips)
    history = federation.run()
    assert history[0].refused == {3: "sent what cannot be merged (row 7 is out of range)"}
    assert history[0].participants == [0, 1, 2, 4]
    assert history[0].scalars["weight"] == pytest.approx(sum(torch.tensor([1.0, 2, 3, 5]) / 4 * 0.75))
    assert history[1].participants == [0, 1, 2, 3, 4]


def test_two_clients_that_each_break_the_merge_are_both_found(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=1)
    aggregate = federation.server.aggregate

    def trips(updates):
        if {1, 3} & set(updates):
            raise ValueError("no")
        aggregate(updates)

    monkeypatch.setattr(federation.server, "aggregate", trips)
    assert list(federation.run()[0].refused) == [1, 3]


def test_a_server_that_failed_half_way_is_as_before_when_single_clients_are_tried(toy, monkeypatch):
    """Otherwise what client 3 has left in it would be laid to client 0, and its work would be lost."""
    federation = toy(values=FIVE, rounds=1)
    server = federation.server

    def adding(updates):
        server.w = server.w + sum(update.message["w"] for update in updates.values()) + 200 * (3 in updates)
        if server.w > 100:
            raise ValueError("too large")

    monkeypatch.setattr(server, "aggregate", adding)
    assert list(federation.run()[0].refused) == [3]


@pytest.mark.parametrize("own", [False, True])
def test_a_message_after_which_the_server_cannot_send_costs_its_client_the_round(toy, monkeypatch, own):
    """Also where it cannot send to client 4 alone, whose message shares a tensor with those of all others."""
    federation = toy(values=FIVE, rounds=1)
    server, aggregate, zero = federation.server, federation.server.aggregate, torch.zeros(1)

    def spoilt(updates):
        aggregate(updates)
        if 3 in updates:
            server.w = -server.w if own else server.w * torch.nan

    spec = {"w": TensorSpec((1,)), "own": TensorSpec((1,))}
    monkeypatch.setattr(server, "aggregate", spoilt)
    monkeypatch.setattr(federation.client, "broadcast_spec", lambda: spec)
    monkeypatch.setattr(
        server, "broadcast", lambda client: {"w": server.w, "own": server.w.sqrt() if client == 4 else zero}
    )
    assert list(federation.run()[0].refused) == [3]


def test_a_sum_that_the_method_refuses_is_not_merged(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=1)

    def refuses(client, update):
        raise UserError(f"{client == SUM}: counts are below zero")

    monkeypatch.setattr(federation.server, "validate", refuses)
    total, exchanges = {SUM: Update({"w": torch.ones(1)}, 10, tuple(FIVE))}, federation.exchanges
    with refusal(
        r"round 1: the sum of the clients' messages cannot be merged.*\(True: counts are below zero"
    ):
        federation.receiver.merge(exchanges.rounds[0], total, list(FIVE), exchanges, Context(0, 1))
    assert federation.server.w == 0


def test_a_mistake_in_the_servers_code_is_no_clients_fault(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=1)

    def broken(updates):
        if updates:  # of no message at all it makes something, and this is not what is merged
            raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(federation.server, "aggregate", broken)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        federation.run()


@pytest.mark.parametrize("error", [HiddenByNoiseError(), UserError("training has diverged")])
def test_what_fails_under_noise_is_no_clients_fault_and_noise_is_drawn_once(toy, monkeypatch, error):
    """Merging without each client in turn would draw sums until one passes, and no epsilon would count them."""
    federation = toy(values=FIVE, rounds=1)
    monkeypatch.setattr(federation.exchanges.rounds[0], "noised", True)
    aggregate, drawn = federation.server.aggregate, list[int]()

    def hidden(updates):
        drawn.append(len(updates))
        if len(updates) == 5:
            raise error
        aggregate(updates)

    monkeypatch.setattr(federation.server, "aggregate", hidden)
    with pytest.raises(type(error), match="give more images or a larger epsilon|diverged"):
        federation.run()
    assert drawn == [5]


def test_a_state_that_cannot_be_sent_is_never_checkpointed(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=3)
    aggregate = federation.server.aggregate

    def poisoned(updates):
        aggregate(updates)
        if federation.server.context.round == 2:
            federation.server.w = federation.server.w * torch.nan

    monkeypatch.setattr(federation.server, "aggregate", poisoned)
    with pytest.raises(UserError, match="the server sent 'w' with values that are not finite"):
        federation.run()
    continued = toy(values=FIVE, rounds=3).run()
    assert [report.round for report in continued] == [1, 2, 3]
    assert all(torch.isfinite(torch.tensor(report.scalars["weight"])) for report in continued)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        IndexError("x"),
        TypeError("x"),
        AttributeError("x"),
        MemoryError("x"),
        AssertionError("x"),
    ],
)
def test_any_error_of_a_client_is_its_own_under_skip(toy, monkeypatch, error):
    federation = toy(values=FIVE, rounds=2, sampler=ClientSampler(on_failure="skip"))
    send = federation.client.send

    def fails(loader):
        if (federation.client.context.client, federation.client.context.round) == (4, 1):
            raise error
        return send(loader)

    monkeypatch.setattr(federation.client, "send", fails)
    history = federation.run()
    assert history[0].failures[4].startswith(type(error).__name__)
    assert history[1].participants == [0, 1, 2, 3, 4]


def test_a_mistake_in_a_clients_code_keeps_its_traceback_unless_skipped(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=1)
    monkeypatch.setattr(federation.client, "send", lambda loader: {}["w"])
    with pytest.raises(KeyError):
        federation.run()


def test_spares_take_the_place_of_sampled_clients_that_fail(toy):
    sampler = ClientSampler(fraction=0.4, on_failure="skip", min_clients=2)
    context = Context(0, 1)
    first, second = sampler.sample(range(5), context)
    spares = sampler.spares(range(5), context)
    assert sorted([first, second, *spares]) == [0, 1, 2, 3, 4]
    history = toy(values=FIVE, rounds=1, fails={(1, first), (1, spares[0])}, sampler=sampler).run()
    assert history[0].participants == sorted([second, spares[1]])
    assert list(history[0].failures) == [first, spares[0]]


def test_too_few_spares_leave_a_smaller_round(toy):
    sampler = ClientSampler(fraction=0.6, on_failure="skip", min_clients=1)
    fails = {(1, client) for client in range(4)}
    history = toy(values=FIVE, rounds=1, fails=fails, sampler=sampler).run()
    assert history[0].participants == [4]


def test_a_client_that_cannot_be_scored_is_left_out_of_the_evaluation(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=2, sampler=ClientSampler(on_failure="skip"))
    score = federation.evaluator.score

    def fails(client, number):
        if number == 1:
            raise OSError("image.png cannot be read")
        return score(client, number)

    monkeypatch.setattr(federation.evaluator, "score", fails)
    history = federation.run()
    assert history[-1].metrics["w"]["visits"].keys() == {0, 2, 3, 4}
    assert history[-1].lines(NUMBERS) == [
        "round 2: client 1 left out of the evaluation: OSError: image.png cannot be read"
    ]


def test_where_nobody_can_be_scored_one_line_says_why(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=1, sampler=ClientSampler(on_failure="skip"))
    monkeypatch.setattr(federation.evaluator, "score", lambda client, number: {}["x"])
    with pytest.raises(UserError, match="round 1: no client can be scored; client 0: KeyError"):
        federation.run()


def test_where_either_of_two_clients_could_be_at_fault_neither_is(toy, monkeypatch):
    federation = toy(values=FIVE, rounds=1)
    aggregate = federation.server.aggregate

    def trips(updates):
        if {1, 3} <= set(updates):
            raise UserError("they do not fit together")
        aggregate(updates)

    monkeypatch.setattr(federation.server, "aggregate", trips)
    with pytest.raises(UserError, match="they do not fit together"):
        federation.run()


@pytest.mark.parametrize("stop", [None, 1])
def test_a_client_that_could_not_be_scored_before_round_1_takes_part_in_it(toy, monkeypatch, stop):
    """Also where the run is continued: what a client fails in, set-up or evaluation, is told apart there."""

    def make(rounds):
        federation = toy(values=FIVE, rounds=rounds, sampler=ClientSampler(on_failure="skip"))
        federation.exchanges = Exchanges((Exchange(),), (Train(),))
        score = federation.evaluator.score

        def fails(client, number):
            if number == 1 and client.context.round == 1:
                raise OSError("image.png cannot be read")
            return score(client, number)

        monkeypatch.setattr(federation.evaluator, "score", fails)
        return federation

    if stop:
        make(stop).run()
    history = make(3).run()
    assert history[0].unscored == {1: "OSError: image.png cannot be read"}
    assert history[0].failures == {}
    assert [report.participants for report in history] == [[0, 1, 2, 3, 4]] * 4


def test_a_rule_that_leaves_nobody_ends_the_run_in_one_line(toy):
    federation = toy(values=FIVE, rounds=1, robust=lambda updates, spec, previous: ({}, [(0, "lies")]))
    with pytest.raises(UserError, match="^round 1: no message can be merged; client 0 lies$"):
        federation.run()


@pytest.mark.parametrize("cause", ["refused", "left out by a rule", "not chosen by a rule"])
def test_a_client_whose_message_was_not_used_goes_on_from_before(toy, cause):
    """It keeps no account of what the server does not have; who is merely not chosen is not distrusted."""

    def rule(updates, spec, previous):
        first = previous["w"].item() == 0
        kept = {client: update for client, update in updates.items() if client != 2 or not first}
        return kept, [(2, "lies; left out")] if first and cause == "left out by a rule" else []

    federation = toy(values=FIVE, rounds=2, robust=None if cause == "refused" else rule)
    if cause == "refused":
        lying(federation, 2, b"garbage")
    federation.run()
    missing = 0 if cause == "not chosen by a rule" else 1
    assert [federation.pool.get(client)["visits"] for client in range(5)] == [2, 2, 2 - missing, 2, 2]


def test_a_merge_that_changes_a_message_in_place_is_refused(toy):
    class Adding(type(toy().server)):
        merges_sums = True

        def aggregate(self, updates):
            total = updates[0].message["w"]
            for client in (1, 2, 3, 4):
                total += updates[client].message["w"]
            self.w = total / 5

    with pytest.raises(TypeError, match="Adding: merging changes 'w' of client 0's message in place"):
        toy(values=FIVE, server=Adding()).run()
