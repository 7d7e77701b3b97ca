"""FADngs (Dong et al., TNNLS 2024), equation by equation, against loops in NumPy."""

import math

import numpy as np
import pytest
import torch
from helpers.draws import rows, units
from helpers.encoder import ConvEncoder
from torch import nn

from lit_fedad.contracts import Context, Update
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.memory.density import estimate_densities
from lit_fedad.memory.kmeans import plus_plus_seeds
from lit_fedad.methods.fadngs import FADngsClient, FADngsServer
from lit_fedad.methods.parts.ensemble_distillation import attend, distillation_loss
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import CRAD, SimCLR

TAU = 0.5


def contrastive(seed: int = 0, **overrides) -> Contrastive:
    torch.manual_seed(seed)
    parts = {"warmup": 0, "rounds": 10, "projection": 4, **overrides}
    return Contrastive(ConvEncoder(), CRAD(TAU), SimCLR(TAU), views=ContrastiveViews(), **parts)


def covariance_by_hand(members: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return sum(np.outer(row - mean, row - mean) for row in members) / len(members)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt(a @ a) / np.sqrt(b @ b))


def overlapping_classes() -> tuple[np.ndarray, np.ndarray]:
    """Rows of three classes that no clustering tells apart, and their classes."""
    classes = np.arange(300) % 3
    return rows(300, 4).numpy() + 1.5 * np.eye(4)[classes], classes


