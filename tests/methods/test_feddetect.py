"""FedDetect: the common threshold by hand, and FedAvg's weights."""

import functools

import pytest
import torch
from helpers.refusals import refusal
from torch.utils.data import DataLoader

from lit_fedad.contracts import Update
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.feddetect import THRESHOLD, Errors, FedDetectClient, FedDetectServer
from lit_fedad.models.convnets import ConvNet, Decoder
from lit_fedad.tasks.autoencoder import Autoencoder
from lit_fedad.tasks.classifier import Classifier

NEW = {"image": torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(9))}


def task() -> Autoencoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder, decoder = ConvNet(8, channels=2), functools.partial(Decoder, channels=16)
        return Autoencoder(encoder, decoder, 8, (0.5,) * 3, (0.5,) * 3)


def images(count: int, seed: int = 0) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    return DataLoader([{"image": torch.randn(3, 8, 8, generator=draw)} for _ in range(count)], batch_size=4)


def scores_of(client, number):
    with torch.no_grad():
        return client.predict_step(NEW)._asdict()


def errors_of(weights, loader) -> torch.Tensor:
    live = task()
    live.load_state_dict(weights, strict=False)
    with torch.no_grad():
        return torch.cat([live.eval().predict_step(batch).image_score for batch in loader]).double()


@pytest.fixture
def play(federate):
    def run(data, rounds=2, **settings):
        settings = {"question": scores_of, **settings}
        return federate(FedDetectClient, FedDetectServer, task=task(), data=data, rounds=rounds, **settings)

    return run


def test_the_threshold_is_that_of_all_images_under_the_merged_weights(play):
    data = {0: images(6), 1: images(3, seed=1)}
    played = play(data, server={"deviations": 2.0, "batch_size": 16})
    errors = torch.cat([errors_of(played.server.weights, loader) for loader in data.values()])
    expected = errors.mean() + 2 * errors.std(correction=0) / 4
    assert played.server.auxiliary[THRESHOLD].item() == pytest.approx(expected.item(), rel=1e-5)
    assert played.history[-1].scalars["threshold"] == played.server.auxiliary[THRESHOLD].item()
    # Scores are multiples of it, of new images too.
    found = played.history[-1].metrics[1]
    live = task()
    live.load_state_dict(played.server.weights, strict=False)
    with torch.no_grad():
        plain = live.eval().predict_step(NEW)
    torch.testing.assert_close(found["image_score"] * expected.float(), plain.image_score)
    torch.testing.assert_close(found["anomaly_map"] * expected.float(), plain.anomaly_map)


def test_the_first_threshold_belongs_to_the_initial_weights(play):
    data = {0: images(5), 1: images(4, seed=1)}
    first = play(data, rounds=0, server={"deviations": 0.0})
    errors = torch.cat([errors_of({}, loader) for loader in data.values()])
    assert first.server.auxiliary[THRESHOLD].item() == pytest.approx(errors.mean().item(), rel=1e-5)


def test_the_weights_are_fedavg_s(play, federate, exactly):
    data = {0: images(6), 1: images(3, seed=1)}
    ours = play(data, rounds=1)
    plain = federate(FedAvgClient, task=task(), data=data, rounds=1, question=scores_of)
    exactly(ours.server.weights, plain.server.weights)


def test_clients_of_one_image_take_part(play):
    assert play({0: images(1), 1: images(1, seed=1)}).server.auxiliary[THRESHOLD] > 0


def test_only_autoencoders_have_errors():
    FedDetectClient.check_task(Autoencoder)
    with refusal("an autoencoder's errors, and task Classifier is none; give task=autoencoder"):
        FedDetectClient.check_task(Classifier)


@pytest.mark.parametrize(("name", "value"), [("deviations", -1.0), ("batch_size", 0)])
def test_settings_of_the_server(name, value):
    with refusal(rf"method\.server\.{name}={value} must be"):
        FedDetectServer(FedDetectClient(task()), **{name: value})


def test_more_errors_than_a_client_has_images_are_refused():
    """They would decide the threshold alone."""
    server, message = FedDetectServer(FedDetectClient(task())), {"count": torch.tensor(5)}
    Errors().validate(server, 2, Update(message, 5))
    with refusal("the client counts 5 vectors, but its images have 4"):
        Errors().validate(server, 2, Update(message, 4))
