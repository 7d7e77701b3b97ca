"""FedGen: its losses by hand, and what crosses."""

import numpy as np
import pytest
import torch
from helpers.feddm import data_of, loader, make
from torch.nn import functional as F

from lit_fedad.contracts import Context, Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedgen import (
    COUNTS,
    GENERATOR,
    FeatureGenerator,
    FedGenClient,
    FedGenServer,
    diversity,
    generator_loss,
)

SMALL = {"noise": 4, "hidden": 6, "generated": 3}


def client_of(round: int = 2, **settings) -> FedGenClient:
    torch.manual_seed(0)
    client = FedGenClient(make(), **{**SMALL, **settings})
    client.context = Context(0, round, 0)
    client.task.augment = False
    client.auxiliary[COUNTS] = torch.tensor([4, 0, 2])
    client.on_train_start()
    client.on_train_epoch_start()
    return client


def test_the_client_s_loss_by_hand():
    client = client_of(round=3, weight=2.0, batch_size=5).eval()
    batch = next(iter(loader([0, 1, 2, 1])))  # a short batch: its teacher counts no more for it
    torch.manual_seed(5)
    found = client.training_step(batch)
    torch.manual_seed(5)
    asked = torch.tensor([0, 2])[torch.randint(2, (3,))]
    with torch.no_grad():
        head = client.task.classifier
        teacher = F.nll_loss(head(client.generator(asked)).log_softmax(1), asked)
        q = head(client.generator(batch["label"])).softmax(1).numpy()
        p = head(client.task(batch)).softmax(1).numpy()
        plain = client.task.training_step(batch)["loss"].item()
    latent = (q * np.log(q / p)).sum(1).mean()
    expected = plain + 2 * 0.98**2 * (3 / 5 * teacher.item() + latent)
    assert found["loss"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("round", "epochs", "uses"), [(1, 1, False), (2, 1, True), (2, 20, True), (2, 21, False)]
)
def test_generated_features_are_used_from_round_two_in_twenty_epochs_of_a_round(round, epochs, uses):
    client = client_of(round)
    for _ in range(epochs - 1):
        client.on_train_epoch_start()
    batch = next(iter(loader([0, 1, 2, 1])))
    assert ("teacher" in client.training_step(batch)) == uses


def test_the_received_generator_is_loaded_and_keeps_its_running_statistics():
    server = FedGenServer(client_of(), steps=2, batch_size=4)
    server.context = Context(0, 1)
    client = client_of()
    server.aggregate({0: Update({**client.shared_state(), COUNTS: torch.tensor([1, 2, 0])}, 3)})
    client.receive(server.broadcast(0))
    client.on_train_start()
    client.on_train_epoch_start()
    client.training_step(next(iter(loader([0, 1, 2, 1]))))
    for name, entry in client.generator.state_dict().items():
        torch.testing.assert_close(entry, server.generator[name], rtol=0, atol=0)


def test_the_server_s_losses_by_hand():
    features, labels = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
    shares = torch.tensor([[0.75, 0.0], [0.25, 1.0]])
    heads = [(torch.eye(2), torch.zeros(2)), (torch.ones(2, 2), torch.tensor([1.0, 0.0]))]

    def nll(logits, label):
        return -logits[label] + np.log(np.exp(logits).sum())

    first = 0.75 * nll(np.array([1.0, 0.0]), 0) / 2
    second = (0.25 * nll(np.array([2.0, 1.0]), 0) + 1.0 * nll(np.array([3.0, 2.0]), 1)) / 2
    assert generator_loss(features, labels, shares, heads).item() == pytest.approx(first + second, rel=1e-6)
    noise = torch.tensor([[0.0, 0.0], [1.0, 0.5]])
    # Mean squares .625 and mean absolute differences 1.5, of two of the four pairs.
    assert diversity(noise, features).item() == pytest.approx(np.exp(-0.5 * 0.625 * 1.5), rel=1e-6)


