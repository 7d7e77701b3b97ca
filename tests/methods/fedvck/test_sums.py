"""FedVCK by sums: what an image adds, what the server makes of the sums, runs as a whole, and refusals."""

import numpy as np
import pytest
import torch
from helpers.feddm import mean, std
from helpers.fedvck import FABRIC, MEAN, STD, K, loader, logits_of, make
from helpers.refusals import refusal
from torch.utils.data import ConcatDataset, DataLoader

from lit_fedad.audits.statistics import adversary_view
from lit_fedad.condensation.condense import Descent
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import state_of
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.core.errors import UserError
from lit_fedad.federation.message_check import outliers
from lit_fedad.methods.fedvck_sums import (
    CONSTANT,
    LONGEST,
    MASS,
    TOTAL,
    ClassEmbeddings,
    FedVCKSumsClient,
    FedVCKSumsServer,
    fewest_images,
    mean_embeddings,
)
from lit_fedad.privacy.image_privacy import ImagePrivacy
from lit_fedad.privacy.noised_sums import clipped_parts
from lit_fedad.privacy.secure_aggregation import SecureSum

CLIENT = {"mean": MEAN, "std": STD}
SERVER = {"training": CondensedTraining(2, 4), "descent": Descent(2, 5.0), "images": 3, "size": 8}


@pytest.fixture
def play(federate, data):
    def play(server=None, **settings):
        settings = {"task": make(), "data": data, "rounds": 2, **settings}
        return federate(
            FedVCKSumsClient, FedVCKSumsServer, client=CLIENT, server={**SERVER, **(server or {})}, **settings
        )

    return play


def server_of(**settings):
    server = FedVCKSumsServer(FedVCKSumsClient(make(), **CLIENT), **{**SERVER, **settings})
    server.fabric = FABRIC
    return server


def rows_of(images):
    rows = list(images.dataset)
    return torch.stack([row["image"] for row in rows]), np.array([row["label"] for row in rows])


@pytest.mark.parametrize("known", [False, True])
def test_what_a_client_sends_by_hand(known):
    """Importance of the mixed logits of two models, times features at length 1, in double precision."""
    client = FedVCKSumsClient(make(), alpha=0.3, bias=0.4, **CLIENT)
    other = make(5)
    if known:
        client.previous = {name: entry.clone() for name, entry in other.state_dict().items()}
    images, labels = rows_of(loader([0, 2, 2, 1, 0, 2], 3))
    task = make().double().eval()
    with torch.no_grad():
        features = task.encoder(images.double()).numpy()
    now = logits_of(make().state_dict(), images)
    before = logits_of(other.state_dict(), images) if known else now
    mixed = 0.3 * now + 0.7 * before
    error = np.log(np.exp(mixed).sum(1)) - mixed[np.arange(6), labels]
    weight = 1 / (1 + np.exp(0.4 - error))
    root = np.sqrt(1 + CONSTANT**2)
    total, mass = np.zeros((K, features.shape[1])), np.zeros(K)
    for feature, label, w in zip(features, labels, weight, strict=True):
        total[label] += LONGEST * w * feature / np.linalg.norm(feature) / root
        mass[label] += LONGEST * w * CONSTANT / root
    sent = client.send(loader([0, 2, 2, 1, 0, 2], 3))
    np.testing.assert_allclose(sent[TOTAL].numpy(), total, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sent[MASS].numpy(), mass, rtol=1e-4, atol=1e-6)
    classes, means = mean_embeddings(sent)
    assert classes.tolist() == [0, 1, 2]
    for row, label in enumerate([0, 1, 2]):
        own = labels == label
        lengths = np.linalg.norm(features[own], axis=1, keepdims=True)
        by_hand = (weight[own, None] * features[own] / lengths).sum(0) / weight[own].sum()
        np.testing.assert_allclose(means[row].numpy(), by_hand, rtol=1e-3, atol=1e-4)


def test_no_image_adds_more_than_the_bound_and_the_usual_clip_leaves_it_alone():
    client = FedVCKSumsClient(make(), **CLIENT)
    images = loader([0, 1, 2, 3, 3, 1], 4)
    plain = list(ClassEmbeddings(client).per_image(images))
    lengths = torch.cat(
        [(part[TOTAL].flatten(1).square().sum(1) + part[MASS].square().sum(1)).sqrt() for part in plain]
    )
    assert float(lengths.max()) < LONGEST
    assert ImagePrivacy().clip == LONGEST
    for left, right in zip(
        plain, clipped_parts(ClassEmbeddings(client), images, ImagePrivacy().clip), strict=True
    ):
        torch.testing.assert_close(right, left)


