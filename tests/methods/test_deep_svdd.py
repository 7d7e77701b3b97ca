"""Deep SVDD in a federation: one centre, after pre-training; FedAvg around it."""

import functools

import pytest
import torch
from helpers.frozen import frozen_encoder, images
from helpers.methods import restarted
from helpers.refusals import refusal

from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.methods.deep_svdd import CENTRE, DeepSVDDClient, DeepSVDDServer
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.models.convnets import LeNetDecoder
from lit_fedad.tasks.deep_svdd import DeepSVDD, off_zero


def task(**settings) -> DeepSVDD:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        images = {"decoder": LeNetDecoder, "image_size": 16, "mean": (0.5,) * 3, "std": (0.5,) * 3}
        parts = {
            "rounds": 9,
            "width": 3,
            "hidden": 5,
            "learning_rate": 0.01,
            "weight_decay": 5e-7,
            "margin": 0.01,
        }
        return DeepSVDD(frozen_encoder(), **{**images, **parts, **settings})


def z_of(weights, loader) -> torch.Tensor:
    """The bottleneck of a loader's images under some weights."""
    live = task()
    live.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return torch.cat([live.eval()(batch) for batch in loader])


@pytest.fixture
def play(federate):
    return functools.partial(federate, DeepSVDDClient, DeepSVDDServer)


def test_the_centre_is_the_mean_of_all_images_after_pre_training(play, tap):
    data = {0: images(6), 1: images(3, seed=1), 2: images(2, seed=2)}
    played = play(task=task(), data=data, client={"pretraining": 2}, rounds=2, channel=tap)
    assert [report.round for report in played.history] == [-2, -1, 0, 1, 2]
    (sent,) = {
        id(m): m for at, client, m in tap.sent if at == 0 and client is None and CENTRE not in m
    }.values()
    everyone = torch.cat([z_of(sent, loader) for loader in data.values()])
    expected = off_zero(everyone.mean(0), 0.01)
    torch.testing.assert_close(played.server.auxiliary[CENTRE], expected, rtol=1e-5, atol=1e-6)
    # It goes out with every round's weights, and stays.
    later = [m for at, client, m in tap.sent if at > 0 and client is None]
    assert later
    assert all(torch.equal(m[CENTRE], played.server.auxiliary[CENTRE]) for m in later)
    assert not any(CENTRE in m for at, client, m in tap.sent if at > 0 and client is not None)


def test_with_one_client_and_no_pre_training_it_is_fedavg(play, federate, exactly):
    data = {0: images(7)}
    ours = play(task=task(), data=data)
    plain = federate(FedAvgClient, task=task(), data=data)
    exactly(ours.server.weights, plain.server.weights)
    exactly(ours.history[-1].metrics[0], plain.history[-1].metrics[0])


def test_two_rounds_by_hand(play):
    """Full-batch Adam of two clients around the common centre."""
    data = {0: images(4), 1: images(4, seed=1)}
    played = play(task=task(), data=data, rounds=2)
    weights = {n: w.clone() for n, w in task().state_dict().items() if n in played.server.weights}
    centre = off_zero(torch.cat([z_of(weights, loader) for loader in data.values()]).mean(0), 0.01)
    for number in (1, 2):
        trained = []
        for loader in data.values():
            live = task()
            live.load_state_dict(weights, strict=False)
            live.train().round = number
            optimizer = torch.optim.Adam(live.parameters(), lr=0.01, weight_decay=5e-7)
            ((live(next(iter(loader))) - centre) ** 2).sum(1).mean().backward()
            optimizer.step()
            trained.append({n: w.detach() for n, w in live.state_dict().items()})
        weights = {n: (trained[0][n] + trained[1][n]) / 2 for n in weights}
    for name, weight in weights.items():
        torch.testing.assert_close(played.server.weights[name], weight, rtol=1e-4, atol=1e-6)


def test_radii_are_averaged(play, tap):
    data = {0: images(6), 1: images(2, seed=1)}
    played = play(task=task(objective="soft-boundary", radius_rounds=0), data=data, channel=tap)
    one, other = (message["radius"] for message in tap.uploads(3).values())
    assert one != other
    torch.testing.assert_close(played.server.weights["radius"], 0.75 * one + 0.25 * other)


def test_interrupted_runs_end_as_uninterrupted_ones(play, exactly):
    data = {client: images(4 + client, seed=client) for client in range(3)}
    settings = {"fraction": 0.67, "shuffle": True, "client": {"pretraining": 1}}

    def run(**more):
        return play(task=task(), data=data, **settings, **more)

    whole, parts = run(), restarted(run, 0, 1, 3)
    exactly(parts.server.weights, whole.server.weights)
    assert torch.equal(parts.server.auxiliary[CENTRE], whole.server.auxiliary[CENTRE])


def test_pretraining_is_no_negative_number():
    with refusal(r"method\.client\.pretraining=-1 must be"):
        DeepSVDDClient(task(), pretraining=-1)


@pytest.mark.parametrize("preset", ["semantic_small", "semantic_cifar10", "fadngs"])
def test_no_layer_that_is_trained_from_pixels_has_a_bias(preset):
    """With biases all images could be mapped to the centre; presets choose a ResNet for other methods."""
    data = ["data=motifs", "features=train", "encoder.channels=2"]
    encoder = build(compose(["method=deep_svdd", f"experiment={preset}", *data])["encoder"])
    assert not [name for name, _ in encoder.named_parameters() if name.endswith("bias")]
