"""What messages say of single images: each statistic by hand, and that it is high for members."""

import numpy as np
import pytest
import torch
from helpers.draws import normals
from torch.nn import functional as F

from lit_fedad.audits.statistics import (
    bank_statistics,
    moments_statistics,
    prototype_scores,
    update_directions,
)
from lit_fedad.contracts import Context
from lit_fedad.contracts.evidence import ChangedLayer
from lit_fedad.memory.moments import Moments
from lit_fedad.methods.apple import AppleClient, AppleServer
from lit_fedad.methods.parts.bank_evidence import own_vectors
from lit_fedad.methods.parts.weight_evidence import weights_sent
from lit_fedad.tasks.classifier import Classifier


def test_bank_statistics_by_hand():
    bank, features = normals(7, 4, seed=1), normals(3, 5, 4, seed=2)
    gaps = np.linalg.norm(features.numpy()[:, :, None] - bank.numpy(), axis=-1).min(-1)
    expected = -np.stack([gaps.max(1), gaps.mean(1), np.quantile(gaps, 0.1, axis=1)], 1)
    np.testing.assert_allclose(bank_statistics(features, bank), expected, rtol=1e-4, atol=1e-5)


def test_moments_statistics_by_hand():
    """With one channel that hardly varies: it alone is outside the subspace."""
    own = normals(400, 3) @ torch.tensor([[1.0, 0.5, 0.9], [0, 1, 1.2], [0, 0, 0.02]])
    moments, patches = Moments.of([own], 3), normals(2, 6, 3, seed=3)
    scale = own.double().std(0, correction=0).numpy()
    z = (patches.double().numpy() - own.double().mean(0).numpy()) / scale
    variances, directions = np.linalg.eigh(np.corrcoef(own.double().numpy().T))
    assert variances[0] < 0.01 * 3 < variances[:2].sum()
    squares = (z @ directions) ** 2
    residual = np.sqrt(squares[..., 0])
    whole = (squares / (variances + 0.01)).sum(-1).mean(1)
    expected = -np.stack([residual.max(1), residual.mean(1), whole], 1)
    np.testing.assert_allclose(moments_statistics(patches, moments), expected, rtol=1e-3, atol=1e-3)


def test_members_lie_nearer_to_their_own_moments():
    images = normals(20, 4, 30, seed=4)
    moments = Moments.of([images[:10].flatten(0, 1)], 30)
    found = moments_statistics(images, moments)
    assert (found[:10, 2].min() > found[10:, 2].max()).item()


def test_prototype_scores_by_hand():
    logits, labels = normals(12, 3, seed=5), torch.arange(12) % 3
    prototypes, classes = normals(2, 3, seed=6), torch.tensor([2, 0])
    found = prototype_scores(logits, labels, prototypes, classes)
    assert found[labels == 1].isnan().all()
    x = logits.double().numpy()
    means = {c: x[labels.numpy() == c].mean(0) for c in range(3)}
    gaps = x - np.stack([means[int(c)] for c in labels])
    covariance = gaps.T @ gaps / 9
    precision = np.linalg.inv(covariance + 0.1 * np.trace(covariance) / 3 * np.eye(3))
    for i, label in enumerate(labels.tolist()):
        if label != 1:
            p = prototypes[0 if label == 2 else 1].double().numpy()
            assert found[i].item() == pytest.approx(gaps[i] @ precision @ (p - means[label]), rel=1e-6)


def test_members_of_a_mean_score_higher():
    """Ten of twenty are in it, so that their mean score is the squared distance of the means, whatever the noise."""
    logits, labels = normals(20, 4, seed=7), torch.zeros(20, dtype=torch.int64)
    scores = prototype_scores(logits, labels, logits[:10].mean(0, keepdim=True), torch.tensor([0]))
    assert scores[:10].mean() > 0
    torch.testing.assert_close(scores[:10].mean(), -scores[10:].mean())


def test_directions_are_products_with_the_gradient():
    features, labels = normals(5, 3, seed=8).double(), torch.tensor([0, 1, 2, 3, 0])
    layer = torch.nn.Linear(3, 4).double()
    weight, bias = normals(4, 3, seed=9).double(), normals(4, seed=10).double()
    length = float((weight.square().sum() + bias.square().sum()).sqrt())
    found = update_directions(features, layer(features).detach(), labels, weight, bias)
    for i in range(5):
        loss = F.cross_entropy(layer(features[i : i + 1]), labels[i : i + 1])
        gradients = torch.autograd.grad(loss, [layer.weight, layer.bias])
        product = -sum((g * d).sum() for g, d in zip(gradients, (weight, bias), strict=True)) / length
        assert found[i].item() == pytest.approx(float(product), rel=1e-6)


class _Task:
    """A task whose banks are averaged, or made of sums."""

    def __init__(self, adds_up):
        self.reduce = type("Reduce", (), {"adds_up": adds_up})()


@pytest.mark.parametrize("adds_up", [True, False])
def test_own_vectors_undo_the_moving_average(adds_up):
    shared, own = normals(5, 2, seed=11), normals(5, 2, seed=12)
    share = 1 if adds_up else 1 / 4
    sent = shared + share * (own - shared)
    sent[2] = shared[2]  # a slot without patches
    message = {"memory": sent, "counts": torch.tensor([1.0, 2, 0, 3, 0])}
    found = own_vectors(_Task(adds_up), {"memory": shared}, message, 3)
    torch.testing.assert_close(found, own[[0, 1, 3]], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own_vectors(_Task(adds_up), {}, message, 3), sent[[0, 1, 3]])


def test_of_the_models_of_all_clients_the_last_layer_changed_from_the_clients_own():
    encoder = torch.nn.Linear(2, 5)
    encoder.num_features = 5
    client = AppleClient(Classifier(encoder, classes=3), rounds=2)
    server = AppleServer(client)
    server.register_clients({0: 3, 1: 5})
    client.context = Context(seed=0, round=1, client=1)
    client.receive(received := server.broadcast(1))
    sent = {name: received[name][1] + 1 for name in client.shared_state()}
    change, _ = weights_sent(client, received, sent)
    assert isinstance(change, ChangedLayer)
    torch.testing.assert_close(change.weight, torch.ones(3, 5))
    torch.testing.assert_close(change.bias, torch.ones(3))
