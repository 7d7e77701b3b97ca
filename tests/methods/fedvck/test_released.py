"""FedVCK as released: each difference by itself."""

import numpy as np
import pytest
import torch
from helpers.fedvck import CLIENT, FABRIC, SERVER, K, loader, make, upload

from lit_fedad.condensation.relations import RelationalContrast
from lit_fedad.contracts import Context
from lit_fedad.methods.fedvck import FedVCKClient, FedVCKServer

LABELS = [0, 0, 0, 1, 1, 1, 1]


def client_of(round: int = 1, **settings) -> FedVCKClient:
    client = FedVCKClient(make(), **{**CLIENT, **settings})
    client.context = Context(0, round, 0)
    return client


def test_images_go_on_where_they_ended():
    """Not clipped: the state is what the optimiser left."""
    client = client_of(continue_images=True)
    client.condense(loader(LABELS), FABRIC)
    ended = client.synthetic.clone()
    starts = []
    start = client.initial_images
    client.initial_images = lambda *given: starts.append(start(*given)) or starts[-1]
    client.context = Context(0, 2, 0)
    client.condense(loader(LABELS), FABRIC)
    assert torch.equal(starts[0], ended)
    client.condense(loader([0, 0, 0]), FABRIC)  # other classes: from noise
    assert starts[1].shape != ended.shape
    client.continue_images = False
    client.condense(loader([0, 0, 0]), FABRIC)
    assert torch.equal(starts[2], starts[1])  # the same draw of noise, and not where the images had ended
    assert not torch.equal(starts[2], client.synthetic)


def test_draws_by_softmax():
    weights = torch.tensor([0.5, 0.9, 0.1])
    expected = np.exp(weights.numpy()) / np.exp(weights.numpy()).sum()
    np.testing.assert_allclose(client_of(softmax=True)._probabilities(weights), expected, rtol=1e-6)
    np.testing.assert_allclose(client_of()._probabilities(weights), weights / 1.5, rtol=1e-6)


def test_each_client_s_first_model_is_its_own_and_the_previous_one_of_round_two():
    first = make().state_dict()
    models = []
    for number in (0, 1):
        client = client_of(own_first_model=True)
        client.context = Context(0, 1, number)
        client.condense(loader(LABELS), FABRIC)
        client.send(loader(LABELS))
        models.append(client.previous)
    name = "classifier.weight"
    assert not torch.equal(models[0][name], models[1][name])
    assert not torch.equal(models[0][name], first[name])
    later = client_of(2, own_first_model=True)
    later.condense(loader(LABELS), FABRIC)
    assert torch.equal(later.task.state_dict()[name], first[name])


@pytest.mark.parametrize("falling", [True, False])
def test_the_contrast_falls_over_the_run(falling):
    server = FedVCKServer(client_of(), **{**SERVER, "contrast": 0.5, "decay_contrast": falling})
    server.fabric = FABRIC
    weights = []
    for number in (1, 2, 3):
        server.context = Context(0, number)
        update = upload([0, 0, 1, 1, 2, 2, 3], seed=number)
        extra = server.extra_loss([update.message])
        weights.append(extra.weight if extra else None)
        server.aggregate({0: update})
    assert weights[0] is None  # no images of earlier rounds yet
    assert weights[1:] == pytest.approx([0.05, 0.005] if falling else [0.5, 0.5])


def test_classes_count_as_often_as_the_batch_has_them():
    torch.manual_seed(0)
    prototypes = torch.eye(K)
    negatives = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1], [1, 0, 0, 0]]).bool()
    loss = RelationalContrast(prototypes, negatives, 3, 0.5, prior=True).eval()
    features, labels = torch.randn(6, K), torch.tensor([0, 0, 0, 1, 1, 2])
    with torch.no_grad():
        said = torch.nn.functional.normalize(loss.head(features), dim=1).numpy() / 0.5
        found = loss(features, labels).item()
    times, terms = np.bincount(labels.numpy(), minlength=K), []
    for row, c in zip(np.exp(said), labels.tolist(), strict=True):
        candidates = [j for j in range(K) if negatives[c, j] or j == c]
        terms.append(-np.log(times[c] * row[c] / sum(times[j] * row[j] for j in candidates)))
    assert found == pytest.approx(np.mean(terms), rel=1e-5)