def weak_clusters(features: np.ndarray, clusters: int, seed: int, steps: int) -> list[np.ndarray]:
    """Members of Lloyd's clusters after some steps, from the seeds that the same generator gives."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.from_numpy(features)
    centroids = features[plus_plus_seeds(points, clusters, torch.ones(len(points)).double(), draw).numpy()]
    for step in range(steps + 1):
        owner = ((features[:, None] - centroids) ** 2).sum(2).argmin(1)
        if step < steps:
            centroids = np.stack([features[owner == k].mean(0) for k in range(clusters)])
    return [np.flatnonzero(owner == k) for k in range(clusters)]


def test_equation_1():
    z = rows(20, 4)
    mean = sum(z.numpy()) / 20
    found = estimate_densities(z, 1, 0.1, torch.Generator())
    np.testing.assert_allclose(found.mean.numpy(), mean[None], rtol=1e-6)
    assert found.count.tolist() == [20]


def test_equation_2():
    z = rows(20, 4)
    expected = covariance_by_hand(z.numpy(), sum(z.numpy()) / 20)
    found = estimate_densities(z, 1, 0.0, torch.Generator())
    np.testing.assert_allclose(found.covariance[0].numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rho", [0.1, 0.7, 1.0])
def test_equation_3(rho):
    z = rows(20, 4)
    sample = covariance_by_hand(z.numpy(), sum(z.numpy()) / 20)
    expected = np.array(
        [
            [(1 - rho) * sample[i, j] + (rho * np.trace(sample) / 4 if i == j else 0) for j in range(4)]
            for i in range(4)
        ]
    )
    found = estimate_densities(z, 1, rho, torch.Generator())
    np.testing.assert_allclose(found.covariance[0].numpy(), expected, rtol=1e-5, atol=1e-7)


def test_equation_4():
    # The noise of a mean is what members of other classes add to it, and stopping early is what lets them in.
    features, classes = overlapping_classes()
    found = estimate_densities(torch.from_numpy(features), 3, 0.1, torch.Generator().manual_seed(1))
    clusters = weak_clusters(features, 3, seed=1, steps=5)
    for k, members in enumerate(clusters):
        largest = np.bincount(classes[members]).argmax()
        of_class = members[classes[members] == largest]
        noise = members[classes[members] != largest]
        assert len(noise)
        expected = features[of_class].sum(0) / len(members) + features[noise].sum(0) / len(members)
        np.testing.assert_allclose(found.mean[k].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not all(
        np.array_equal(early, late)
        for early, late in zip(clusters, weak_clusters(features, 3, seed=1, steps=60), strict=True)
    )


def test_equation_5():
    features, classes = overlapping_classes()
    found = estimate_densities(torch.from_numpy(features), 3, 0.0, torch.Generator().manual_seed(1))
    for k, members in enumerate(weak_clusters(features, 3, seed=1, steps=5)):
        largest, mean = np.bincount(classes[members]).argmax(), features[members].mean(0)
        expected = np.zeros((4, 4))
        for part in (members[classes[members] != largest], members[classes[members] == largest]):
            expected += sum(np.outer(features[i] - mean, features[i] - mean) for i in part)
        np.testing.assert_allclose(found.covariance[k].numpy(), expected / len(members), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_equation_6():
    task, images = contrastive(), rows(7, 3, 8, 8).float()
    mean, root = rows(3, 4, seed=1), rows(3, 4, 4, seed=2)
    covariance = root @ root.mT + 0.1 * torch.eye(4)
    task.densities.set(mean, covariance)
    features = task.encoder(images)
    scores = task.predict(features, {}).image_score.numpy()
    for z, score in zip(task.projection(features).double().numpy(), scores, strict=True):
        z = z / np.sqrt(z @ z)
        distances = [
            (z - m) @ np.linalg.inv(c) @ (z - m)
            for m, c in zip(mean.numpy(), covariance.numpy(), strict=True)
        ]
        assert score == pytest.approx(min(distances), rel=1e-4)


def test_equation_7():
    # One image is normal: each of its two views is an anchor with the other as its one positive.
    z = rows(8, 3, 5)
    normal = torch.tensor([False, True, False])
    views = z.numpy().reshape(24, 5)
    anchors = [1, 4]
    total = 0.0
    for anchor, positive in (anchors, anchors[::-1]):
        above = math.exp(cosine(views[anchor], views[positive]) / TAU)
        below = sum(math.exp(cosine(views[anchor], views[j]) / TAU) for j in range(24) if j != anchor)
        total += -1 / 1 * math.log(above / below)
    assert float(CRAD(TAU)(z, {"normal": normal})["loss"]) == pytest.approx(total / 2, rel=1e-5)


def test_the_literal_preset_is_as_printed():
    """Eq. 7 without a factor, and Eq. 6 of z; the distillation's temperatures and rate stay what the paper has."""
    config = compose(["method=fadngs_literal"])
    given = {key: value for key, value in config["task"].items() if key != "encoder"}
    task = build(given, encoder=ConvEncoder())
    z = rows(8, 3, 5)
    views, normal = z.numpy().reshape(24, 5), torch.tensor([True, False, True])
    anchors, losses = [0, 2, 3, 5], []
    for anchor in anchors:
        below = sum(math.exp(cosine(views[anchor], views[j]) / TAU) for j in range(24) if j != anchor)
        positives = [at for at in anchors if at != anchor]
        above = sum(math.exp(cosine(views[anchor], views[at]) / TAU) for at in positives)
        losses.append(-1 / len(positives) * math.log(above / below))
    task.round = task.warmup + 1
    assert float(task.current_loss(z, {"normal": normal})["loss"]) == pytest.approx(np.mean(losses), rel=1e-5)
    # The warm-up's SimCLR has no factor either.
    task.round, total = 1, 0.0
    pair = z[:2].numpy().reshape(6, 5)
    for i in range(6):
        below = sum(math.exp(cosine(pair[i], pair[j]) / TAU) for j in range(6) if j != i)
        total -= math.log(math.exp(cosine(pair[i], pair[(i + 3) % 6]) / TAU) / below)
    assert float(task.current_loss(z[:2], {})["loss"]) == pytest.approx(total / 6, rel=1e-5)
    width = task.projected
    mean, root = rows(2, width, seed=1), rows(2, width, width, seed=2)
    covariance = root @ root.mT / width + 0.5 * torch.eye(width)
    task.densities.set(mean, covariance)
    features = rows(5, task.num_features, seed=3).float()
    with torch.no_grad():
        found = task.predict(features, {}).image_score.numpy()
        projected = task.projection(features).double().numpy()
    for score, row in zip(found, projected, strict=True):
        unit = row / np.sqrt(row @ row)
        distances = [
            (unit - m) @ np.linalg.solve(c, unit - m)
            for m, c in zip(mean.numpy(), covariance.numpy(), strict=True)
        ]
        assert score == pytest.approx(min(distances), rel=1e-3)
    distillation = config["method"]["server"]["distillation"]
    assert (distillation["teacher_temperature"], distillation["student_temperature"]) == (TAU, TAU)
    assert distillation["learning_rate"] == 0.03


