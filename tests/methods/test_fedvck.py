"""FedVCK: a client and a server played by hand, what crosses, and what it comes down to without its parts."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.encoder import Encoder
from lightning.fabric import Fabric
from scipy.special import expit, log_softmax
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.kept_state import read_kept
from lit_fedad.errors import UserError
from lit_fedad.methods.feddm import FedDMClient, FedDMServer
from lit_fedad.methods.fedvck import PROTOTYPES, SIZES, FedVCKClient, FedVCKServer
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES
from lit_fedad.models.convnet import ConvNet
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 4, Encoder.num_features
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
FABRIC = Fabric(accelerator="cpu", devices=1)
CLIENT = {"condensation": Condensation(2, 4), "mean": MEAN, "std": STD, "least": 2, "minimum": 3}
SERVER = {"training": CondensedTraining(2, 4), "negatives": 2, "head_width": 4}

mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
nearly = partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)


def make(seed: int = 0) -> Classifier:
    """Its running statistics are not those of any batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        task = Classifier(Encoder(), K)
        task.encoder.norm.running_mean.normal_()
        task.encoder.norm.running_var.uniform_(0.5, 2)
        return task


def loader(labels, seed: int = 0, side: int = 8) -> DataLoader:
    """Noise; an image of class k is brighter in its k-th quarter."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 156, (len(labels), 3, side, side), generator=draw) / 255
    for image, label in zip(pixels, labels, strict=True):
        image[:, :, 2 * label : 2 * label + 2] += 100 / 255
    rows = [
        {"image": image, "label": label, "index": place}
        for place, (image, label) in enumerate(zip((pixels - mean) / std, labels, strict=True))
    ]
    return DataLoader(rows, batch_size=4)


def upload(labels, seed: int = 0, size: int = 10) -> Update:
    """What a client might send: labels ascending, images and prototypes noise."""
    classes, counts = torch.tensor(labels, dtype=torch.int64).unique(return_counts=True)
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (len(labels), 3, 8, 8), generator=draw, dtype=torch.uint8)
    prototypes = torch.randn(len(classes), K, generator=draw)
    sizes = torch.full((len(classes),), size)
    message = {IMAGES: images, CLASSES: classes, COUNTS: counts, PROTOTYPES: prototypes, SIZES: sizes}
    return Update(message, size * len(classes))


def server_of(**settings) -> FedVCKServer:
    server = FedVCKServer(FedVCKClient(make(), **CLIENT), **{**SERVER, **settings})
    server.fabric = FABRIC
    return server


def piles_of(data, classes):
    """A client's images by class, in the data set's order."""
    rows = list(data.dataset)
    return [torch.stack([row["image"] for row in rows if row["label"] == c]) for c in classes]


def logits_of(state, images) -> np.ndarray:
    """In evaluation mode, in double precision."""
    task = make()
    task.load_state_dict(state)
    task.double().eval()
    with torch.no_grad():
        return task.classifier(task.encoder(images.double())).numpy()


@pytest.fixture
def data():
    """Client 0 owns classes 0 and 1, client 1 classes 1, 2 and 3; of client 0's class 2 there is one image."""
    return {
        0: loader([0, 1, 0, 1, 1, 2, 1, 0, 1], 0),
        1: loader([2, 1, 3, 2, 2, 1, 3, 2, 3, 2, 2], 1),
    }


@pytest.fixture
def fedvck(federate, data):
    """Plays FedVCK on two clients, in a few steps."""

    def play(client=None, server=None, **settings):
        client, server = {**CLIENT, **(client or {})}, {**SERVER, **(server or {})}
        settings = {"task": make(), "data": data, "rounds": 2, **settings}
        return federate(FedVCKClient, FedVCKServer, client=client, server=server, **settings)

    return play


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


# -------------------------------------------------------------------------------------------------- a client by hand


def features(weights, maps, centre, spread):
    """The encoder from its convolution on, under statistics."""
    centre, spread, gain, shift = (
        part.view(-1, 1, 1)
        for part in (centre, spread, weights["encoder.norm.weight"], weights["encoder.norm.bias"])
    )
    return (gain * (maps - centre) / (spread + 1e-5).sqrt() + shift).relu().mean((2, 3))


@pytest.mark.parametrize("constraints", ["batch", "running", "own"])
def test_a_client_by_hand(fedvck, data, tap, constraints):
    """Three steps in double precision, on four images of each class that are drawn by importance."""
    steps, rate, momentum, alpha, bias = 3, 0.4, 0.5, 0.3, 0.2
    settings = {"constraints": constraints, "alpha": alpha, "bias": bias, "quantize": False}
    condensation = Condensation(steps, 4, rate, momentum, augment=False)
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
    client.begin(Context(0, 1, 0))
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


