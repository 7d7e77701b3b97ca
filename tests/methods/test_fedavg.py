"""FedAvg: the average by hand, what is averaged besides weights, and a bank that follows the weights."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from safetensors.torch import save

from lit_fedad.contracts import Task
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError
from lit_fedad.methods.dbe import DBEClient
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.local import LocalClient
from lit_fedad.methods.moon import MoonClient
from lit_fedad.tasks.simplenet import SimpleNet
from lit_fedad.tasks.slot_distances import HingeLoss


def fedavg_by_hand(hand, data: Mapping, rounds: int, epochs: int = 1, step: float = 0.1) -> np.ndarray:
    """``W = sum_n z_n W_n`` of clients that run plain gradient descent (McMahan et al., Algorithm 1)."""
    sizes = {client: len(loader.dataset) for client, loader in data.items()}
    shared = hand.start
    for _ in range(rounds):
        mean = np.zeros_like(shared)
        for client, loader in data.items():
            theta = shared
            for _ in range(epochs):
                for x, y in hand.batches(loader):
                    theta = theta - step * hand.gradient(theta, x, y)
            mean += sizes[client] / sum(sizes.values()) * theta
        shared = mean
    return shared


# ------------------------------------------------------------------------------------------ by hand


def test_three_rounds_by_hand(federate, make_linear, points_by_hand, hand):
    played = federate(FedAvgClient, task=make_linear(), data=points_by_hand)
    theta = hand.theta(played.server.weights)
    # In double precision; sums of another order leave the last bits open.
    np.testing.assert_allclose(theta, fedavg_by_hand(hand, points_by_hand, 3), rtol=1e-13)
    golden = [[0.2969450285, -0.810130998875, 0.213583318625], [0.60652038525, 1.952257162, -0.33248683675]]
    np.testing.assert_allclose(theta, golden, rtol=1e-13)  # exact: worked out in fractions


def test_epochs_are_passes_over_the_data(federate, make_linear, points_by_hand, hand):
    played = federate(FedAvgClient, task=make_linear(), data=points_by_hand, client={"local_epochs": 3})
    expected = fedavg_by_hand(hand, points_by_hand, rounds=3, epochs=3)
    np.testing.assert_allclose(hand.theta(played.server.weights), expected, rtol=1e-13)


def test_loss_of_a_round_is_the_mean_over_images(federate, make_linear, make_points, hand):
    data = {0: make_points(3, batch_size=3), 1: make_points(5, seed=1, batch_size=5)}
    report = federate(FedAvgClient, task=make_linear(), data=data, rounds=1).history[0]
    squares = [((x @ hand.start.T - y) ** 2).sum(1) for c in (0, 1) for x, y in hand.batches(data[c])]
    assert report.scalars["loss"] == pytest.approx(np.concatenate(squares).mean() / 2, rel=1e-12)


def test_one_client_is_plain_training_with_a_new_optimiser_each_round(
    federate, make_classifier, make_points, exactly
):
    played = federate(FedAvgClient, task=make_classifier(), data={0: make_points(6)})
    task = make_classifier().train()
    for _ in range(3):
        optimizer = torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9)
        for batch in make_points(6):
            optimizer.zero_grad()
            task.training_step(batch)["loss"].backward()
            optimizer.step()
    exactly(played.server.weights, dict(learned_state(task)))


@pytest.mark.parametrize("kind", [FedAvgClient, MoonClient, DBEClient])
def test_a_task_of_which_no_weight_trains_is_refused(kind, make_classifier):
    """Rounds would share nothing, or what the method adds alone; a memory bank without a head is such a task."""
    task = make_classifier().requires_grad_(False)
    with pytest.raises(UserError, match=r"task \w+ has no weights to share as it is set; give it a head"):
        kind(task)
    assert not LocalClient(task).shared_state()


def test_a_task_that_trains_nothing_names_the_methods_that_fit_it():
    own = type("Own", (Task,), {"trains": False, "methods": "own_sums or local"})
    with pytest.raises(UserError, match="^task Own has no weights to share; give METHOD=own_sums or local$"):
        FedAvgClient.check_task(own)


# ------------------------------------------------------------------------------- running statistics


def test_running_statistics_are_averaged_by_data_size(federate, make_classifier, make_points, tap):
    data = {0: make_points(6), 1: make_points(2, seed=1)}
    played = federate(FedAvgClient, task=make_classifier(), data=data, channel=tap)
    sent = tap.uploads(3)
    for name in ("downsample.1.running_mean", "downsample.1.running_var"):
        one, other = (sent[c][name].double().numpy() for c in (0, 1))
        expected = (0.75 * one + 0.25 * other).astype(np.float32)
        assert not np.allclose(one, other)
        np.testing.assert_array_equal(played.server.weights[name].numpy(), expected)


def test_the_count_of_batches_is_the_largest_clients(federate, make_classifier, make_points):
    data = {0: make_points(4, batch_size=2), 1: make_points(6, seed=1, batch_size=6)}
    played = federate(FedAvgClient, task=make_classifier(), data=data)
    assert played.server.weights["downsample.1.num_batches_tracked"].item() == 3 * 1


def test_local_running_statistics_stay_and_survive(federate, make_classifier, make_points, tap):
    data = {0: make_points(4, batch_size=2), 1: make_points(6, seed=1, batch_size=6)}
    settings = {"aggregate_buffers": "local"}
    played = federate(FedAvgClient, task=make_classifier(), data=data, client=settings, channel=tap)
    buffers = {f"downsample.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert tap.names == set(learned_state(make_classifier())) - buffers
    own = {client: played.pool.get(client)["own_entries"] for client in (0, 1)}
    assert set(own[0]) == buffers
    assert [own[c]["downsample.1.num_batches_tracked"].item() for c in (0, 1)] == [3 * 2, 3 * 1]
    for client, state in played.history[-1].metrics.items():
        assert all(torch.equal(state[name], own[client][name]) for name in buffers)
    assert not torch.equal(own[0]["downsample.1.running_mean"], own[1]["downsample.1.running_mean"])


# ------------------------------------------------------------------------------------ what crosses


def test_bytes_are_those_of_the_weights_both_ways(federate, make_classifier, make_points):
    data = {0: make_points(4), 1: make_points(6, seed=1)}
    played = federate(FedAvgClient, task=make_classifier(), data=data)
    size = len(save(dict(learned_state(make_classifier()))))
    for report in played.history:
        assert report.bytes_up == report.bytes_down == {0: size, 1: size}


def test_nothing_crosses_while_clients_prepare(federate, make_task, make_loader):
    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    prepare = federate(FedAvgClient, task=make_task(), data=data, rounds=1).history[0]
    assert (prepare.round, prepare.exchange) == (0, "prepare")
    assert prepare.bytes_up == prepare.bytes_down == {0: 0, 1: 0}


def test_what_is_made_from_local_data_never_crosses(federate, make_task, make_loader, tap):
    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    task = make_task(loss=HingeLoss("median", neighbours=2))
    played = federate(FedAvgClient, task=task, data=data, channel=tap)
    assert tap.names == {name for name in task.state_dict() if name.startswith("head.")}
    own = [played.pool.get(client)["own_entries"] for client in (0, 1)]
    assert set(own[0]) == set(task.local_buffers)
    for name in ("memory", "radii", "threshold"):
        assert not torch.equal(own[0][name], own[1][name])


@pytest.mark.parametrize(("client", "one_model"), [(FedAvgClient, True), (LocalClient, False)])
def test_clients_whose_statistics_alone_are_no_weights_predict_with_one_model(client, one_model):
    """The server pools them; a client alone computes its own."""
    task = SimpleNet(TinyPyramid(), grid=4, image_size=32, hidden=6)
    assert client(task).predictors.shared is one_model


def test_standardised_features_are_those_of_all_clients_data(federate, make_task, make_loader, tap):
    """Channel moments are sent for it once, before everything else; what they pool to comes with all messages since."""
    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    task = make_task(standardise=True, shrinkage=0.0)
    played = federate(FedAvgClient, task=task, data=data, channel=tap)
    with torch.no_grad():
        patches = [task.embed(batch) for loader in data.values() for batch in loader]
    patches = torch.cat([maps.flatten(0, 1) for maps in patches]).double()
    for client in data:
        own = played.pool.get(client)["own_entries"]
        torch.testing.assert_close(own["mean"], patches.mean(0).float())
        torch.testing.assert_close(own["scale"], patches.std(0, correction=0).float() + 1e-5)
    head = {name for name in task.state_dict() if name.startswith("head.")}
    crossed = [(round, client is None, set(message)) for round, client, message in tap.sent]
    up, down = {"count", "mean", "variance"}, {"mean", "scale"}
    assert [report.exchange for report in played.history] == ["statistics", "prepare", *["train"] * 3]
    assert all(names == (set() if server else up) for round, server, names in crossed if round == -1)
    assert all(names == (down if server else set()) for round, server, names in crossed if round == 0)
    assert all(names == head | (down if server else set()) for round, server, names in crossed if round > 0)


def test_a_bank_that_slips_into_a_message_is_refused(federate, make_task, make_loader):
    class Leaking(FedAvgClient):
        discloses = (TRAINED_WEIGHTS,)

        def send(self, loader):
            return {**super().send(loader), "memory": self.task.memory}

    with pytest.raises(UserError, match=r"round 1, client 0: .*'memory'.*undeclared"):
        federate(Leaking, task=make_task(), data={0: make_loader(5)})


# ------------------------------------------------------------------------ banks follow the weights


def test_nothing_of_old_weights_remains_in_the_bank_of_a_client_that_was_absent(
    federate, make_task, make_loader
):
    """A bank of one slot is the mean of the client's features, and its radius their mean distance from it.

    A bank that moved by 1/(t+1) in the rounds of its client would hold features of the initial weights for ever.
    """

    def task():
        return make_task(slots=1, loss=HingeLoss(neighbours=1), learning_rate=0.05).eval()

    data = {client: make_loader(4, seed=client) for client in range(3)}
    played = federate(FedAvgClient, task=task(), data=data, rounds=4, fraction=0.34)
    assert all(len(report.participants) == 1 for report in played.history[1:])
    averaged = task()
    with torch.no_grad():
        first = {c: torch.cat([averaged(batch).flatten(0, 1) for batch in data[c]]).mean(0) for c in data}
        averaged.load_state_dict(played.server.weights, strict=False)
        for client, loader in data.items():
            features = torch.cat([averaged(batch).flatten(0, 1) for batch in loader]).double()
            mean = features.mean(0)
            assert (mean - first[client]).norm() > 0.1  # the weights have moved visibly
            scores = played.history[-1].metrics[client]
            torch.testing.assert_close(scores["memory"][0].double(), mean, rtol=1e-4, atol=1e-5)
            radius = (features - mean).square().sum(1).mean().sqrt()
            torch.testing.assert_close(scores["radii"][0].double(), radius, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("trains", "rounds"), [(True, [1, 2, 3]), (False, [3])])
def test_a_bank_is_renewed_where_it_is_used(federate, make_task, make_loader, monkeypatch, trains, rounds):
    """Rounds 0 and 3 are scored: of a bank that training does not use, that of round 3 alone is renewed."""
    task, renewed = make_task(), []
    refresh = task.refresh

    def watched(loader, context, first=False):
        renewed.extend([] if first else [context.round])
        refresh(loader, context, first)

    monkeypatch.setattr(task, "refresh", watched)
    monkeypatch.setattr(task, "trains_on_bank", trains)
    federate(FedAvgClient, task=task, data={0: make_loader(5)}, rounds=3, evaluate_every=3)
    assert renewed == rounds


def test_a_client_trains_against_the_bank_that_it_was_scored_with(federate, make_task, make_loader):
    banks: list = []

    class Watching(FedAvgClient):
        def on_train_start(self):
            banks.append((self.context.round, self.context.client, self.task.memory.clone()))

    data = {0: make_loader(5), 1: make_loader(3, seed=1)}
    played = federate(Watching, task=make_task(), data=data)
    assert len(banks) == 6
    for round, client, memory in banks:
        assert torch.equal(memory, played.history[round - 1].metrics[client]["memory"])


# ---------------------------------------------------------------------------------- who predicts alike


def test_where_nothing_is_personal_one_client_is_scored_for_all(federate, make_classifier, make_points):
    asked: list[int] = []
    data = {client: make_points(4, seed=client) for client in range(3)}
    played = federate(
        FedAvgClient, task=make_classifier(), data=data, question=lambda _, number: asked.append(number)
    )
    assert played.client.predictors.shared
    assert asked == [0, 0, 0]


def test_clients_scored_as_one_do_predict_alike(federate, make_classifier, make_points, exactly):
    data = {client: make_points(4, seed=client) for client in range(3)}
    played = federate(FedAvgClient, task=make_classifier(), data=data)
    answers = played.ask(3, played.evaluator)
    assert sorted(answers) == [0, 1, 2]
    for answer in answers.values():
        exactly(answer, answers[0])


def test_clients_with_banks_or_statistics_of_their_own_are_scored_each(make_classifier, make_task):
    assert not FedAvgClient(make_task()).predictors.shared
    assert not FedAvgClient(make_classifier(), aggregate_buffers="local").predictors.shared


@pytest.mark.parametrize("kind", ["linear", "bank"])
def test_diverged_training_says_so_in_one_line(
    federate, make_task, make_linear, make_points, make_loader, kind
):
    """Of a linear layer, and of the head whose grid is sampled where the features say."""
    if kind == "linear":
        task, data = make_linear(learning_rate=1e300), {0: make_points(4), 1: make_points(4)}
    else:
        task, data = make_task(learning_rate=1e30), {0: make_loader(4), 1: make_loader(4)}
    with pytest.raises(UserError, match="client 0.*diverged.*ower the learning rate"):
        federate(FedAvgClient, task=task, data=data, rounds=3)