def test_the_model_of_the_last_round_judges_with_the_current_one():
    client, images = FedVCKSumsClient(make(), **CLIENT), loader([0, 1, 2, 3], 4)
    first = {name: entry.clone() for name, entry in client.shared_state().items()}
    client.send(images)
    assert client.previous.keys() == first.keys()
    client.receive(make(5).state_dict())
    sent = client.send(images)
    other = FedVCKSumsClient(make(5), **CLIENT)
    other.previous = first
    torch.testing.assert_close(sent, other.send(images))
    assert float((sent[MASS] - FedVCKSumsClient(make(5), **CLIENT).send(images)[MASS]).abs().max()) > 1e-4


def test_sums_of_parts_are_the_sum_of_all():
    parts = [loader([0, 1, 0], 1), loader([2, 2, 1, 3], 2)]
    whole = DataLoader(ConcatDataset([part.dataset for part in parts]), batch_size=5)
    client = FedVCKSumsClient(make(), **CLIENT)
    found = [client.send(part) for part in parts]
    client.previous = {}
    for name, entry in client.send(whole).items():
        torch.testing.assert_close(found[0][name] + found[1][name], entry, rtol=1e-4, atol=1e-5)


def test_noise_hides_classes_of_few_images():
    sums = ClassEmbeddings(FedVCKSumsClient(make(), **CLIENT))
    total, mass = torch.ones(K, 5, dtype=torch.float64), torch.tensor([4.0, 2.5, 3.5, -1.0]).double()
    found = sums.from_sums(None, {TOTAL: total, MASS: mass}, noise=1.0)
    assert found[MASS].tolist() == [4.0, 0.0, 3.5, 0.0]
    assert found[TOTAL].sum(1).tolist() == [5.0, 0.0, 5.0, 0.0]
    with pytest.raises(HiddenByNoiseError):
        sums.from_sums(None, {TOTAL: total, MASS: mass}, noise=2.0)


def test_condensed_images_approach_the_mean_embeddings():
    client = FedVCKSumsClient(make(), **CLIENT)
    sent = client.send(loader([0, 1, 1, 3, 3, 0], 4))
    losses = {}
    for steps in (1, 60):
        server = server_of(descent=Descent(steps, 20.0))
        server.context = Context(0, 1)
        server.aggregate({0: Update(sent, 6)})
        losses[steps] = server.diagnostics()["condensation_loss"]
        (knowledge,) = server.knowledge.values()
        assert knowledge.labels.tolist() == [0] * 3 + [1] * 3 + [3] * 3
        assert knowledge.images.shape == (9, 3, 8, 8)
        assert server.warnings() == ["no image of class 2 showed in round 1: the model learns nothing of it"]
    assert losses[60] < 0.5 * losses[1]


def test_the_first_step_is_that_of_the_squared_distance_of_means():
    """The gradient that torch gives for the formula, from the same noise."""
    client = FedVCKSumsClient(make(), **CLIENT)
    sent = client.send(loader([0, 1, 1, 0], 4))
    server = server_of(descent=Descent(1, 3.0, momentum=0.0))
    server.context = Context(0, 1)
    server.aggregate({0: Update(sent, 4)})
    noise = torch.randn(6, 3, 8, 8, generator=Context(0, 1).generator("condensation")).requires_grad_()
    encoder = make().encoder.eval()
    features = encoder(noise)
    unit = features / features.norm(dim=1, keepdim=True)
    targets = CONSTANT * sent[TOTAL][:2] / sent[MASS][:2, None]
    loss = sum((unit[3 * k : 3 * k + 3].mean(0) - targets[k]).pow(2).sum() for k in range(2))
    (gradient,) = torch.autograd.grad(loss, noise)
    wanted = (noise.detach() - 3.0 * gradient) * std + mean
    torch.testing.assert_close(server.knowledge[1].images, wanted, rtol=1e-3, atol=1e-4)


def test_the_model_trains_on_the_condensed_images_normalised_as_the_clients_are():
    seen = []

    class Watched(CondensedTraining):
        def __call__(self, model, features, head, images, labels, normalise, *others):
            seen.append((images, normalise(images)))
            return super().__call__(model, features, head, images, labels, normalise, *others)

    server = server_of(training=Watched(1, 4))
    server.context = Context(0, 1)
    server.aggregate({0: Update(FedVCKSumsClient(make(), **CLIENT).send(loader([0, 1], 4)), 2)})
    ((images, normalised),) = seen
    torch.testing.assert_close(normalised, (images - mean) / std)


