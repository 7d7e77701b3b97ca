"""FedVCK: missing classes and images, and refused settings."""

import math

import pytest
from helpers.fedvck import K, loader, make, server_of
from helpers.refusals import refusal
from torch import nn

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedvck import PROTOTYPES, SIZES, FedVCKClient
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES
from lit_fedad.models.convnets import ConvNet
from lit_fedad.tasks.classifier import Classifier


def test_a_client_that_owns_no_class_sends_nothing_and_the_others_go_on(fedvck, data, tap):
    federation = fedvck(data={**data, 2: loader([0, 1, 2], 5)}, channel=tap)
    message = tap.uploads(2)[2]
    assert {name: tuple(entry.shape) for name, entry in message.items()} == {
        IMAGES: (0, 3, 8, 8), CLASSES: (0,), COUNTS: (0,), PROTOTYPES: (0, K), SIZES: (0,),
    }  # fmt: skip
    report = federation.history[-1]
    assert report.per_client[2] == {}
    assert report.scalars["images"] == 15
    assert not federation.server.prototypes.isnan().any()


def test_clients_that_own_nothing_at_all_end_the_run(fedvck):
    with refusal(r"no client owns a class.*method\.client\.least"):
        fedvck({"least": 100})


def test_a_class_that_nobody_owns_is_named_once_and_takes_no_part(fedvck, data):
    federation = fedvck(data={0: data[0]}, server={"contrast": 1.0})
    [line], after = (report.warnings for report in federation.history)
    assert "class 2, 3" in line
    assert after == []
    assert federation.server.prototypes.isnan().all(1).tolist() == [False, False, True, True]
    assert math.isfinite(federation.history[1].scalars["server_loss"])


@pytest.mark.parametrize("norm", ["instance", None])
def test_encoders_without_batch_statistics_are_refused(norm):
    task = Classifier(ConvNet(8, norm="instance", channels=4), K)
    if norm is None:
        task.encoder = nn.Conv2d(3, 4, 3)
    with refusal(r"no batch normalisation.*encoder\.norm=batch"):
        FedVCKClient(task, condensation=Condensation(1), init="noise")


def test_learning_rates_that_diverge_are_named(fedvck):
    rate = r"client 0: condensation diverged; lower method\.client\.condensation\.learning_rate"
    with pytest.raises(UserError, match=rate):
        fedvck({"condensation": Condensation(6, batch=4, learning_rate=1e30)})
    with pytest.raises(UserError, match=r"server diverged; lower method\.server\.training\.learning_rate"):
        fedvck(server={"training": CondensedTraining(4, 4, learning_rate=1e30)})


@pytest.mark.parametrize(
    "setting",
    [
        {"rounds_kept": 0},
        {"contrast": -0.1},
        {"negatives": 0},
        {"head_width": 0},
        {"temperature": 0.0},
        {"head_rate": 0.0},
    ],
)
def test_server_settings_out_of_range_are_refused(setting):
    [(name, value)] = setting.items()
    with refusal(rf"{name}={value}\b"):
        server_of(**setting)


@pytest.mark.parametrize(("name", "value"), [("alpha", -0.1), ("alpha", 1.1), ("bias", 51.0)])
def test_mixtures_of_more_than_all_and_weights_of_nothing_are_refused(name, value):
    with pytest.raises(UserError, match=rf"{name}={value} must be in"):
        FedVCKClient(make(), condensation=Condensation(1), init="noise", **{name: value})
