"""FedDM's server: training on the round's images, its diagnostics, and the adversary's view."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from helpers.feddm import FABRIC, K, make, mean, nearly, pieces, server_of, std, upload
from torch.nn import functional as F

from lit_fedad.audits.statistics import adversary_view
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import state_of
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES, joined


def trained_alone(weights, message, training, context):
    """The model of some weights, trained on one upload; nothing of the method's server."""
    task = make()
    task.load_state_dict(weights)
    with context.seeded("condensed training"):
        training(
            task,
            task.encoder,
            task.classifier,
            message[IMAGES],
            message[CLASSES].repeat_interleave(message[COUNTS]),
            lambda images: (images / 255 - mean) / std,
            context.generator("condensed training"),
            FABRIC,
        )
    return task.state_dict()


def test_of_a_single_client_the_server_trains_on_its_images(feddm, data, tap, exactly):
    training = CondensedTraining(3, 4, learning_rate=0.1)
    federation = feddm(server={"training": training}, data={0: data[0]}, channel=tap)
    weights = make().state_dict()
    for round in (1, 2):
        weights = trained_alone(weights, tap.uploads(round)[0], training, Context(0, round))
    exactly(federation.server.weights, dict(weights))


def test_the_preset_trains_at_one_rate_on_images_as_they_are():
    """As the public code: plain SGD with momentum and weight decay, all images in a batch."""
    preset = yaml.safe_load((Path(__file__).parents[3] / "conf/method/feddm.yaml").read_text())
    options = {k: v for k, v in preset["method"]["server"]["training"].items() if k != "_target_"}
    server = server_of(training=CondensedTraining(**{**options, "epochs": 6}))
    message = upload([0, 0, 1, 1, 2, 2])
    server.aggregate({0: Update(message, 9)})
    task = make().train()
    sgd = torch.optim.SGD(task.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for _ in range(6):
        logits = task.classifier(task.encoder((message[IMAGES] / 255 - mean) / std))
        sgd.zero_grad()
        F.cross_entropy(logits, torch.tensor([0, 0, 1, 1, 2, 2])).backward()
        sgd.step()
    nearly(dict(server.weights), dict(task.state_dict()))


def test_the_order_of_clients_does_not_change_what_is_trained_on():
    updates = {0: upload([0, 0, 1], 1), 1: upload([1, 2], 2), 2: upload([0, 2, 2], 3)}
    first, second = joined(updates), joined(dict(reversed(updates.items())))
    assert len(pieces(*first)) == 8
    assert pieces(*first) == pieces(*second)


def test_knowledge_that_stays_is_at_distance_zero_and_other_knowledge_is_not():
    server = server_of()
    same = {0: Update(upload([0, 0, 1, 1]), 9), 1: Update(upload([1, 2], 1), 9)}
    server.aggregate(same)
    assert not {"knowledge_mmd", "knowledge_mmd_random"} & server.diagnostics().keys()
    server.context = Context(0, 2)
    server.aggregate(same)
    told = server.diagnostics()
    assert told["knowledge_mmd"] == pytest.approx(0, abs=1e-9)
    assert told["knowledge_mmd_random"] == pytest.approx(0, abs=1e-9)
    server.context = Context(0, 3)
    server.aggregate({0: Update(upload([0, 0, 1, 1], 5), 9)})
    told = server.diagnostics()
    assert told["knowledge_mmd"] > 1e-3
    assert told["knowledge_mmd_random"] > 1e-3


def test_knowledge_mmd_is_the_mean_over_classes_under_the_new_weights(feddm, tap):
    federation = feddm(channel=tap)
    sides = [joined(tap.uploads(round)) for round in (1, 2)]
    for name, weights in {
        "knowledge_mmd": federation.server.weights,
        "knowledge_mmd_random": make().state_dict(),
    }.items():
        task = make()
        task.load_state_dict(weights)
        task.eval()
        with torch.no_grad():
            before, after = (task.encoder((images / 255 - mean) / std).double() for images, _ in sides)
        found = []
        for label in range(K):
            x, y = before[sides[0].labels == label], after[sides[1].labels == label]
            both = torch.cat([x, y])
            spread = torch.cdist(both, both).square().sum() / (len(both) * (len(both) - 1))

            def value(a, b, spread=spread):
                squared = torch.cdist(a, b).square()
                return sum(torch.exp(-squared / (spread * 2.0**k)) for k in range(-2, 3)).mean()

            found.append(float(value(x, x) + value(y, y) - 2 * value(x, y)))
        assert federation.history[-1].scalars[name] == pytest.approx(sum(found) / K, rel=1e-3)


def test_rounds_without_a_class_in_common_have_no_distance():
    server = server_of()
    server.aggregate({0: Update(upload([0, 0]), 9)})
    server.context = Context(0, 2)
    server.aggregate({0: Update(upload([1, 1]), 9)})
    assert math.isnan(server.diagnostics()["knowledge_mmd"])


# ---------------------------------------------------------------------------------------------------- the observer


def test_an_observer_trains_the_received_model_on_one_upload(feddm, tap, exactly):
    training, seen = CondensedTraining(2, 4), []

    def listen(federation, report):
        """After the round's evaluation, whose questions are of the next one."""
        server, draws = federation.server, torch.random.get_rng_state()
        before = {name: entry.clone() for name, entry in server.weights.items()}
        message = tap.uploads(report.round)[1]
        task = adversary_view(federation, 1, Update(message, 9)).task
        exactly(server.weights, before)
        assert torch.equal(torch.random.get_rng_state(), draws)
        expected = trained_alone(before, message, training, Context(0, report.round + 1))
        exactly({**task.state_dict()}, {**expected})
        assert not task.training
        seen.append(report.round)

    heard = feddm(channel=tap, after_round=listen)
    assert seen == [1, 2]
    quiet = feddm()
    exactly(state_of(heard.server), state_of(quiet.server))
    assert [report.scalars for report in heard.history] == [report.scalars for report in quiet.history]


def test_of_an_upload_without_images_an_observer_has_the_received_model(feddm, exactly):
    federation = feddm(rounds=1)
    client = adversary_view(federation, 0, Update({**upload([0]), IMAGES: upload([0])[IMAGES][:0]}, 9))
    exactly({**client.task.state_dict()}, federation.server.weights)
