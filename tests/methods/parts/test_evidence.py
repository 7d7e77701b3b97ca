"""What uploads show of images (`Evidence`): the values, with functions that compute the same values of images."""

from types import SimpleNamespace

import pytest
import torch
from helpers.fedvck import CLIENT, FABRIC, loader, make
from helpers.frozen import frozen_encoder
from helpers.summed_bank import summed_bank
from helpers.tiny_pyramid import TinyPyramid
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, TensorSpec
from lit_fedad.contracts.evidence import (
    ChangedLayer,
    SentBank,
    SentImages,
    SentWeights,
    SharedModel,
    SharedMoments,
    SharedPrototypes,
)
from lit_fedad.contracts.task import learned_state
from lit_fedad.memory.moments import Moments, MomentSets
from lit_fedad.methods.fedvck import FedVCKClient
from lit_fedad.methods.fedvck_sums import FedVCKSumsClient
from lit_fedad.methods.gldp import GLDPClient
from lit_fedad.methods.gldp import exchanges as gldp_exchanges
from lit_fedad.methods.parts.bank_evidence import (
    bank_received,
    bank_sent,
    invertible_memory,
    moments_sent,
    predict_with_bank,
    subspace_received,
)
from lit_fedad.methods.parts.condensed_images import IMAGES
from lit_fedad.methods.parts.weight_evidence import invertible_model, weights_received, weights_sent
from lit_fedad.methods.prototype_statistics import PrototypeStatisticsClient
from lit_fedad.methods.prototype_statistics import exchanges as statistics_exchanges
from lit_fedad.tasks.classifier import Classifier
from lit_fedad.tasks.subspace import Subspace


def subspace():
    torch.manual_seed(0)
    return Subspace(TinyPyramid(), grid=4, image_size=32, share=0.5)


def of(task, round=1):
    """A client of a task."""
    return SimpleNamespace(task=task, context=Context(0, round, 0))


def assert_moments_of_its_features(shown, batches):
    assert isinstance(shown, SharedMoments)
    with torch.no_grad():
        rows = [shown.features(batch).flatten(0, 1) for batch in batches]
    expected = Moments.of(rows, len(shown.mean))
    torch.testing.assert_close(shown.mean, expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shown.covariance, expected.covariance, rtol=1e-3, atol=1e-5)


# In a bank the subspace is that of features that are averaged in every layer; the bank's own may not be.
TASKS = [subspace, summed_bank, lambda: summed_bank(average_pool=False, whiten=None, subspace=0.5)]


@pytest.mark.parametrize("make_task", TASKS)
def test_moments_are_those_of_the_features_that_they_are_compared_with(make_task, make_loader):
    task, batches = make_task(), make_loader(5)
    sent = MomentSets.of(task.moments(batches), task.num_features).message()
    (shown,) = moments_sent(of(task), {}, sent)
    assert_moments_of_its_features(shown, batches)
    assert moments_sent(of(task), {}, MomentSets.of((), task.num_features).message()) == []
    assert moments_sent(of(task), {}, {}) == []


@pytest.mark.parametrize("make_task", TASKS)
def test_a_subspace_is_compared_with_the_features_that_it_was_fitted_to(make_task, make_loader):
    task, batches = make_task(), make_loader(5)
    sets = MomentSets.of(task.moments(batches), task.num_features)
    moments = list(sets)[-1]
    received = {"centre": moments.mean[None].float(), "basis": torch.eye(task.num_features)[None]}
    (shown,) = subspace_received(of(task), received)
    with torch.no_grad():
        rows = torch.cat([shown.features(batch).flatten(0, 1) for batch in batches])
    torch.testing.assert_close(rows.mean(0), shown.centre[0], rtol=1e-4, atol=1e-5)
    assert subspace_received(of(task), {}) == []


def test_a_bank_shows_its_filled_slots():
    task = summed_bank(slots=3)
    vectors = torch.arange(3.0)[:, None].expand(3, task.num_features).contiguous()
    sent = {"memory": vectors, "counts": torch.tensor([2.0, 0.0, 1.0])}
    (shown,) = bank_sent(of(task), {}, sent)
    assert torch.equal(shown.vectors, vectors[[0, 2]])
    assert bank_sent(of(task), {}, {**sent, "counts": torch.zeros(3)}) == []
    assert bank_sent(of(task), {}, {}) == bank_received(of(task), {}) == []
    task.load_memory(vectors, torch.ones(3))
    (shown,) = bank_received(of(task), {"memory": vectors})
    assert torch.equal(shown.vectors, vectors)
    predict_with_bank(
        None, of(task), SimpleNamespace(message={"memory": vectors + 1, "radii": torch.ones(3)})
    )
    assert torch.equal(task.memory, vectors + 1)


def test_a_bank_can_be_inverted_where_one_is_sent():
    task = summed_bank()
    form = {"memory": TensorSpec((3, task.num_features))}
    found = invertible_memory(of(task), {}, form)
    assert isinstance(found, SentBank)
    assert not found.ordered
    assert invertible_memory(of(task), {}, {"weight": TensorSpec((1,))}) is None