def test_equation_8():
    task, z = contrastive(normal_share=0.95), nn.functional.normalize(rows(40, 4)).float()
    task.densities.set(torch.zeros(1, 4), torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))[None])
    place = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    scores = [float((row**2 / np.array([1, 2, 3, 4])).sum()) for row in z.double().numpy()]
    task.select(z, place)
    images = torch.rand(40, 3, 8, 8)
    normal = task.view({"image": images, "index": place})["normal"]
    # 95 % of 40 images are 38.
    delta = sorted(scores)[37]
    assert normal.tolist() == [score <= delta for score in scores]


def test_equation_9():
    normal = [True, False, True, True]
    loss = CRAD(TAU)
    images = torch.rand(4, 3, 8, 8)
    views = loss.views(images, lambda batch: batch)
    z = rows(8, 4, 5)
    # What each view shows: the image, and by how much it is turned.
    shown = {}
    for view in range(8):
        for i in range(4):
            turns = [t for t in range(4) if torch.equal(views[view, i], torch.rot90(images[i], t, (1, 2)))]
            shown[view, i] = (i, turns[0])
    plus = [at for at, (i, turns) in shown.items() if turns == 0 and normal[i]]
    minus = [at for at, (i, turns) in shown.items() if turns == 0 and not normal[i]]
    minus += [at for at, (_, turns) in shown.items() if turns > 0]
    assert (len(plus), len(minus)) == (6, 2 + 24)
    losses = []
    for anchor in plus:
        others = [at for at in plus if at != anchor]
        similarity = {at: math.exp(cosine(z[anchor].numpy(), z[at].numpy()) / TAU) for at in others + minus}
        above, below = sum(similarity[at] for at in others), sum(similarity.values())
        losses.append(-1 / len(others) * math.log(above / below))
    found = loss(z, {"normal": torch.tensor(normal)})["loss"]
    assert float(found) == pytest.approx(np.mean(losses), rel=1e-5)


def test_equation_10():
    task = contrastive()
    server = FADngsServer(FADngsClient(task))
    server.context = Context(0, 1)
    sizes = {0: 5, 1: 20, 2: 15}
    messages = {c: {k: rows(*v.shape, seed=c).float() for k, v in server.weights.items()} for c in sizes}
    server.aggregate({c: Update(messages[c], sizes[c]) for c in sizes})
    assert server.weights.keys() == messages[0].keys()
    for name, merged in server.weights.items():
        expected = sum(sizes[c] / 40 * messages[c][name].double().numpy() for c in sizes)
        np.testing.assert_allclose(merged.numpy(), expected, rtol=1e-5, atol=1e-6)


def similarity_distribution(z: np.ndarray, queue: np.ndarray, tau: float) -> list[float]:
    """Eq. 11 and Eq. 12."""
    exponents = [math.exp(cosine(z, d) / tau) for d in queue]
    return [e / sum(exponents) for e in exponents]


def test_equation_11():
    z, queue = units(3, 5), units(9, 5, seed=1)
    _, mean = attend(z, queue, 0.2)
    for i in range(3):
        p = similarity_distribution(z[i].numpy(), queue.numpy(), 0.2)
        expected = sum(p_j * d_j for p_j, d_j in zip(p, queue.numpy(), strict=True))
        np.testing.assert_allclose(mean[i].numpy(), expected, rtol=1e-10)


def test_equation_12():
    # A very cold teacher that stands on key j is certain of it, and what is left of Eq. 13 is -log q_j.
    student, queue = units(9, 5, seed=2), units(9, 5, seed=1)
    for j in range(9):
        loss = distillation_loss(
            student[j : j + 1], queue[None, j : j + 1], queue[None], torch.ones(1), 1e-4, 0.2
        )
        q = similarity_distribution(student[j].numpy(), queue.numpy(), 0.2)
        assert float(loss) == pytest.approx(-math.log(q[j]), rel=1e-10)


def test_equation_13():
    student, teachers, queues = units(4, 5), units(3, 4, 5, seed=1), units(3, 9, 5, seed=2)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    total = 0.0
    for c in range(3):
        for x in range(4):
            p = similarity_distribution(teachers[c, x].numpy(), queues[c].numpy(), 0.1)
            q = similarity_distribution(student[x].numpy(), queues[c].numpy(), 0.3)
            total += float(weights[c]) * sum(-p_j * math.log(q_j) for p_j, q_j in zip(p, q, strict=True))
    # The mean over the batch, so that the learning rate does not depend on its size.
    loss = distillation_loss(student, teachers, queues, weights, 0.1, 0.3)
    assert float(loss) == pytest.approx(total / 4, rel=1e-10)
