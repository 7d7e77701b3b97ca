"""FedDM: missing classes and images, and refused settings."""

import math
from functools import partial

import pytest
from helpers.feddm import WIDTH, loader, make, server_of, upload
from helpers.refusals import refusal
from torch import nn

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.parts.condensed_images import CLASSES, IMAGES
from lit_fedad.models.convnets import ConvNet


def test_a_client_that_owns_no_class_sends_nothing_and_the_others_go_on(feddm, data, tap):
    federation = feddm(data={**data, 2: loader([0, 1, 2], 5)}, channel=tap)
    message = tap.uploads(1)[2]
    assert message[IMAGES].shape == (0, 3, 8, 8)
    assert not len(message[CLASSES])
    report = federation.history[-1]
    assert report.per_client[2] == {}
    assert report.scalars["images"] == 12
    assert math.isfinite(report.scalars["loss"])


def test_clients_that_own_nothing_at_all_end_the_run(feddm):
    with refusal(r"no client owns a class.*method\.client\.min_class_images"):
        feddm(client={"min_class_images": 100})


def test_where_others_are_not_sampled_yet_a_first_round_without_images_changes_nothing():
    server = server_of()
    before, nothing = dict(server.weights), {1: Update(upload([]), 3)}
    server.register_clients({0: 9, 1: 3})
    server.aggregate(nothing)
    assert all(server.weights[name] is entry for name, entry in before.items())
    assert server.report == {"images": 0.0}
    assert "class 0, 1, 2" in server.warnings()[0]
    server.register_clients({1: 3})
    with refusal("no client owns a class"):
        server.aggregate(nothing)


def test_a_class_that_nobody_owns_is_named_once(feddm, data):
    federation = feddm(data={0: data[0]})
    [line], after = (report.warnings for report in federation.history)
    assert "class 2" in line
    assert "method.client.min_class_images" in line
    assert after == []
    assert feddm().history[0].warnings == []


def test_images_of_two_sizes_are_named(feddm, data):
    """Of two clients, either could be the wrong one; of three, the one without whom the others agree is refused."""
    other = loader([0, 0, 1, 1], 1, side=6)
    with refusal(r"images of the sizes \(3, 8, 8\) and \(3, 6, 6\)"):
        feddm(data={0: data[0], 1: other})
    refused = feddm(data={0: data[0], 1: data[1], 2: other}).history[0].refused
    assert list(refused) == [2]
    assert "(3, 6, 6)" in refused[2]


def test_encoders_of_other_normalisations_are_welcome(feddm):
    task = make(partial(ConvNet, 8, norm="instance", channels=4))
    federation = feddm(task=task, rounds=1)
    assert all(entry.isfinite().all() for entry in federation.server.weights.values())
    assert math.isfinite(federation.history[0].scalars["loss"])


class Bare(nn.Conv2d):
    """Images to five features, without a normalisation that would take back what grows."""

    num_features = WIDTH

    def __init__(self) -> None:
        super().__init__(3, WIDTH, 3)

    def forward(self, images):
        return super().forward(images).mean((2, 3))


def test_learning_rates_that_diverge_are_named(feddm):
    rate = r"client 0, client 1: condensation diverged; lower method\.client\.condensation\.learning_rate"
    with pytest.raises(UserError, match=rate):
        feddm(task=make(Bare), client={"condensation": Condensation(4, batch=4, learning_rate=1e30)})
    with pytest.raises(UserError, match=r"server diverged; lower method\.server\.training\.learning_rate"):
        feddm(server={"training": CondensedTraining(4, 4, learning_rate=1e30)})