def test_an_image_that_the_model_gets_wrong_is_drawn_more_often(watched, data):
    """Class 0's logit grows with brightness: its bright images are right, its dark one is wrong."""
    condensation, seen = watched
    task = make()
    bright, dark = torch.full((3, 8, 8), 1.0), torch.full((3, 8, 8), -1.0)
    task.encoder.mix.weight.data.fill_(1)
    task.classifier.weight.data.zero_()[0] = 1
    rows = [{"image": x, "label": 0, "index": i} for i, x in enumerate([bright, dark, bright])]
    client = FedVCKClient(task, **{**CLIENT, "condensation": condensation})
    client.begin(Context(0, 1, 0))
    client.eval()
    client.condense(DataLoader(rows, 4), FABRIC)
    [[chances]] = seen
    assert chances[1] > 1.2 * chances[0]
    assert chances[0] == chances[2]


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


# -------------------------------------------------------------------------------------------------- a server by hand


class ByHand:
    """The model and a contrast in tensors of their own, with SGD and Adam written out."""

    def __init__(self, state) -> None:
        entries = {name: entry.double() for name, entry in state.items()}
        self.mean, self.var = (
            entries.pop("encoder.norm.running_mean"),
            entries.pop("encoder.norm.running_var"),
        )
        self.seen = int(entries.pop("encoder.norm.num_batches_tracked"))
        self.weights = entries
        self.velocity = dict.fromkeys(entries, 0.0)

    def features(self, images, training=True):
        maps = F.conv2d(images, self.weights["encoder.mix.weight"], stride=2)
        if not training:
            return features(self.weights, maps, self.mean, self.var)
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * maps.detach().mean((0, 2, 3))
        self.var = 0.9 * self.var + 0.1 * maps.detach().var((0, 2, 3))
        return features(self.weights, maps, maps.mean((0, 2, 3)), maps.var((0, 2, 3), unbiased=False))

    def logits(self, z):
        return z @ self.weights["classifier.weight"].T + self.weights["classifier.bias"]

    def descend(self, gradients, rate, decay):
        for (name, weight), gradient in zip(self.weights.items(), gradients, strict=True):
            self.velocity[name] = 0.9 * self.velocity[name] + gradient + decay * weight.detach()
            self.weights[name] = (weight - rate * self.velocity[name]).detach()

    def state(self):
        buffers = {"encoder.norm.running_mean": self.mean, "encoder.norm.running_var": self.var}
        return {name: entry.float() for name, entry in {**self.weights, **buffers}.items()}


def adam(parameters, moments, gradients, rate, step):
    new = []
    for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        first, second = moments.get(i, (0.0, 0.0))
        moments[i] = first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        new.append(
            (p - rate * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)).detach()
        )
    return new


