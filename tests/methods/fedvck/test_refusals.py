"""FedVCK: missing classes and images, and refused settings."""

import math

import pytest
from helpers.fedvck import K, loader
from helpers.refusals import refusal
from torch import nn

from lit_fedad.condensation.condense import Condensation
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
