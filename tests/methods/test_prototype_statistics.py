"""Prototype statistics: the classifier of one client with all images, whatever the partition and the order."""

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.utils.data import ConcatDataset, DataLoader

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.errors import UserError
from lit_fedad.methods.prototype_statistics import (
    ImagePrototypes,
    PrototypeStatisticsClient,
    PrototypeStatisticsServer,
)
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.privacy.image_privacy import ImagePrivacy
from lit_fedad.tasks.classifier import Classifier

CLASSES = 3


def make_task(hidden=0):
    torch.manual_seed(0)
    return Classifier(FrozenEncoder(TinyPyramid(), size=32, hidden=hidden), CLASSES, augment=False)


def labelled(images, seed=0, classes=CLASSES):
    draw = torch.Generator().manual_seed(seed)
    data = []
    for number in range(images):
        label = number % classes
        image = torch.randn(3, 32, 32, generator=draw)
        image[label] += 1
        data.append({"image": image, "label": label, "index": number})
    return DataLoader(data, batch_size=4)


@pytest.fixture
def play(federate):
    def play(data, rounds=1, **settings):
        return federate(
            PrototypeStatisticsClient,
            PrototypeStatisticsServer,
            task=make_task(),
            data=data,
            rounds=rounds,
            server=settings,
        )

    return play


def joined(data):
    return DataLoader(ConcatDataset([loader.dataset for loader in data.values()]), batch_size=5)


def table(loader):
    task = make_task().eval()
    pairs = [(task.encoder.features(batch["image"]), batch["label"]) for batch in loader]
    return torch.cat([f for f, _ in pairs]).double(), torch.cat([y for _, y in pairs])


@pytest.mark.parametrize("sizes", [(12,), (5, 7), (3, 4, 5)])
def test_is_the_central_classifier_whatever_the_partition(play, sizes):
    data = {client: labelled(size, client) for client, size in enumerate(sizes)}
    one, many = play({0: joined(data)}).server.classifier, play(data).server.classifier
    torch.testing.assert_close(many["weight"], one["weight"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(many["bias"], one["bias"], rtol=1e-3, atol=1e-3)


def test_decides_as_linear_discriminant_analysis(play):
    data = {0: labelled(60, 0), 1: labelled(45, 1)}
    found = play(data, shrinkage=1e-6).server.classifier
    features, labels = table(joined(data))
    reference = LinearDiscriminantAnalysis(solver="lsqr", priors=[1 / CLASSES] * CLASSES)
    reference.fit(features.numpy(), labels.numpy())
    scores = features @ found["weight"][0].T.double() + found["bias"][0]
    by_hand = torch.from_numpy(reference.decision_function(features.numpy()))
    gaps, wanted = scores - scores.mean(1, keepdim=True), by_hand - by_hand.mean(1, keepdim=True)
    torch.testing.assert_close(gaps, wanted, rtol=2e-2, atol=0.05 * float(wanted.abs().max()))


def test_classes_that_lie_close_together_are_told_apart_in_single_precision():
    server = PrototypeStatisticsServer(PrototypeStatisticsClient(make_task()), shrinkage=1e-6)
    (classes, channels), spread = server.mean.shape, 1e-3
    draw = torch.Generator().manual_seed(0)
    means = 30 + spread * torch.randn(classes, channels, generator=draw, dtype=torch.float64)
    server.add(torch.full((classes,), 9), means, spread**2 * torch.eye(channels, dtype=torch.float64))
    server.learn()
    images = means.float()
    found = images @ server.classifier["weight"][0].T + server.classifier["bias"][0]
    squared = torch.cdist(images.double(), means).square() / spread**2
    torch.testing.assert_close(found.softmax(1).double(), (-squared / 2).softmax(1), rtol=0, atol=0.05)


def test_classes_that_nobody_shows_are_never_chosen(play):
    found = play({0: labelled(8, classes=2)}).server.classifier
    scores = table(labelled(9))[0].float() @ found["weight"][0].T + found["bias"][0]
    assert scores.argmax(1).max() == 1


def test_one_image_of_each_class_is_learnt_too(play):
    """Nothing varies within a class: the nearest image decides, and no class that nobody shows."""
    images = labelled(2)
    found = play({0: images}).server.classifier
    features, labels = table(images)
    scores = features @ found["weight"][0].T.double() + found["bias"][0]
    assert scores.argmax(1).tolist() == labels.tolist()
    opposed = -features @ found["weight"][0].T.double() + found["bias"][0]
    assert set(opposed.argmax(1).tolist()) <= set(labels.tolist())


def test_later_rounds_send_nothing_and_change_nothing(play):
    data = {0: labelled(6), 1: labelled(9, 1)}
    first, third = play(data, rounds=1), play(data, rounds=3)
    assert torch.equal(first.server.classifier["weight"], third.server.classifier["weight"])
    assert [sum(report.elements_up.values()) > 0 for report in third.history] == [True, False, False, False]


def test_the_clients_own_frequencies_are_another_classifier():
    client = PrototypeStatisticsClient(make_task(), prior="own")
    client.own_counts = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)
    batch = next(iter(labelled(4)))
    balanced = client.task.predict_step(batch).logits
    found = client.predict_step(batch)
    torch.testing.assert_close(found.logits, balanced + torch.tensor([0.25, 0.75, 1e-6]).log())
    assert torch.equal(found.others["prior"], found.logits)
    client.prior = "balanced"
    assert torch.equal(client.predict_step(batch).logits, balanced)


def test_the_scale_at_which_the_encoder_gives_features_does_not_matter():
    client = PrototypeStatisticsClient(make_task())
    server = PrototypeStatisticsServer(client)
    server.aggregate({0: Update(client.send(labelled(9)), 9)})
    client.receive(server.broadcast(0))
    found, features = server.classifier, table(labelled(3, seed=1))[0].float()
    (batch, *_) = labelled(3, seed=1)
    wanted = features @ found["weight"][0].T + found["bias"][0]
    torch.testing.assert_close(
        client.predict_step(batch).logits, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max())
    )


