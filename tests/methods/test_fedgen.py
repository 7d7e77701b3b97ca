"""FedGen: its losses by hand, and what crosses."""

import numpy as np
import pytest
import torch
from helpers.feddm import loader, make
from torch.nn import functional as F

from lit_fedad.contracts import Context, Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedgen import (
    COUNTS,
    GENERATOR,
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


def data_of():
    return {0: loader([0, 0, 0, 1, 1]), 1: loader([1, 2, 2, 2], seed=1)}


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
