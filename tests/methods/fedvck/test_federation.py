"""FedVCK as a whole: FedDM without its parts, the adversary's view, missing classes and what is refused."""

import math

import pytest
from helpers.feddm import mean, std
from helpers.fedvck import CLIENT, FABRIC, SERVER, K, loader, make
from helpers.refusals import refusal
from torch import nn

from lit_fedad.audits.statistics import adversary_view
from lit_fedad.condensation.condense import Condensation
from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import state_of
from lit_fedad.methods.feddm import FedDMClient, FedDMServer
from lit_fedad.methods.fedvck import PROTOTYPES, SIZES, FedVCKClient
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES
from lit_fedad.models.convnets import ConvNet
from lit_fedad.tasks.classifier import Classifier


def test_without_its_parts_it_is_feddm_without_disturbance(fedvck, federate, data, tap, exactly):
    """Bit for bit, where FedDM's logits say nothing: its classifier is zero. After a round it no longer is."""

    def zeroed():
        task = make()
        for parameter in task.classifier.parameters():
            parameter.data.zero_()
        return task

    off = {"selection": False, "constraints": "own"}
    ours = fedvck(off, {"contrast": 0.0, "rounds_kept": 1}, task=zeroed(), rounds=1, channel=tap)
    sent = tap.uploads(1)
    tap.sent.clear()
    client = {**CLIENT, "init": "noise", "radius": 0.0}
    server = {"training": SERVER["training"]}
    settings = {
        "client": client,
        "server": server,
        "task": zeroed(),
        "data": data,
        "rounds": 1,
        "channel": tap,
    }
    theirs = federate(FedDMClient, FedDMServer, **settings)
    exactly(ours.server.weights, theirs.server.weights)
    for number, message in tap.uploads(1).items():
        exactly({name: sent[number][name] for name in message}, message)


def test_the_order_of_a_clients_images_does_not_matter(fedvck, exactly):
    still, shuffled = fedvck(shuffle=False), fedvck(shuffle=True)
    exactly(state_of(shuffled.server), state_of(still.server))


def test_an_observer_sees_the_upload_alone(fedvck, tap, exactly):
    """No images of other clients or rounds, no contrast; and listening between rounds changes nothing."""
    training = SERVER["training"]

    def listen(federation, report):
        server = federation.server
        before = {name: entry.clone() for name, entry in server.weights.items()}
        prototypes, knowledge = server.prototypes.clone(), {**server.knowledge}
        message, context = tap.uploads(report.round)[0], Context(0, report.round + 1)
        found = adversary_view(federation, 0, Update(message, 9)).task.state_dict()
        task = make()
        task.load_state_dict(before)
        labels = message[CLASSES].repeat_interleave(message[COUNTS])
        training(
            task, task.encoder, task.classifier, message[IMAGES], labels,
            lambda images: (images / 255 - mean) / std, context.generator("condensed training"), FABRIC,
        )  # fmt: skip
        exactly({**found}, {**task.state_dict()})
        exactly([server.weights, server.prototypes], [before, prototypes])
        assert server.knowledge == knowledge

    heard, quiet = fedvck(channel=tap, after_round=listen, rounds=2), fedvck(rounds=2)
    exactly(state_of(heard.server), state_of(quiet.server))
    assert [report.scalars for report in heard.history] == [report.scalars for report in quiet.history]


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
