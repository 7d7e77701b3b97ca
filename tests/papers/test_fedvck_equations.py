"""FedVCK (Yan et al., AAAI 2025), equation by equation, against loops in NumPy."""

import numpy as np
import pytest
import torch
from helpers.draws import rows
from lightning.fabric import Fabric
from torch import nn

from lit_fedad.condensation.batch_statistics import apply, record
from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.kernels import class_mmd, kernel_matrix, mmd
from lit_fedad.condensation.relations import (
    RelationalContrast,
    class_means,
    hard_negatives,
    importance,
    merged_prototypes,
)
from lit_fedad.condensation.training import CondensedTraining, ExtraLoss

FABRIC = Fabric(accelerator="cpu", devices=1)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


class Encoder(nn.Sequential):
    """Two convolutions, each with batch normalisation; 6 features."""

    num_features = 6

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for layer in (self[1], self[4]):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)


def test_eq_2_is_the_distance_of_means_and_eq_3_with_a_linear_kernel():
    real, synthetic = rows(9, 5), rows(4, 5, seed=1)
    by_hand = sum((real.numpy().mean(0) - synthetic.numpy().mean(0)) ** 2)
    double_sums = sum(
        sign * np.mean([[a @ b for a in x.numpy()] for b in y.numpy()])
        for sign, x, y in ((1, real, real), (1, synthetic, synthetic), (-2, real, synthetic))
    )
    assert by_hand == pytest.approx(double_sums)
    assert float(mmd(real, synthetic)) == pytest.approx(by_hand)


@pytest.mark.parametrize("kernel", ["polynomial", "gaussian", "laplace"])
def test_eq_3_of_other_kernels_is_its_double_sums(kernel):
    real, synthetic = rows(6, 3), rows(4, 3, seed=1) + 1
    everything = torch.cat([real, synthetic]).numpy()
    spread = np.mean(
        [sum((a - b) ** 2) for i, a in enumerate(everything) for b in np.delete(everything, i, 0)]
    )

    def value(a, b):
        squared = sum((a - b) ** 2)
        return {
            "polynomial": (a @ b + 1) ** 2,
            "gaussian": sum(np.exp(-squared / (spread * 2.0**k)) for k in range(-2, 3)),
            "laplace": sum(np.exp(-g * squared) for g in (0.1, 1, 5)),
        }[kernel]

    def mean(x, y):
        return np.mean([[value(a, b) for b in y.numpy()] for a in x.numpy()])

    by_hand = mean(real, real) + mean(synthetic, synthetic) - 2 * mean(real, synthetic)
    assert float(mmd(real, synthetic, kernel)) == pytest.approx(by_hand, rel=1e-9)


