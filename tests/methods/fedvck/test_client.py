"""FedVCK's client: its message, condensation by hand, and selection of images."""

import math

import numpy as np
import pytest
import torch
from helpers.feddm import mean, std
from helpers.fedvck import CLIENT, FABRIC, features, logits_of, make, nearly, piles_of
from scipy.special import expit, log_softmax
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context
from lit_fedad.methods.fedvck import PROTOTYPES, SIZES, FedVCKClient
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES


@pytest.fixture
def watched():
    """A condensation of a few steps, and the list of what each call of it was given as chances of images."""
    seen = []

    class Watched(Condensation):
        def __call__(self, start, counts, real, weights, *others):
            seen.append(weights)
            return super().__call__(start, counts, real, weights, *others)

    return Watched(2, 4), seen


# ---------------------------------------------------------------------------------------------------- what crosses


def test_images_and_prototypes_go_up_and_weights_come_down(fedvck, data, tap):
    federation = fedvck(channel=tap, rounds=1, client={"share": 0.7})
    weights = make().state_dict()
    assert all(message.keys() == weights.keys() for _, client, message in tap.sent if client is None)
    for client, (classes, sizes) in {0: ([0, 1], [3, 5]), 1: ([1, 2, 3], [2, 6, 3])}.items():
        message = tap.uploads(1)[client]
        assert message.keys() == {IMAGES, CLASSES, COUNTS, PROTOTYPES, SIZES}
        assert message[IMAGES].dtype == torch.uint8
        assert message[CLASSES].tolist() == classes
        assert message[SIZES].tolist() == sizes
        assert message[COUNTS].tolist() == [max(3, math.ceil(0.7 * size)) for size in sizes]
        assert message[IMAGES].shape == (int(message[COUNTS].sum()), 3, 8, 8)
        assert message[PROTOTYPES].dtype == torch.float32
        piles = piles_of(data[client], classes)
        by_hand = np.stack([logits_of(weights, pile).mean(0) for pile in piles])
        np.testing.assert_allclose(message[PROTOTYPES].numpy(), by_hand, rtol=1e-4, atol=1e-5)
    assert federation.history[0].scalars["images"] == 3 + 4 + 3 + 5 + 3


def test_means_of_few_images_stay_with_the_client(fedvck, tap):
    """Client 1 has 2, 6 and 3 images of three classes."""
    federation = fedvck(channel=tap, rounds=1, client={"prototype_images": 3})
    message = tap.uploads(1)[1]
    assert message[CLASSES].tolist() == [1, 2, 3]
    assert message[SIZES].tolist() == [0, 6, 3]
    assert not message[PROTOTYPES][0].any()
    assert message[PROTOTYPES][1:].any(1).all()
    # Of class 1, client 0's mean over five images is all that the server knows.
    torch.testing.assert_close(federation.server.prototypes[1], tap.uploads(1)[0][PROTOTYPES][1])


def test_ranks_alone_say_who_is_confused_with_whom(fedvck, data, tap):
    fedvck(channel=tap, rounds=1, client={"ranks": True})
    weights = make().state_dict()
    message = tap.uploads(1)[0]
    by_hand = [logits_of(weights, pile).mean(0) for pile in piles_of(data[0], [0, 1])]
    expected = [[sorted(row.tolist()).index(value) for value in row.tolist()] for row in by_hand]
    assert message[PROTOTYPES].tolist() == expected


@pytest.mark.parametrize("constraints", ["batch", "running", "own"])
def test_a_client_by_hand(fedvck, data, tap, constraints):
    """Three steps in double precision, on four images of each class that are drawn by importance."""
    steps, rate, momentum, alpha, bias = 3, 0.4, 0.5, 0.3, 0.2
    settings = {"constraints": constraints, "alpha": alpha, "bias": bias, "quantize": False}
    condensation = Condensation(steps, rate, momentum, batch=4, augment=False)
    federation = fedvck(client={**settings, "condensation": condensation}, rounds=1, channel=tap)

    weights = {name: entry.double() for name, entry in make().state_dict().items()}
    piles = piles_of(data[0], (0, 1))
    chances = [
        torch.from_numpy(expit(-log_softmax(logits_of(make().state_dict(), pile), 1)[:, c] - bias)).float()
        for c, pile in enumerate(piles)
    ]
    generator = Context(seed=0, round=1, client=0).generator("condensation")
    images, velocity, losses = torch.randn(6, 3, 8, 8, generator=generator).double(), 0.0, []
    running = [weights["encoder.norm.running_mean"], weights["encoder.norm.running_var"]]
    for _ in range(steps):
        drawn = [torch.multinomial(c, 4, True, generator=generator) for c in chances]
        batch = torch.cat([pile[rows] for pile, rows in zip(piles, drawn, strict=True)]).double()
        images.requires_grad_()
        real, synthetic = (F.conv2d(x, weights["encoder.mix.weight"], stride=2) for x in (batch, images))
        of_real = real.mean((0, 2, 3)), real.var((0, 2, 3), unbiased=False)
        unbiased = of_real[0], real.var((0, 2, 3))
        running = [0.9 * old + 0.1 * new for old, new in zip(running, unbiased, strict=True)]
        of_synthetic = {
            "batch": of_real,
            "running": running,
            "own": (synthetic.mean((0, 2, 3)), synthetic.var((0, 2, 3), unbiased=False)),
        }[constraints]
        target, found = features(weights, real, *of_real), features(weights, synthetic, *of_synthetic)
        loss = sum(
            ((target[4 * c : 4 * c + 4].mean(0) - found[3 * c : 3 * c + 3].mean(0)) ** 2).sum()
            for c in (0, 1)
        )
        (gradient,) = torch.autograd.grad(loss, images)
        velocity = momentum * velocity + gradient
        images = (images - rate * velocity).detach()
        losses.append(float(loss.detach()))

    nearly(tap.uploads(1)[0][IMAGES], (images * std + mean).float())
    told = federation.history[0].per_client[0]
    assert told == pytest.approx({"loss": sum(losses) / steps, "last_loss": losses[-1]}, rel=1e-4)