def assert_means_of_its_logits(shown, batches):
    assert isinstance(shown, SharedPrototypes)
    with torch.no_grad():
        logits = torch.cat([shown.logits(batch) for batch in batches])
    labels = torch.cat([batch["label"] for batch in batches])
    expected = torch.stack([logits[labels == label].mean(0) for label in shown.classes])
    torch.testing.assert_close(shown.means, expected.to(shown.means), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ranks", [False, True])
def test_prototypes_are_of_the_classes_that_count_images(ranks):
    """Two images of a class that are alike have the ranks of their mean."""
    rows = list(loader([0, 1, 3]).dataset)
    images = DataLoader([rows[i] for i in (0, 0, 1, 1, 1, 2, 2)], batch_size=4)
    client = FedVCKClient(make(), **CLIENT, prototype_images=3, ranks=ranks)
    client.context = Context(0, 1, 0)
    client.eval()
    client.condense(images, FABRIC)
    prototypes, model = client.shown(client.send(images))
    assert prototypes.classes.tolist() == [1]
    assert_means_of_its_logits(prototypes, images)
    assert model == SharedModel()
    assert ("ranks" if ranks else "means") in client.discloses[-1].what
    assert FedVCKSumsClient(make()).shown({"total": torch.ones(4, 5)}) == []


def test_class_statistics_show_means_of_classes_and_moments_of_all_images():
    torch.manual_seed(0)
    client = PrototypeStatisticsClient(Classifier(frozen_encoder(), 4, augment=False).eval())
    client.context = Context(0, 0, 0)
    batches, evidence = loader([0, 1, 1, 3, 3, 3], side=16), statistics_exchanges(client).evidence
    prototypes, moments = evidence.sent(client, {}, client.send(batches))
    assert prototypes.classes.tolist() == [0, 1, 3]
    assert_means_of_its_logits(prototypes, batches)
    assert_moments_of_its_features(moments, batches)
    assert evidence.received(client, {"weight": torch.zeros(0, 4, 8)}) == []
    assert evidence.received(client, {"weight": torch.zeros(1, 4, 8)}) == [SharedModel()]


def test_prototypes_that_come_with_a_base_are_means_of_its_features():
    """The live client has the base that the client received."""
    client, batches = GLDPClient(make(1), base_epochs=1, head_epochs=2), loader([0, 1, 1, 3])
    client.context = Context(0, 1, 0)
    sent = client.eval().send(batches)
    client.task.load_state_dict(make().state_dict())
    *_, prototypes = gldp_exchanges(client).evidence.sent(client, client.shared_state(), sent)
    assert prototypes.classes.tolist() == [0, 1, 3]
    assert_means_of_its_logits(prototypes, batches)


@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_shows_its_change_where_both_sides_send_it(bias):
    task = make()
    task.classifier = nn.Linear(task.num_features, 4, bias=bias)
    received = {name: entry.clone() for name, entry in learned_state(task).items()}
    change, model = weights_sent(of(task), received, {name: entry + 2 for name, entry in received.items()})
    assert isinstance(change, ChangedLayer)
    torch.testing.assert_close(change.weight, torch.full((4, task.num_features), 2.0))
    torch.testing.assert_close(change.bias, torch.full((4,), 2.0 * bias))
    assert model == SharedModel()
    base = {name: entry for name, entry in received.items() if not name.startswith("classifier")}
    assert weights_sent(of(task), base, base) == weights_sent(of(task), received, base) == [SharedModel()]
    task.classifier = nn.Sequential(nn.Flatten(), nn.Linear(task.num_features, 4))
    assert weights_sent(of(task), *[learned_state(task)] * 2) == [SharedModel()]


def test_weights_predict_with_a_bank_where_the_task_has_one(make_task):
    weights = {name: weight for name, weight in make_task().named_parameters() if "backbone" not in name}
    assert weights_received(of(make_task()), weights) == []
    assert weights_received(of(make_task()), {**weights, "memory": torch.ones(3, 8)}) == [SharedModel()]
    assert weights_received(of(make()), {"classifier.weight": torch.ones(4, 5)}) == [SharedModel()]
    assert weights_received(of(make()), {"prototypes": torch.ones(4, 5)}) == []


def test_images_are_sent_as_they_are_and_weights_of_classifiers_are_inverted():
    form = {"classifier.weight": TensorSpec((4, 5))}
    images = invertible_model(of(make()), form, {IMAGES: TensorSpec((1, 3, 8, 8))})
    assert isinstance(images, SentImages)
    assert images.images({IMAGES: torch.tensor([0, 51, 255], dtype=torch.uint8)}).tolist() == pytest.approx(
        [0, 0.2, 1]
    )
    assert images.images({IMAGES: torch.tensor([-1.0, 0.25, 2.0])}).tolist() == [0, 0.25, 1]
    assert isinstance(invertible_model(of(make()), form, form), SentWeights)
    assert invertible_model(of(make()), {}, form) is None
    assert invertible_model(of(summed_bank()), form, form) is None