@pytest.mark.parametrize("with_own", [True, False])
def test_a_server_by_hand(fedvck, tap, with_own):
    """Round 2 in double precision: all images, two epochs, cross-entropy and contrast, rates that fall at half time."""
    rate, decay, batch, weight, tau, head_rate, hidden = 0.05, 0.01, 8, 0.4, 0.5, 0.02, 4
    training = CondensedTraining(2, batch, rate, 0.9, decay, augment=False)
    settings = {
        "training": training, "contrast": weight, "negatives": 2, "temperature": tau, "with_own": with_own,
        "head_width": hidden, "head_rate": head_rate,
    }  # fmt: skip
    after = {}
    federation = fedvck(
        server=settings,
        channel=tap,
        after_round=lambda played, report: after.update({report.round: played.server.weights}),
    )

    model, context = ByHand(after[1]), Context(seed=0, round=2)
    rounds = [
        (
            torch.cat([(m[IMAGES] / 255 - mean) / std for m in tap.uploads(round).values()]).double(),
            torch.cat([m[CLASSES].repeat_interleave(m[COUNTS]) for m in tap.uploads(round).values()]),
        )
        for round in (1, 2)
    ]
    # Prototypes of features (Eq. 14) and of logits (Eq. 12), and the classes most easily mistaken (Eq. 13).
    old = model.features(rounds[0][0], training=False)
    means = [old[rounds[0][1] == c].mean(0) for c in range(K)]
    prototypes = torch.stack([m / m.norm() for m in means])
    told = tap.uploads(2)
    total, images_of = np.zeros((K, K)), np.zeros(K)
    for message in told.values():
        for c, logits, size in zip(message[CLASSES], message[PROTOTYPES], message[SIZES], strict=True):
            total[c] += int(size) * logits.double().numpy()
            images_of[c] += int(size)
    judged = total / images_of[:, None]
    rivals = [sorted((j for j in range(K) if j != c), key=lambda j, c=c: -judged[c, j])[:2] for c in range(K)]

    with context.seeded("contrast head"):
        drawn = nn.Sequential(
            nn.Linear(WIDTH, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, WIDTH)
        )
    head, moments, step = [p.detach().double() for p in drawn.parameters()], {}, 0
    images, labels = (torch.cat(parts) for parts in zip(*rounds, strict=True))
    generator, losses = context.generator("condensed training"), []
    for epoch in range(2):
        fall = 1.0 if epoch == 0 else 0.1
        for rows in torch.randperm(len(labels), generator=generator).split(batch):
            step += 1
            x, y = images[rows], labels[rows]
            variables = [*model.weights.values(), *head]
            for variable in variables:
                variable.requires_grad_()
            z = model.features(x)
            loss = F.cross_entropy(model.logits(z), y)
            z = model.features(x)  # once more: the contrast looks at images as they are
            a, b, gain, shift, c, d = head
            inner = z @ a.T + b
            inner = (inner - inner.mean(0)) / (inner.var(0, unbiased=False) + 1e-5).sqrt()
            out = (gain * inner + shift).relu() @ c.T + d
            similarity = out / out.norm(dim=1, keepdim=True) @ prototypes.T / tau
            terms = []
            for own, label in zip(similarity, y.tolist(), strict=True):
                others = [*rivals[label], *([label] if with_own else [])]
                terms.append(own[others].exp().sum().log() - own[label])
            loss = loss + fall * weight * sum(terms) / len(terms)
            gradients = torch.autograd.grad(loss, variables)
            model.descend(gradients[: len(model.weights)], fall * rate, decay)
            head = adam(head, moments, gradients[len(model.weights) :], fall * head_rate, step)
            losses.append((float(loss.detach()), len(rows), epoch))

    found = dict(federation.server.weights)
    assert int(found.pop("encoder.norm.num_batches_tracked")) == model.seen
    nearly({name: found[name] for name in sorted(found)}, dict(sorted(model.state().items())))
    by_hand = sum(loss * n for loss, n, epoch in losses if epoch == 1) / len(labels)
    assert federation.history[1].scalars["server_loss"] == pytest.approx(by_hand, rel=1e-3)


def test_the_first_round_has_no_contrast(fedvck, exactly):
    plain, strong = ({"contrast": contrast} for contrast in (0.0, 5.0))
    exactly(fedvck(server=plain, rounds=1).server.weights, fedvck(server=strong, rounds=1).server.weights)
    one, two = (fedvck(server=server).server.weights["encoder.mix.weight"] for server in (plain, strong))
    assert (one - two).abs().max() > 1e-4


@pytest.mark.parametrize(("kept", "rounds"), [(None, [1, 2, 3]), (2, [2, 3]), (1, [3]), (9, [1, 2, 3])])
def test_images_of_the_latest_rounds_are_trained_on(fedvck, tap, exactly, kept, rounds):
    seen = []

    class Watched(CondensedTraining):
        def __call__(self, model, features, head, images, *others):
            seen.append(images)
            return super().__call__(model, features, head, images, *others)

    federation = fedvck(server={"rounds_kept": kept, "training": Watched(1, 8)}, rounds=3, channel=tap)
    sent = [message[IMAGES] for round in rounds for message in tap.uploads(round).values()]
    exactly(seen[-1], torch.cat(sent))
    shared = federation.server.images_by_round()
    assert sorted(shared) == rounds
    exactly(torch.cat([images for images, _ in shared.values()]), torch.cat(sent))


def test_a_class_that_nobody_reports_keeps_its_prototype():
    server = server_of()
    assert server.prototypes.isnan().all()
    updates = [upload([0, 0, 1, 1], 1), upload([1, 2, 2], 2)]
    for round, update in enumerate(updates, start=1):
        server.begin(Context(0, round))
        server.aggregate({0: update})
    (first, second), found = (update.message[PROTOTYPES] for update in updates), server.prototypes
    assert torch.equal(found[0], first[0])
    assert torch.equal(found[1], second[0])
    assert torch.equal(found[2], second[1])
    assert found[3].isnan().all()


