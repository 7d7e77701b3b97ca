"""What clients and server of FedDM send, how many images, and in how many levels."""

import pytest
import torch
from helpers.feddm import FABRIC, client_of, make, mean, std

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context
from lit_fedad.methods.feddm import FedDMServer
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES
from lit_fedad.models.convnets import ConvNet
from lit_fedad.tasks.classifier import Classifier


def test_images_go_up_and_weights_come_down(feddm, tap):
    feddm(channel=tap)
    weights = make().state_dict()
    assert all(message.keys() == weights.keys() for _, client, message in tap.sent if client is None)
    sent = tap.uploads(1)
    assert all(message.keys() == {IMAGES, CLASSES, COUNTS} for message in sent.values())
    assert sent[0][IMAGES].dtype == torch.uint8
    assert sent[0][IMAGES].shape == (6, 3, 8, 8)
    assert [sent[c][CLASSES].tolist() for c in (0, 1)] == [[0, 1], [1, 2]]
    assert [sent[c][COUNTS].tolist() for c in (0, 1)] == [[3, 3], [3, 3]]


def test_images_and_a_few_labels_are_all_that_is_counted(feddm, tap):
    [report] = feddm(channel=tap, rounds=1, client={"share": 1.0}).history
    for client, message in tap.uploads(1).items():
        names_and_labels = report.bytes_up[client] - message[IMAGES].numel()
        assert 0 < names_and_labels < 400
    count = 3 + 5 + 3 + 7
    assert report.scalars["images"] == count
    assert report.scalars["images_mib"] == count * 3 * 64 / 2**20
    assert report.scalars["images_mib_float32"] == 4 * report.scalars["images_mib"]


@pytest.mark.parametrize(
    ("share", "minimum", "counts"),
    [(0.3, 0, [1, 2]), (0.3, 2, [2, 2]), (1.0, 4, [4, 5]), (0.0, 7, [7, 7]), (0.6, 1, [2, 3])],
)
def test_a_class_gets_a_share_of_its_images_but_no_fewer_than_the_minimum(data, share, minimum, counts):
    """Of the two classes owned, three and five images."""
    client = client_of(share=share, min_synthetic=minimum)
    client.context = Context(0, 1, 0)
    client.condense(data[0], FABRIC)
    message = client.send(data[0])
    assert message[COUNTS].tolist() == counts
    assert len(message[IMAGES]) == sum(counts)


@pytest.mark.parametrize(
    ("images", "values", "share", "mebibytes"),
    [
        (89_996, 3 * 28**2, 0.01, 2.02),  # Path
        (97_477, 28**2, 0.01, 0.73),  # OCT
        (13_940, 28**2, 0.05, 0.52),  # OrganS
        (13_000, 224**2, 0.05, 31.1),  # OrganC
        (4_708, 224**2, 0.05, 11.26),  # Pneumonia
        (50_000, 3 * 32**2, 0.02, 2.93),  # CIFAR10
        (9_469, 3 * 64**2, 0.01, 1.11),  # ImageNette
    ],
)
def test_the_papers_data_sets_take_these_mebibytes(images, values, share, mebibytes):
    """As many images as a client would send of one class, of one pixel each to be quick; a value is a byte."""
    client = client_of(share=share, min_synthetic=0, mean=[0.5], std=[0.5])
    client.context = Context(0, 1, 0)
    everything = {
        "image": torch.zeros(images, 1, 1, 1),
        "label": torch.zeros(images, dtype=torch.int64),
        "index": torch.arange(images),
    }
    client.condense([everything], FABRIC)
    sent = client.send([everything])[IMAGES]
    assert sent.element_size() == 1
    one_image = values / 2**20
    assert mebibytes - 0.005 <= len(sent) * one_image < mebibytes + 0.005 + one_image


def test_weights_of_ten_clients_take_what_the_paper_says():
    """Path's ConvNet; running statistics, 3 x 2 x 128 of them, are not in its count."""
    task = Classifier(ConvNet(28), 9)
    assert sum(p.numel() for p in task.parameters()) * 4 * 10 / 2**20 == pytest.approx(12.13, abs=0.005)
    weights = FedDMServer(client_of(task), CondensedTraining(1)).weights
    floats = sum(entry.numel() for entry in weights.values() if entry.is_floating_point())
    assert floats == 317_961 + 3 * 2 * 128


# ----------------------------------------------------------------------------------------------------- quantisation


def test_bytes_are_the_clipped_and_rounded_pixels(feddm, tap):
    noise = {"init": "noise", "condensation": Condensation(2, batch=4, learning_rate=0.5)}
    feddm(client=noise, rounds=1, channel=tap)
    coded = tap.uploads(1)
    tap.sent.clear()
    feddm(client={**noise, "quantize": False}, rounds=1, channel=tap)
    for client, message in tap.uploads(1).items():
        pixels, sent = message[IMAGES], coded[client][IMAGES]
        assert pixels.dtype == torch.float32
        assert pixels.min() < 0
        assert pixels.max() > 1
        inside = (pixels > 0) & (pixels < 1)
        assert ((sent / 255 - pixels)[inside].abs() <= 0.5 / 255 + 1e-7).all()
        assert not sent[pixels <= 0].any()
        assert (sent[pixels >= 1] == 255).all()


@pytest.mark.parametrize("quantize", [True, False])
def test_the_server_trains_on_what_was_sent(feddm, tap, exactly, quantize):
    seen = []

    class Watched(CondensedTraining):
        def __call__(self, model, features, head, images, labels, normalise, *others):
            seen.append((normalise(images), labels))
            return super().__call__(model, features, head, images, labels, normalise, *others)

    feddm(client={"quantize": quantize}, server={"training": Watched(1, 4)}, rounds=1, channel=tap)
    [(images, labels)] = seen
    sent = torch.cat([message[IMAGES] for message in tap.uploads(1).values()])
    pixels = sent / 255 if quantize else sent
    exactly(images, (pixels - mean) / std)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_shared_images_are_pixels_of_the_round(feddm, tap, exactly):
    federation = feddm(channel=tap)
    [(round, (images, labels))] = federation.server.images_by_round().items()
    assert round == 2
    exactly(images, torch.cat([message[IMAGES] for message in tap.uploads(2).values()]))
    assert labels.bincount().tolist() == [3, 6, 3]
