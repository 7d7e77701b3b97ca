"""FedVCK's server: a round by hand, kept images, prototypes and diagnostics."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.feddm import mean, std
from helpers.fedvck import WIDTH, K, features, nearly, server_of, upload
from helpers.refusals import refusal
from torch import nn
from torch.nn import functional as F

from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context
from lit_fedad.methods.fedvck import PROTOTYPES, SIZES
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES


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
        server.context = Context(0, round)
        server.aggregate({0: update})
    (first, second), found = (update.message[PROTOTYPES] for update in updates), server.prototypes
    assert torch.equal(found[0], first[0])
    assert torch.equal(found[1], second[0])
    assert torch.equal(found[2], second[1])
    assert found[3].isnan().all()


def test_a_feature_that_no_image_has_leaves_its_class_among_the_negatives(monkeypatch):
    """Of class 3 there is no image: it is the negative of none."""
    server = server_of(negatives=3)
    server.context, sent = Context(0, 1), upload([0, 0, 1, 1, 2])
    server.aggregate({0: sent})
    without = torch.arange(WIDTH).clamp(max=1.0)
    original = server._features
    monkeypatch.setattr(server, "_features", lambda *given: original(*given) * without)
    extra = server.extra_loss([sent.message])
    assert extra.module.candidates.tolist() == [[True] * 3 + [False]] * 3 + [[False] * 4]


def test_prototypes_are_weighted_by_images():
    server = server_of()
    one, two = upload([0, 1], 1, size=30), upload([1, 3], 2, size=10)
    server.context = Context(0, 1)
    server.aggregate({0: one, 1: two})
    nearly(server.prototypes[1], (3 * one.message[PROTOTYPES][1] + two.message[PROTOTYPES][0]) / 4)


def test_prototypes_of_more_images_than_the_client_has_are_refused():
    server, update = server_of(), upload([0, 0, 0, 1, 1, 1, 3, 3, 3])
    server.validate(0, update)
    with refusal("counts 30 images of its classes, and has 29"):
        server.validate(0, replace(update, num_samples=29))
    with refusal("sent 8 images and counts 9"):  # as in FedDM
        server.validate(0, replace(update, message={**update.message, IMAGES: update.message[IMAGES][:8]}))