def test_prototypes_are_weighted_by_images():
    server = server_of()
    one, two = upload([0, 1], 1, size=30), upload([1, 3], 2, size=10)
    server.begin(Context(0, 1))
    server.aggregate({0: one, 1: two})
    nearly(server.prototypes[1], (3 * one.message[PROTOTYPES][1] + two.message[PROTOTYPES][0]) / 4)


def test_equal_knowledge_is_at_distance_zero():
    server, same = server_of(), {0: upload([0, 0, 1, 1]), 1: upload([1, 2], 1)}
    server.begin(Context(0, 1))
    server.aggregate(same)
    assert "knowledge_mmd" not in server.diagnostics()
    server.begin(Context(0, 2))
    server.aggregate(same)
    assert server.diagnostics()["knowledge_mmd"] == pytest.approx(0, abs=1e-9)
    server.begin(Context(0, 3))
    server.aggregate({0: upload([0, 0, 1, 1], 5)})
    assert server.diagnostics()["knowledge_mmd"] > 1e-3


# -------------------------------------------------------------------------------------------- what it comes down to


def test_without_its_parts_it_is_feddm_without_disturbance(fedvck, federate, data, tap, exactly):
    """Bit for bit, where FedDM's logits say nothing: its classifier is zero. After a round it no longer is."""

    def zeroed():
        task = make()
        for parameter in task.classifier.parameters():
            parameter.data.zero_()
        return task

    off = {"selection": False, "constraints": "own"}
    ours = fedvck(off, {"contrast": 0.0, "rounds_kept": 1}, task=zeroed(), rounds=1, channel=tap)
    sent = tap.uploads(1)
    tap.sent.clear()
    client = {**CLIENT, "init": "noise", "radius": 0.0}
    server = {"training": SERVER["training"]}
    settings = {
        "client": client,
        "server": server,
        "task": zeroed(),
        "data": data,
        "rounds": 1,
        "channel": tap,
    }
    theirs = federate(FedDMClient, FedDMServer, **settings)
    exactly(ours.server.weights, theirs.server.weights)
    for number, message in tap.uploads(1).items():
        exactly({name: sent[number][name] for name in message}, message)


def test_without_contrast_and_memory_the_server_is_feddm_s(exactly):
    ours, theirs = (
        server_of(contrast=0.0, rounds_kept=1),
        FedDMServer(FedDMClient(make(), **CLIENT), SERVER["training"]),
    )
    theirs.fabric = FABRIC
    for round in (1, 2, 3):
        updates = {0: upload([0, 0, 1], round), 1: upload([1, 2, 3], 10 + round)}
        for server in (ours, theirs):
            server.begin(Context(0, round))
            server.aggregate(updates)
        exactly(ours.weights, theirs.weights)
        assert ours.diagnostics() == theirs.diagnostics()


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(fedvck, exactly):
    """With images of earlier rounds, prototypes, and the weights that each client received last."""
    whole = fedvck(rounds=4, fraction=0.5)
    fedvck(rounds=2, fraction=0.5, folder="halted")
    resumed = fedvck(rounds=4, fraction=0.5, folder="halted")
    exactly(read_kept(resumed.server), read_kept(whole.server))
    assert sorted(resumed.server.knowledge) == [1, 2, 3, 4]
    for client in (0, 1):
        exactly(resumed.pool.get(client), whole.pool.get(client))
    exactly(*([report.scalars for report in played.history] for played in (resumed, whole)))


def test_the_order_of_a_clients_images_does_not_matter(fedvck, exactly):
    still, shuffled = fedvck(shuffle=False), fedvck(shuffle=True)
    exactly(read_kept(shuffled.server), read_kept(still.server))


def test_an_observer_sees_the_upload_alone(fedvck, tap, exactly):
    """No images of other clients or rounds, no contrast; and listening between rounds changes nothing."""
    training = SERVER["training"]

    def listen(federation, report):
        server = federation.server
        before = {name: entry.clone() for name, entry in server.weights.items()}
        prototypes, knowledge = server.prototypes.clone(), {**server.knowledge}
        message, context = tap.uploads(report.round)[0], Context(0, report.round + 1)
        found = federation.adversary_view(0, Update(message, 9)).task.state_dict()
        task = make()
        task.load_state_dict(before)
        labels = message[CLASSES].repeat_interleave(message[COUNTS])
        training(
            task, task.encoder, task.classifier, message[IMAGES], labels,
            lambda images: (images / 255 - mean) / std, context.generator("condensed training"), FABRIC,
        )  # fmt: skip
        exactly({**found}, {**task.state_dict()})
        exactly([server.weights, server.prototypes], [before, prototypes])
        assert server.knowledge == knowledge

    heard, quiet = fedvck(channel=tap, after_round=listen, rounds=3), fedvck(rounds=3)
    exactly(read_kept(heard.server), read_kept(quiet.server))
    assert [report.scalars for report in heard.history] == [report.scalars for report in quiet.history]


