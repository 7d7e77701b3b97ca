"""FEDIC: the calibrated teacher, a whole server round played by hand, and what it comes down to."""

from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.draws import rows
from helpers.encoder import Encoder
from helpers.refusals import refusal
from lightning.fabric import Fabric
from scipy.special import expit, rel_entr, softmax
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import load_state, state_of
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.data.labelled import LabelledDataset
from lit_fedad.experiment.build import (
    build_images,
    build_model,
    build_partition,
    build_public,
    build_server_labelled,
)
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedic import Calibration, FEDICClient, FEDICServer, divergence
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 3, Encoder.num_features
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
QUICK = {"steps": 4, "labelled_batch": 5, "auxiliary_batch": 4, "learning_rate": 0.02}

nearly = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5)


def make(seed: int = 0) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(Encoder(), K, augment=False, learning_rate=0.1)


def pixels(labels, seed: int = 0) -> torch.Tensor:
    """Noise uint8 [n, 3, 8, 8]; an image of class k is brighter in channel k."""
    labels = torch.as_tensor(labels)
    noise = torch.randint(
        0, 150, (len(labels), 3, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    noise[torch.arange(len(labels)), labels] += 60
    return noise


def loader(labels, seed: int = 0) -> DataLoader:
    images = LabelledDataset(pixels(labels, seed), torch.tensor(labels), MEAN, STD)
    return DataLoader([images[i] for i in range(len(labels))], batch_size=4)


def labelled_images(each: int = 3) -> LabelledDataset:
    labels = torch.arange(K).repeat(each)
    return LabelledDataset(pixels(labels, 90), labels, MEAN, STD)


def public_images(count: int = 7) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(91), dtype=torch.uint8
    )


def updates_of(*seeds: int) -> dict[int, Update]:
    """What clients with models of their own would send; the last one has twice as many images."""
    updates = {}
    for client, seed in enumerate(seeds):
        state = {name: entry.clone() for name, entry in learned_state(make(seed)).items()}
        state["encoder.norm.running_mean"] = rows(WIDTH, seed=seed).float()
        updates[client] = Update(state, 2 if client == len(seeds) - 1 else 1)
    return updates


def server_of(precision: str = "32-true", round: int = 1, **settings) -> FEDICServer:
    settings = {"public": public_images(), "server_labelled": labelled_images(), **QUICK, **settings}
    server = FEDICServer(FEDICClient(make()), **settings)
    server.fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    server.context = Context(0, round)
    server.register_clients({})
    return server


@pytest.fixture
def data():
    return {0: loader([0, 1, 0, 1, 0, 1], 0), 1: loader([1, 1, 0, 1], 1), 2: loader([2, 0, 0, 0, 1], 2)}


@pytest.fixture
def fedic(federate, data):
    """Plays FEDIC on three clients, with a quick server."""

    def play(server=None, **settings):
        server = {"public": public_images(), "server_labelled": labelled_images(), **QUICK, **(server or {})}
        settings = {"task": make(), "data": data, "shuffle": True, **settings}
        return federate(FEDICClient, FEDICServer, server=server, **settings)

    return play


# ------------------------------------------------------------------------------------------------------ the teacher


def calibration_of(seed: int = 0) -> Calibration:
    calibration = Calibration(K, WIDTH).double()
    for number, parameter in enumerate(calibration.parameters()):
        parameter.data = rows(*parameter.shape, seed=seed + number)
    return calibration


@pytest.mark.parametrize("clients", [1, 2, 9])
def test_the_teacher_is_that_of_numpy(clients):
    calibration = calibration_of(10)
    logits, features, tuned = rows(clients, 6, K, seed=1), rows(6, WIDTH, seed=2), rows(6, K, seed=3)
    found = calibration(logits, features, tuned).detach().numpy()
    u, b, scale, shift, v = (
        getattr(calibration, name).detach().numpy() for name in ("u", "b", "scale", "shift", "v")
    )
    for i in range(6):
        weights = np.array([expit(u @ logits[j, i].numpy() + b) for j in range(clients)])
        weights /= np.abs(weights).sum()
        ensemble = sum(weights[j] * logits[j, i].numpy() for j in range(clients))
        gate = expit(v @ features[i].numpy())
        expected = gate * (scale * ensemble + shift) + (1 - gate) * tuned[i].numpy()
        np.testing.assert_allclose(found[i], expected, rtol=1e-10)


def test_at_first_the_teacher_is_half_the_fine_tuned_model_and_half_the_ensemble():
    logits, tuned = rows(4, 6, K, seed=1).float(), rows(6, K, seed=3).float()
    logits -= logits.mean(2, keepdim=True)  # so that all clients' logits sum to the same
    found = Calibration(K, WIDTH)(logits, torch.ones(6, WIDTH), tuned)
    torch.testing.assert_close(found, (logits.mean(0) + tuned) / 2)


def test_weights_of_clients_do_not_vanish_together():
    logits = torch.full((2, 1, K), -1e3)
    logits[1] -= 1
    found = Calibration(K, WIDTH)(logits, torch.zeros(1, WIDTH), torch.zeros(1, K))
    first, second = softmax([-3000.0, -3003.0])
    np.testing.assert_allclose(
        found.detach().numpy(), np.full((1, K), (first * -1000 + second * -1001) / 2), rtol=1e-6
    )


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_divergence_is_that_of_scipy_without_a_factor(temperature):
    student, teacher = rows(6, K), rows(6, K, seed=1)
    p, q = (softmax(logits.numpy() / temperature, axis=1) for logits in (teacher, student))
    assert float(divergence(student, teacher, temperature)) == pytest.approx(rel_entr(p, q).sum(1).mean())


# ------------------------------------------------------------------------------------------------------- a round


def test_a_round_is_what_it_is_by_hand():
    """With batches of all images, nothing is drawn."""
    updates, public, labelled = updates_of(1, 2), public_images(), labelled_images()
    settings = {"steps": 3, "learning_rate": 0.02, "temperature": 2.0}
    server = server_of(labelled_batch=50, auxiliary_batch=50, **settings)
    server.aggregate(updates)

    labels = torch.arange(K).repeat(3)
    own, auxiliary = (
        (images.float() / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        for images in (pixels(labels, 90), public)
    )
    assert len(labelled) == len(own)
    average = make()
    average.load_state_dict(
        {
            name: (entry + 2 * updates[1].message[name]) / 3 if entry.is_floating_point() else entry
            for name, entry in updates[0].message.items()
        }
    )

    def logits(task, images):
        return task.classifier(task.encoder(images))

    def descend(module, loss):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
        module.train()
        for _ in range(3):
            last = loss()
            optimizer.zero_grad()
            last.backward()
            optimizer.step()
        module.eval()
        return last.item()

    tuned = deepcopy(average)
    fine_tuning = descend(tuned, lambda: F.cross_entropy(logits(tuned, own), labels))
    models = [make().eval() for _ in updates]
    for model, update in zip(models, updates.values(), strict=True):
        model.load_state_dict(update.message)
    calibration = Calibration(K, WIDTH)

    def teacher(images):
        with torch.no_grad():
            said = torch.stack([logits(model, images) for model in models])
            features = sum(model.encoder(images) for model in models) / 2
            of_tuned = logits(tuned, images)
        return calibration(said, features, of_tuned)

    calibrating = descend(calibration, lambda: F.cross_entropy(teacher(own), labels))
    target = softmax(teacher(auxiliary).detach().numpy() / 2, axis=1)

    def distillation():
        student = (logits(average, auxiliary) / 2).log_softmax(1)
        apart = (torch.tensor(target) * (torch.tensor(target).log() - student)).sum(1).mean()
        return apart / 2 + F.cross_entropy(logits(average, own), labels) / 2

    distilling = descend(average, distillation)
    nearly(server.weights, dict(learned_state(average)))
    assert server.diagnostics() == pytest.approx(
        {"fine_tuning_loss": fine_tuning, "calibration_loss": calibrating, "distillation_loss": distilling},
        rel=1e-4,
    )
    # Two looks a step, at auxiliary and at labelled images, from the average's statistics on.
    assert int(server.weights["encoder.norm.num_batches_tracked"]) == 6


def test_teachers_look_once_at_each_image_that_is_drawn():
    server, seen = server_of(public=public_images(40)), {True: [], False: []}
    server.task.encoder.register_forward_hook(
        lambda module, inputs, _: seen[module.training].append(len(inputs[0]))
    )
    server.aggregate(updates_of(1, 2, 3))
    auxiliary = seen[False][0] - 9
    assert 4 < auxiliary <= 16  # four steps of four of forty images, some of them twice
    assert seen[False] == [9 + auxiliary] * 4  # three clients, and the fine-tuned model
    assert seen[True] == [5] * 4 + [4, 5] * 4


def test_a_step_sees_no_image_twice_and_each_round_other_ones():
    first, again, later, other = (
        server_of(round=round)._batches(purpose, 9, 5)
        for round, purpose in ((1, "a"), (1, "a"), (2, "a"), (1, "b"))
    )
    assert first.shape == (4, 5)
    assert all(len(set(step)) == 5 for step in first.tolist())
    assert set(first.flatten().tolist()) <= set(range(9))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


def test_the_order_of_clients_does_not_matter():
    updates = updates_of(1, 2, 3)
    one, other = server_of(), server_of()
    one.aggregate(updates)
    other.aggregate(dict(reversed(updates.items())))
    nearly(one.weights, other.weights)


def test_messages_are_left_as_they_are(exactly):
    updates, server = updates_of(1, 2), server_of()
    before = deepcopy(updates)
    server.aggregate(updates)
    for client, update in updates.items():
        exactly(update.message, before[client].message)
    kept = deepcopy(server.weights)
    with torch.no_grad():
        for parameter in server.task.parameters():
            parameter.zero_()
    exactly(server.weights, kept)


def test_mixed_precision_learns_nearly_the_same():
    exact, mixed = server_of(), server_of(precision="bf16-mixed")
    for server in (exact, mixed):
        server.aggregate(updates_of(1, 2))
    assert mixed.diagnostics() == pytest.approx(exact.diagnostics(), rel=0.05)
    assert mixed.diagnostics() != exact.diagnostics()
    assert all(entry.dtype == exact.weights[name].dtype for name, entry in mixed.weights.items())


# --------------------------------------------------------------------------------------------------- a federation


def test_without_steps_it_is_fedavg(fedic, federate, data, exactly):
    ours = fedic({"steps": 0}, client={"local_epochs": 2}, fraction=0.67)
    plain = federate(
        FedAvgClient, task=make(), data=data, shuffle=True, client={"local_epochs": 2}, fraction=0.67
    )
    exactly(ours.server.weights, plain.server.weights)
    for one, other in zip(ours.history, plain.history, strict=True):
        exactly(one.metrics, other.metrics)
        assert (one.scalars, one.bytes_up, one.bytes_down) == (
            other.scalars,
            other.bytes_up,
            other.bytes_down,
        )


def test_clients_send_what_they_send_under_fedavg(fedic, federate, data, tap, exactly):
    fedic(channel=tap, rounds=1)
    ours = tap.uploads(1)
    tap.sent.clear()
    federate(FedAvgClient, task=make(), data=data, shuffle=True, channel=tap, rounds=1)
    exactly(ours, tap.uploads(1))


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("missing", ["public", "server_labelled"])
def test_missing_images_are_named_before_anything_is_trained(fedic, tap, missing):
    with refusal(r"give public=synthetic.*partition\.server_labelled=20"):
        fedic({missing: None}, channel=tap)
    assert not tap.sent


def test_a_trained_server_answers_without_images(fedic, exactly):
    trained = fedic(rounds=2).server
    rebuilt = FEDICServer(FEDICClient(make(5)))
    load_state(rebuilt, state_of(trained))
    rebuilt.context = Context(0, 3)
    exactly(rebuilt.broadcast(0), trained.weights)


def test_public_images_of_another_size_are_refused():
    with pytest.raises(UserError, match=r"public images have 6 pixels a side, the clients' 8"):
        server_of(public=public_images()[..., :6, :6])


def test_a_learning_rate_that_diverges_is_named():
    with pytest.raises(UserError, match=r"lower method\.server\.learning_rate"):
        server_of(learning_rate=1e30).aggregate(updates_of(1, 2))


# ---------------------------------------------------------------------------------------------- the configuration


SMALL = ("method=fedic", "data.train_per_class=30", "data.test_per_class=1", "public.count=4")


def test_the_configuration_takes_labelled_images_out_of_the_clients_pools():
    config = compose(SMALL)
    images = build_images(config)
    partition = build_partition(config, images)
    public, labelled = build_public(config, images), build_server_labelled(config, images, partition)
    server = build_model(config, images.categories, public, labelled).server
    server.register_clients({})
    held = labelled.__getitems__(range(len(labelled)))
    assert held["label"].bincount().tolist() == [20] * 10
    assert held["image"].shape[1:] == public.shape[1:]
    assert not set(partition.reserved) & {index for own in partition.clients for index in own}


def test_a_partition_without_labelled_images_is_refused():
    config = compose([*SMALL, "partition.server_labelled=0"])
    images = build_images(config)
    with pytest.raises(UserError, match=r"method fedic .* partition\.server_labelled="):
        build_server_labelled(config, images, build_partition(config, images))