def test_a_trained_encoder_is_refused():
    with pytest.raises(UserError, match="features.hidden=0"):
        PrototypeStatisticsClient(make_task(hidden=4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"count": torch.tensor([[1, 1, 1]])}, "counts 3 images of its 6"),
        ({"count": torch.tensor([[9, 1, 1]])}, "counts 11 images of its 6"),
        ({"within": torch.arange(36.0)[None] - 18}, "negative variance"),
        ({"mean": torch.full((1, CLASSES, 8), 0.9)}, "a mean square length of 6.4"),
    ],
)
def test_statistics_that_cannot_be_are_refused(change, said):
    client = PrototypeStatisticsClient(make_task())
    server = PrototypeStatisticsServer(client)
    message = client.send(labelled(6))
    server.validate(0, Update(message, 6))
    with pytest.raises(UserError, match=said):
        server.validate(0, Update({**message, **change}, 6))


def noised(federate, data, **privacy):
    return federate(
        PrototypeStatisticsClient,
        PrototypeStatisticsServer,
        task=make_task(),
        data=data,
        rounds=1,
        privacy=ImagePrivacy(**{"epsilon": 1e9, "clip": 1.0, **privacy}),
        noise_key=bytes(32),
    )


def test_under_a_large_budget_it_is_the_same_classifier(federate, play):
    data = {client: labelled(size, client) for client, size in enumerate((12, 15, 18))}
    plain, found = play(data), noised(federate, data)
    assert [report.noised_sums for report in found.history] == [1, 0]
    assert found.server.count.equal(plain.server.count)
    torch.testing.assert_close(found.server.mean, plain.server.mean, rtol=0.01, atol=0.01)
    torch.testing.assert_close(found.server.scatter, plain.server.scatter, rtol=0.05, atol=0.05)
    for client in data:  # a client's own prior is counted, and stays with it
        assert found.pool.get(client)["own_counts"].equal(plain.pool.get(client)["own_counts"])


def test_every_image_adds_the_same_norm_whatever_it_shows():
    client = PrototypeStatisticsClient(make_task())
    sums = ImagePrototypes(client)
    for parts in sums.per_image(labelled(9)):
        norms = sum(part.flatten(1).square().sum(1) for part in parts.values())
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-5, atol=1e-5)


def test_classes_that_noise_hides_are_taken_for_empty(federate):
    rare = labelled(40, 0, classes=1), labelled(41, 1, classes=2)
    with pytest.raises(HiddenByNoiseError, match="the noise hides the images"):
        noised(federate, dict(enumerate(rare)), epsilon=0.05)
    found = noised(federate, dict(enumerate(rare)), epsilon=8.0)
    assert found.server.count[2] == 0
    assert found.server.count[0] > 0


def test_mixed_precision_rounds_no_logit():
    """Rows of the classifier are long, and their products with an image of another class almost as large."""
    client = PrototypeStatisticsClient(make_task())
    server = PrototypeStatisticsServer(client)
    server.aggregate({0: Update(client.send(labelled(9)), 9)})
    client.receive(server.broadcast(0))
    (batch, *_) = labelled(3, seed=1)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = client.predict_step(batch).logits
    assert torch.equal(mixed, client.predict_step(batch).logits)


@pytest.mark.parametrize(("seen", "shown"), [(2.5, False), (2.7, True)])
def test_what_noised_sums_say_of_classes_by_hand(seen, shown):
    """40 images at (1, 0), 10 at (0.6, 0.8), and some at (0, 1), of which noise of 0.5 hides 2.598."""
    sums = {
        "count": torch.tensor([40.0, 10.0, seen]).double(),
        "total": torch.tensor([[40.0, 0.0], [6.0, 8.0], [0.0, seen]]).double(),
        "product": torch.tensor([40 + 3.6, 4.8 * 2**0.5, 6.4 + seen]).double(),
    }
    sums = {name: part / 3**0.5 for name, part in sums.items()}
    found = ImagePrototypes(PrototypeStatisticsClient(make_task())).from_sums(None, sums, noise=0.5)
    assert found["count"].tolist() == [[40, 10, 3 * shown]]
    expected = torch.tensor([[[1.0, 0.0], [0.6, 0.8], [0.0, 1.0 * shown]]])
    torch.testing.assert_close(found["mean"], expected)
    # Images of classes that do not show are in the products of all, and not between the means.
    beside = 0.0 if shown else seen / 50
    torch.testing.assert_close(found["within"], torch.tensor([[0.0, 0.0, beside]]), rtol=1e-5, atol=1e-6)


def test_each_stage_is_measured_once():
    client, sent = PrototypeStatisticsClient(make_task()), []
    for round, stage in enumerate([0, 0, 1, 1, 2]):
        client.context = Context(0, round, 0, stage=stage)
        sent.append(len(client.send(labelled(4))["count"]))
    assert sent == [1, 0, 1, 0, 1]


def test_no_shrinkage_is_refused():
    with pytest.raises(UserError, match=r"method\.server\.shrinkage=0\.0 must be above 0"):
        PrototypeStatisticsServer(PrototypeStatisticsClient(make_task()), shrinkage=0.0)