def test_classes_that_clients_hold_apart_are_learnt_from_noise(fedvck):
    held = {client: loader([client] * 12 + [(client + 1) % K] * 3, client, side=16) for client in range(K)}
    tested = torch.tensor([0, 1, 2, 3] * 15)
    images = torch.stack([row["image"] for row in loader(tested.tolist(), 99, side=16).dataset])

    def accuracy(client, number):
        with torch.no_grad():
            said = client.task.predict_step({"image": images}).logits.argmax(1)
        return float((said == tested).float().mean())

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        task = Classifier(ConvNet(16, channels=16), K)
    client = {"condensation": Condensation(12, 8, 5.0, augment=False), "minimum": 4}
    server = {"training": CondensedTraining(10, 16, 0.02, augment=False)}
    played = fedvck(client, server, task=task, data=held, question=accuracy)
    assert played.history[-1].metrics[0] > 0.5


# ------------------------------------------------------------------------------------- what is missing or refused


def test_a_client_that_owns_no_class_sends_nothing_and_the_others_go_on(fedvck, data, tap):
    federation = fedvck(data={**data, 2: loader([0, 1, 2], 5)}, channel=tap)
    message = tap.uploads(2)[2]
    assert {name: tuple(entry.shape) for name, entry in message.items()} == {
        IMAGES: (0, 3, 8, 8), CLASSES: (0,), COUNTS: (0,), PROTOTYPES: (0, K), SIZES: (0,),
    }  # fmt: skip
    report = federation.history[-1]
    assert report.per_client[2] == {}
    assert report.scalars["images"] == 15
    assert not federation.server.prototypes.isnan().any()


def test_clients_that_own_nothing_at_all_end_the_run(fedvck):
    with pytest.raises(UserError, match=r"no client owns a class.*method\.client\.least") as error:
        fedvck({"least": 100})
    assert "\n" not in str(error.value)


def test_a_class_that_nobody_owns_is_named_once_and_takes_no_part(fedvck, data):
    federation = fedvck(data={0: data[0]}, server={"contrast": 1.0})
    [line], after = (report.warnings for report in federation.history)
    assert "class 2, 3" in line
    assert after == []
    assert federation.server.prototypes.isnan().all(1).tolist() == [False, False, True, True]
    assert math.isfinite(federation.history[1].scalars["server_loss"])


@pytest.mark.parametrize("norm", ["instance", None])
def test_encoders_without_batch_statistics_are_refused(norm):
    task = Classifier(ConvNet(8, norm="instance", channels=4), K)
    if norm is None:
        task.encoder = nn.Conv2d(3, 4, 3)
    with pytest.raises(UserError, match=r"no batch normalisation.*task\.encoder\.norm=batch") as error:
        FedVCKClient(task, Condensation(1))
    assert "\n" not in str(error.value)


def test_learning_rates_that_diverge_are_named(fedvck):
    rate = r"client 0: condensation diverged; lower method\.client\.condensation\.learning_rate"
    with pytest.raises(UserError, match=rate):
        fedvck({"condensation": Condensation(6, 4, learning_rate=1e30)})
    with pytest.raises(UserError, match=r"server diverged; lower method\.server\.training\.learning_rate"):
        fedvck(server={"training": CondensedTraining(4, 4, learning_rate=1e30)})


@pytest.mark.parametrize(
    "setting",
    [
        {"rounds_kept": 0},
        {"contrast": -0.1},
        {"negatives": 0},
        {"head_width": 0},
        {"temperature": 0.0},
        {"head_rate": 0.0},
    ],
)
def test_server_settings_out_of_range_are_refused(setting):
    [(name, value)] = setting.items()
    with pytest.raises(UserError, match=rf"{name}={value}\b") as error:
        server_of(**setting)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_a_mixture_of_more_than_all_is_refused(alpha):
    with pytest.raises(UserError, match=rf"alpha={alpha}: give a share from 0 to 1"):
        FedVCKClient(make(), Condensation(1), alpha=alpha)