@pytest.mark.parametrize("constraints", ["batch", "running", "own"])
def test_condensation_leaves_the_received_model_as_it_is(data, exactly, constraints):
    task = make()
    client = FedVCKClient(task, **CLIENT, constraints=constraints)
    client.context = Context(0, 1, 0)
    client.eval()
    client.condense(data[0], FABRIC)
    exactly({**task.state_dict()}, {**make().state_dict()})
    assert not any(module.training for module in task.modules())
    assert all(p.requires_grad and p.grad is None for p in task.parameters())


@pytest.mark.parametrize("kernel", ["polynomial", "gaussian", "laplace"])
def test_another_kernel_gives_other_images(fedvck, tap, kernel):
    fedvck(rounds=1, channel=tap, client={"kernel": kernel})
    other = tap.uploads(1)[0][IMAGES]
    tap.sent.clear()
    fedvck(rounds=1, channel=tap)
    assert not torch.equal(other, tap.uploads(1)[0][IMAGES])


# -------------------------------------------------------------------------------------------------------- selection


def test_an_image_that_the_model_gets_wrong_is_drawn_more_often(watched):
    """Class 0's logit grows with brightness: its bright images are right, its dark one is wrong."""
    condensation, seen = watched
    task = make()
    bright, dark = torch.full((3, 8, 8), 1.0), torch.full((3, 8, 8), -1.0)
    task.encoder.mix.weight.data.fill_(1)
    task.classifier.weight.data.zero_()[0] = 1
    rows = [{"image": x, "label": 0, "index": i} for i, x in enumerate([bright, dark, bright])]
    client = FedVCKClient(task, **{**CLIENT, "condensation": condensation})
    client.context = Context(0, 1, 0)
    client.eval()
    client.condense(DataLoader(rows, 4), FABRIC)
    [[chances]] = seen
    assert chances[1] > 1.2 * chances[0]
    assert chances[0] == chances[2]


@pytest.mark.slow
def test_the_previous_model_is_the_one_received_when_last_taking_part(fedvck, data, tap, watched, exactly):
    """One of two clients a round: between its rounds, a client keeps what it received."""
    condensation, seen = watched
    settings = {"alpha": 0.3, "bias": 0.1, "condensation": condensation}
    server = {"training": CondensedTraining(2, 4, learning_rate=0.2)}
    federation = fedvck(settings, server, rounds=5, fraction=0.5, channel=tap)
    received = {round: message for round, client, message in tap.sent if client is None}
    last, owned, waits = {}, {0: (0, 1), 1: (1, 2, 3)}, 0
    for report, found in zip(federation.history, seen, strict=True):
        [client] = report.participants
        current = received[report.round]
        previous = received[last.get(client, report.round)]
        waits += client in last and report.round - last[client] > 1
        for label, pile, chances in zip(
            owned[client], piles_of(data[client], owned[client]), found, strict=True
        ):
            mixed = 0.3 * logits_of(current, pile) + 0.7 * logits_of(previous, pile)
            weights = expit(-log_softmax(mixed, 1)[:, label] - 0.1)
            np.testing.assert_allclose(chances, weights / weights.sum(), rtol=1e-4)
        last[client] = report.round
    assert waits  # else nothing was put to the test
    for client, round in last.items():
        exactly(federation.pool.get(client)["previous"], received[round])


def test_without_selection_all_images_are_alike(fedvck, watched):
    condensation, seen = watched
    fedvck({"selection": False, "condensation": condensation})
    assert len(seen) == 4
    assert all((chances == chances[0]).all() for classes in seen for chances in classes)