def test_the_generator_s_steps_go_on_from_round_to_round_at_a_rate_that_falls():
    client = client_of()
    server = FedGenServer(client, steps=1, batch_size=4, learning_rate=0.1, weight_decay=0.02, diversity=3.0)
    hand = FeatureGenerator(3, client.task.num_features, SMALL["noise"], SMALL["hidden"])
    hand.load_state_dict(server.generator)
    adam = torch.optim.Adam(hand.parameters(), weight_decay=0.02)
    update = Update({**client.shared_state(), COUNTS: torch.tensor([1, 2, 0])}, 3)
    for round in (2, 3):
        server.context = Context(0, round)
        server.aggregate({0: update})
        with server.context.seeded("generator"):
            FeatureGenerator(3, client.task.num_features, SMALL["noise"], SMALL["hidden"])  # draws too
            labels, noise = torch.randint(2, (4,)), torch.rand(4, SMALL["noise"])
        features = hand(labels, noise)
        distances = torch.cdist(noise, noise).square() / SMALL["noise"]
        apart = torch.cdist(features, features, p=1) / client.task.num_features
        adam.param_groups[0]["lr"] = 0.1 * 0.98 ** (round - 1)
        adam.zero_grad()
        spread = 3 * (-(distances * apart).mean()).exp()
        (F.cross_entropy(client.task.classifier(features), labels) + spread).backward()
        adam.step()
        pairs = [(server.auxiliary[GENERATOR + name], weight) for name, weight in hand.named_parameters()]
        # In the mean: rounding decides where a weight whose gradient is almost 0 goes.
        assert torch.cat([(one - other).abs().flatten() for one, other in pairs]).mean() < 1e-4


def test_without_a_step_the_generator_stays():
    server = FedGenServer(client_of(), steps=0)
    server.context, before = Context(0, 1), server.generator
    server.learn(torch.tensor([[3, 1, 0]]), [(torch.zeros(3, 5), torch.zeros(3))])
    assert server.generator is before


def test_there_is_nothing_to_learn_from_the_generator_before_round_two(federate, exactly):
    ours = federate(FedGenClient, FedGenServer, task=make(), data=data_of(), client=SMALL, rounds=1)
    plain = federate(FedAvgClient, task=make(), data=data_of(), rounds=1)
    exactly(ours.server.weights, plain.server.weights)


def test_shares_are_of_counts_that_begin_at_one(monkeypatch):
    """The released code counts 1 + images seen in all epochs; classes with one image are asked for."""
    server, asked = FedGenServer(client_of(local_epochs=2), steps=40, batch_size=8), []

    def spy(features, labels, shares, heads):
        asked.append((labels.unique().tolist(), shares))
        return features.sum() * 0

    monkeypatch.setattr("lit_fedad.methods.fedgen.generator_loss", spy)
    server.context = Context(0, 1)
    server.learn(torch.tensor([[3, 1, 0], [0, 0, 0]]), [(torch.zeros(3, 5), torch.zeros(3))] * 2)
    expected = [[7 / 8, 3 / 4, 1 / 2], [1 / 8, 1 / 4, 1 / 2]]
    np.testing.assert_allclose(asked[0][1], expected, rtol=1e-6)
    assert {label for labels, _ in asked for label in labels} == {0, 1}


def test_classes_of_clients_that_take_no_part_now_are_still_drawn():
    """The released code draws from the classes of all clients, whoever was selected."""
    client = client_of()
    server = FedGenServer(client, steps=1, batch_size=4)
    for number, counts in enumerate([[3, 0, 0], [0, 2, 0]], start=1):
        server.context = Context(0, number)
        server.aggregate({0: Update({**client.shared_state(), COUNTS: torch.tensor(counts)}, 3)})
    assert server.auxiliary[COUNTS].tolist() == [3, 2, 0]


def test_the_generator_goes_down_and_counts_go_up(federate, tap):
    played = federate(
        FedGenClient, FedGenServer, task=make(), data=data_of(), client=SMALL, rounds=2, channel=tap
    )
    assert played.server.auxiliary[COUNTS].tolist() == [3, 3, 3]
    up, down = played.client.upload_spec(), played.client.broadcast_spec()
    assert COUNTS in up
    assert not any(name.startswith(GENERATOR) for name in up)
    # The bytes of Table 10: model and G down.
    size = sum(entry.numel() for entry in played.server.generator.values())
    last = played.history[-1]
    assert all(last.bytes_down[client] - last.bytes_up[client] > 4 * size for client in (0, 1))
    assert {name for name in down if name.startswith(GENERATOR)} == {
        f"{GENERATOR}{n}" for n in played.server.generator
    }


def test_counts_of_other_images_are_refused():
    server = FedGenServer(client_of())
    with pytest.raises(UserError, match="counts 7 images of its 6"):
        server.validate(0, Update({COUNTS: torch.tensor([4, 2, 1])}, 6))