def test_eq_4_replaces_the_statistics_of_every_normalisation():
    encoder = Encoder().double()
    real, synthetic = rows(7, 3, 8, 8), rows(2, 3, 8, 8, seed=1)
    features, statistics = record(encoder, real)

    def normalised(maps, of, layer):
        mean, variance = of.mean((0, 2, 3)), of.var((0, 2, 3), unbiased=False)
        scale = layer.weight / (variance + layer.eps).sqrt()
        return (maps - mean[:, None, None]) * scale[:, None, None] + layer.bias[:, None, None]

    first, second = encoder[0], encoder[3]
    real_1 = normalised(first(real), first(real), encoder[1]).relu()
    synthetic_1 = normalised(first(synthetic), first(real), encoder[1]).relu()
    of_real = normalised(second(real_1), second(real_1), encoder[4]).mean((2, 3))
    of_synthetic = normalised(second(synthetic_1), second(real_1), encoder[4]).mean((2, 3))
    torch.testing.assert_close(features, of_real, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(apply(encoder, synthetic, statistics), of_synthetic, rtol=1e-6, atol=1e-6)


def test_eq_4_with_the_real_images_reproduces_their_features():
    encoder = Encoder()
    images = rows(5, 3, 8, 8).float()
    features, statistics = record(encoder, images)
    assert torch.equal(apply(encoder, images, statistics), features)


def test_eqs_5_to_7_weigh_by_the_error_of_two_models():
    current, previous, labels = rows(6, 4), rows(6, 4, seed=1), torch.tensor([0, 1, 2, 3, 0, 1])
    alpha, b = 0.7, 0.3
    errors = [
        -np.log(softmax(alpha * now + (1 - alpha) * before)[label])
        for now, before, label in zip(current.numpy(), previous.numpy(), labels, strict=True)
    ]
    by_hand = 1 / (1 + np.exp(-np.array(errors) + b))
    found = importance(current, previous, labels, alpha, b)
    np.testing.assert_allclose(found.numpy(), by_hand)


def test_eq_8_images_are_drawn_so_often():
    """A real batch of the condensation holds each image in proportion to its chance."""
    real = torch.arange(4.0)[:, None, None, None].expand(4, 1, 1, 1)
    weights = [torch.tensor([0.1, 0.9]), torch.tensor([0.5, 0.5])]
    seen = []

    def distance(batch, images):
        seen.append(batch.images.flatten().repeat_interleave(batch.times))
        return images.sum()

    Condensation(steps=20, batch=100, augment=False)(
        torch.zeros(2, 1, 1, 1), [1, 1], real, weights, distance, torch.Generator().manual_seed(0), FABRIC
    )
    shares = torch.stack(seen).view(20, 2, 100)
    assert set(shares[:, 0].unique().tolist()) == {0, 1}
    assert set(shares[:, 1].unique().tolist()) == {2, 3}
    assert float(shares[:, 0].mean()) == pytest.approx(0.9, abs=0.03)
    assert float(shares[:, 1].mean()) == pytest.approx(2.5, abs=0.05)


@pytest.mark.parametrize("kernel", ["linear", "gaussian"])
def test_eq_9_sums_over_classes(kernel):
    real, synthetic, counts = rows(9, 4), rows(7, 4, seed=1), [1, 4, 2]
    by_hand = sum(
        float(mmd(real[3 * i : 3 * i + 3], synthetic[sum(counts[:i]) : sum(counts[: i + 1])], kernel))
        for i in range(3)
    )
    assert float(class_mmd(real, synthetic, torch.ones(9), [3, 3, 3], counts, kernel)) == pytest.approx(
        by_hand
    )


def test_eq_9_descends_by_sgd_with_momentum_and_clipping():
    start, rate, momentum, clip = rows(3, 1, 2, 2), 0.5, 0.5, 0.2
    real, target = rows(5, 1, 2, 2, seed=1), rows(4, seed=2)

    def distance(batch, images):
        return (images.flatten(1).mean(0) - target).square().sum()

    found, losses = Condensation(4, rate, momentum, clip, batch=2, augment=False)(
        start, [3], real, [torch.ones(5)], distance, torch.Generator(), FABRIC
    )
    x, velocity, by_hand = start.flatten(1).numpy(), np.zeros((3, 4)), []
    for _ in range(4):
        off = x.mean(0) - target.numpy()
        by_hand.append(off @ off)
        gradient = np.tile(2 * off / 3, (3, 1))
        gradient *= min(1, clip / (np.linalg.norm(gradient) + 1e-6))
        velocity = momentum * velocity + gradient
        x = x - rate * velocity
    np.testing.assert_allclose(found.flatten(1).numpy(), x, rtol=1e-6)
    np.testing.assert_allclose(losses, by_hand, rtol=1e-6)


def test_eq_12_weighs_clients_by_their_images():
    sent = torch.cat([rows(2, 3), rows(1, 3, seed=1)])
    found = merged_prototypes(sent, torch.tensor([4, 6, 2]), torch.tensor([0, 2, 2]), 3)
    torch.testing.assert_close(found[0].double(), sent[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[2].double(), (6 * sent[1] + 2 * sent[2]) / 8, rtol=1e-6, atol=1e-6)
    assert found[1].isnan().all()


def test_eq_13_hard_negatives_are_the_largest_logits_of_other_classes():
    draw = np.random.default_rng(0)
    prototypes = draw.normal(size=(6, 6))
    found = hard_negatives(torch.from_numpy(prototypes), torch.ones(6, dtype=torch.bool), 3)
    for c in range(6):
        others = sorted((j for j in range(6) if j != c), key=lambda j: -prototypes[c, j])
        assert set(found[c].nonzero()[:, 0].tolist()) == set(others[:3])
    assert not found.diagonal().any()


def test_eq_13_knows_no_negative_without_prototypes():
    prototypes = torch.arange(16.0).view(4, 4)
    prototypes[1] = torch.nan
    present = torch.tensor([True, True, False, True])
    found = hard_negatives(prototypes, present, 9)
    assert found.tolist() == [
        [False, True, False, True],
        [False] * 4,
        [True, True, False, True],
        [True, True, False, False],
    ]


def test_eq_14_is_the_mean_of_norm_1():
    features, labels = rows(5, 3), torch.tensor([2, 0, 2, 0, 2])
    found = class_means(features, labels, 4)
    for label in (0, 2):
        mean = features[labels == label].numpy().mean(0)
        np.testing.assert_allclose(found[label].numpy(), mean / np.linalg.norm(mean))
    assert not found[[1, 3]].any()


@pytest.mark.parametrize("with_own", [True, False])
def test_eq_15_contrasts_with_hard_negatives(with_own):
    torch.manual_seed(0)
    prototypes = class_means(rows(4, 5), torch.tensor([0, 1, 2, 2]), 4).float()
    negatives = torch.zeros(4, 4, dtype=torch.bool)
    negatives[0, 1] = negatives[0, 2] = negatives[2, 1] = True
    loss = RelationalContrast(prototypes, negatives, hidden=3, temperature=0.5, with_own=with_own).eval()
    features, labels = rows(5, 5, seed=3).float(), torch.tensor([0, 2, 1, 3, 0])
    by_hand = []
    for z, c in zip(loss.head(features).detach().numpy(), labels.tolist(), strict=True):
        if c in (1, 3):  # no hard negatives; no prototype
            continue
        s = prototypes.numpy() @ (z / np.linalg.norm(z)) / 0.5
        others = [j for j in range(4) if negatives[c, j] or (with_own and j == c)]
        by_hand.append(-np.log(np.exp(s[c]) / sum(np.exp(s[j]) for j in others)))
    assert float(loss(features, labels).detach()) == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_eq_15_of_images_without_hard_negatives_is_nothing():
    loss = RelationalContrast(rows(2, 5).float(), torch.zeros(2, 2, dtype=torch.bool))
    found = loss(rows(3, 5).float(), torch.tensor([0, 1, 1]))
    assert float(found.detach()) == 0
    found.backward()


def test_eq_16_adds_the_contrast_to_cross_entropy():
    """One step on all images at once: the gradient is that of the sum."""
    torch.manual_seed(0)
    base, head = nn.Linear(4, 3), nn.Linear(3, 2)
    model = nn.Sequential(base, head)
    extra = nn.Linear(3, 1)
    images, labels = rows(6, 4).float(), torch.tensor([0, 1, 1, 0, 1, 0])

    class Extra(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = extra

        def forward(self, features, labels):
            return (self.layer(features)[:, 0] * labels).mean()

    loss = (
        nn.functional.cross_entropy(model(images), labels) + 0.3 * (extra(base(images))[:, 0] * labels).mean()
    )
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(loss, parameters)
    expected = [p.detach() - 0.1 * g for p, g in zip(parameters, gradients, strict=True)]
    report = CondensedTraining(1, 6, learning_rate=0.1, momentum=0, weight_decay=0, augment=False)(
        model,
        base,
        head,
        images,
        labels,
        lambda x: x,
        torch.Generator(),
        FABRIC,
        ExtraLoss(Extra(), 0.3, 0.01),
    )
    for found, wanted in zip(parameters, expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted)
    assert report["server_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_a_kernel_matrix_of_equal_points_is_symmetrical():
    x = rows(4, 3)
    for kernel in ("linear", "polynomial", "gaussian", "laplace"):
        found = kernel_matrix(x, x, kernel)
        torch.testing.assert_close(found, found.T)
