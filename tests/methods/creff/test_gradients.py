"""CReFF's client: gradients of classes."""

import numpy as np
import torch
from helpers.creff import WIDTH, K, by_autograd, make, nearly, side_by_side
from helpers.draws import rows
from torch.nn import functional as F

from lit_fedad.contracts import Context
from lit_fedad.methods.creff import (
    BIAS,
    CLASSES,
    GRADIENTS,
    WEIGHT,
    CReFFClient,
    CReFFServer,
    cross_entropy_gradient,
    mean_gradients,
)


def test_the_gradient_is_that_of_autograd_and_of_numpy():
    classifier, features = rows(K, WIDTH + 1), rows(3, 7, WIDTH, seed=1)
    classes = torch.tensor([2, 0, 3])
    found = cross_entropy_gradient(classifier, features, F.one_hot(classes, K)[:, None])
    for own, z, label in zip(found, features, classes.tolist(), strict=True):
        torch.testing.assert_close(own, by_autograd(classifier, z, label))
        by_hand = np.zeros((K, WIDTH + 1))
        for image in z.numpy():
            exponents = np.exp(classifier.numpy() @ [*image, 1])
            residual = exponents / exponents.sum()
            residual[label] -= 1
            by_hand += np.outer(residual, [*image, 1]) / len(z)
        np.testing.assert_allclose(own.numpy(), by_hand, rtol=1e-12)


def test_clients_that_hold_a_class_count_the_same_for_it():
    sent = [
        {GRADIENTS: torch.stack([torch.full((2, 3), v) for v in values]), CLASSES: torch.tensor(classes)}
        for values, classes in [((1.0, 2.0), (0, 5)), ((6.0,), (5,)), ((4.0, 8.0), (5, 7))]
    ]
    held, mean = mean_gradients(*(torch.cat([one[name] for one in sent]) for name in (GRADIENTS, CLASSES)))
    assert held.tolist() == [0, 5, 7]
    assert mean.dtype == torch.float32
    assert mean.shape == (3, 2, 3)
    assert mean[:, 0, 0].tolist() == mean[:, 1, 2].tolist() == [1, 4, 8]


def test_gradients_are_of_what_was_received_in_evaluation_mode(creff, data, tap):
    """Of the received base and the re-trained classifier, not of the one that trains, nor of trained weights."""
    creff(task=make(augment=False), rounds=2, channel=tap, client={"local_epochs": 2})
    for round in (1, 2):
        broadcast = next(message for at, client, message in tap.sent if at == round and client is None)
        task = make(augment=False).eval()
        task.load_state_dict({n: e for n, e in broadcast.items() if n not in (WEIGHT, BIAS)})
        for client, message in tap.uploads(round).items():
            pictures, labels = (torch.cat([b[n] for b in data[client]]).detach() for n in ("image", "label"))
            features = task.encoder(pictures).detach()
            expected = {
                c: by_autograd(side_by_side(broadcast), features[labels == c], c)
                for c in sorted(set(labels.tolist()))
            }
            assert message[CLASSES].tolist() == list(expected)
            nearly(message[GRADIENTS], torch.stack(list(expected.values())))
    assert not torch.equal(broadcast[WEIGHT], broadcast["classifier.weight"])


def test_draws_are_of_distinct_images_of_one_class(data, monkeypatch):
    task, seen = make(augment=False).eval(), []
    client = CReFFClient(task, draws=8, batch=2)
    server = CReFFServer(client)
    for part in (client, server):
        part.context = Context(0, 1)
    client.receive(server.broadcast(0))
    monkeypatch.setattr(task, "view", lambda batch: seen.append(batch) or batch)
    message = client.send(data[0])
    assert [batch["label"].tolist() for batch in seen] == [[0, 0]] * 8 + [[1, 1]] * 8 + [[3]] * 8
    places = []
    for batch in seen:
        labels = batch["label"].tolist()
        same = [
            [torch.equal(own, row["image"]) and row["label"] == labels[0] for row in data[0].dataset]
            for own in batch["image"]
        ]
        places.append([row.index(True) for row in same])
        assert len(set(places[-1])) == len(labels)
    # Class 0 has three images, of which two are drawn anew each time.
    assert len({frozenset(drawn) for drawn in places[:8]}) > 1
    drawn = task.encoder(torch.cat([batch["image"] for batch in seen[:8]])).detach()
    nearly(message[GRADIENTS][0], by_autograd(side_by_side(server.auxiliary), drawn, 0))


def test_images_are_the_tasks_views_and_draws_depend_on_the_place_alone(creff, data, tap, exactly):
    creff(rounds=1, channel=tap, shuffle=False)
    augmented = {c: message[GRADIENTS] for c, message in tap.uploads(1).items()}
    tap.sent.clear()
    # Other clients, other batches and other steps of training do not matter.
    creff(rounds=1, channel=tap, shuffle=True, data={2: data[2]}, client={"local_epochs": 3})
    exactly(tap.uploads(1)[2][GRADIENTS], augmented[2])
    tap.sent.clear()
    creff(rounds=1, channel=tap, task=make(augment=False))
    assert not torch.allclose(tap.uploads(1)[2][GRADIENTS], augmented[2])