def test_a_client_with_a_hundred_times_as_many_images_is_no_outlier():
    client = FedVCKSumsClient(make(), **CLIENT)
    sums = client.send(loader([0, 1, 2, 2, 3], 1))
    many = {name: 100 * part for name, part in sums.items()}
    assert outliers({0: Update(sums, 5), 1: Update(many, 500)}, {}, 30, client.upload_spec()) == {}


def test_images_of_earlier_rounds_are_kept(play):
    assert sorted(play(rounds=3).server.knowledge) == [1, 2, 3]
    assert sorted(play({"rounds_kept": 2}, rounds=3).server.knowledge) == [2, 3]


def test_a_secure_sum_and_a_noised_one_with_room_to_spare_give_what_single_messages_give(play, data):
    three = {**data, 2: loader([0, 3, 0, 3, 2], 2)}
    plain = play(rounds=1, data=three).server
    secure = play(rounds=1, data=three, secure_sum=SecureSum()).server
    noised = play(
        rounds=1, data=three, privacy=ImagePrivacy(epsilon=1e9), noise_key=b"secret".ljust(32)
    ).server
    for other in (secure, noised):
        assert other.knowledge[1].labels.tolist() == plain.knowledge[1].labels.tolist()
        torch.testing.assert_close(other.knowledge[1].images, plain.knowledge[1].images, rtol=0, atol=1e-2)


def test_an_observer_of_an_upload_trains_on_images_condensed_to_it(play, tap, exactly):
    def listen(federation, report):
        before = {name: entry.clone() for name, entry in federation.server.weights.items()}
        message = tap.uploads(report.round)[0]
        found = adversary_view(federation, 0, Update(message, 9)).task.state_dict()
        alone = server_of()
        alone.context = federation.server.context
        alone.weights = before
        alone.aggregate({0: Update(message, 9)})
        exactly({name: found[name] for name in before}, alone.weights)
        exactly(federation.server.weights, before)

    heard, quiet = play(channel=tap, after_round=listen), play()
    exactly(state_of(heard.server), state_of(quiet.server))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sums: {**sums, MASS: 3 * sums[MASS], TOTAL: 3 * sums[TOTAL]}, "sums at least"),
        (lambda sums: {**sums, TOTAL: 2 * sums[TOTAL]}, "a mean of length"),
        (lambda sums: {**sums, MASS: torch.zeros(K)}, "a mean of length"),
    ],
)
def test_sums_that_no_images_have_are_refused_on_receipt(change, said):
    sums = FedVCKSumsClient(make(), **CLIENT).send(loader([0, 1, 2, 2], 1))
    server = server_of()
    server.validate(0, Update(sums, 4))
    with refusal(said):
        server.validate(0, Update(change(sums), 4))


def test_as_many_images_as_the_client_has_may_all_count_in_full():
    full = LONGEST * CONSTANT / np.sqrt(1 + CONSTANT**2)
    total, server = torch.zeros(K, make().num_features), server_of()
    server.validate(0, Update({TOTAL: total, MASS: torch.tensor([3 * full, full, 0, 0])}, 4))
    with refusal(r"sums at least 4\.1 images, and has 4"):
        server.validate(0, Update({TOTAL: total, MASS: torch.tensor([3 * full, 1.1 * full, 0, 0])}, 4))


def test_as_many_images_are_counted_as_there_can_be():
    """An image's weight lies between one half and one where there is no bias."""
    sums = FedVCKSumsClient(make(), **CLIENT).send(loader([0, 1, 2, 2, 3, 1], 1))
    assert 3 <= fewest_images(sums) <= 6


def test_a_round_without_an_image_is_refused_in_one_line():
    server = server_of()
    server.context = Context(0, 1)
    nothing = {TOTAL: torch.zeros(K, server.task.num_features), MASS: torch.zeros(K)}
    with pytest.raises(UserError, match="no client has sent the sum of an image"):
        server.aggregate({0: Update(nothing, 4)})
    assert server.trained_on(nothing) is server.weights  # what an observer makes of it


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"images": 0}, r"method\.server\.images=0"),
        ({"size": 0}, r"method\.server\.size=0"),
        ({"channels": 1}, r"method\.server\.channels=1 size=\[8, 8\]: the model takes no such images"),
    ],
)
def test_settings_of_the_server_out_of_range_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        server_of(**settings)


def test_settings_of_the_client_out_of_range_are_refused():
    for name, value in {"alpha": 1.5, "bias": 51.0}.items():
        with pytest.raises(UserError, match=rf"method\.client\.{name}={value} must be"):
            FedVCKSumsClient(make(), **{name: value}, **CLIENT)
    task = make()
    task.encoder.norm = torch.nn.GroupNorm(1, 4)
    with pytest.raises(UserError, match="batch normalisation"):
        FedVCKSumsClient(task, **CLIENT)
