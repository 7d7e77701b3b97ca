"""FedDM: what crosses, a client's condensation played by hand, and what the server makes of the images."""

import math
from functools import partial

import pytest
import torch
from helpers.encoder import Encoder
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.condensation.condense import Condensation
from lit_fedad.condensation.training import CondensedTraining
from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.kept_state import read_kept
from lit_fedad.errors import UserError
from lit_fedad.methods.feddm import FedDMClient, FedDMServer
from lit_fedad.methods.parts.condensed_images import CLASSES, COUNTS, IMAGES, joined
from lit_fedad.models.convnet import ConvNet
from lit_fedad.tasks.classifier import Classifier

K, WIDTH = 3, Encoder.num_features
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)
FABRIC = Fabric(accelerator="cpu", devices=1)

mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
nearly = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def make(encoder=Encoder, seed: int = 0) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(encoder(), K)


def loader(labels, seed: int = 0, side: int = 8) -> DataLoader:
    """Noise; an image of class k is brighter in channel k."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 156, (len(labels), 3, side, side), generator=draw) / 255
    for image, label in zip(pixels, labels, strict=True):
        image[label] += 100 / 255
    rows = [
        {"image": image, "label": label, "index": place}
        for place, (image, label) in enumerate(zip((pixels - mean) / std, labels, strict=True))
    ]
    return DataLoader(rows, batch_size=4)


def upload(labels, seed: int = 0, side: int = 8) -> dict[str, torch.Tensor]:
    """What a client might send: labels ascending, images noise."""
    classes, counts = torch.tensor(labels, dtype=torch.int64).unique(return_counts=True)
    draw = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (len(labels), 3, side, side), generator=draw, dtype=torch.uint8)
    return {IMAGES: images, CLASSES: classes, COUNTS: counts}


def client_of(task=None, **settings) -> FedDMClient:
    settings = {"condensation": Condensation(0), "mean": MEAN, "std": STD, "least": 2, **settings}
    return FedDMClient(task or make(), **settings)


def server_of(round: int = 1, **settings) -> FedDMServer:
    server = FedDMServer(client_of(), **{"training": CondensedTraining(2, 4), **settings})
    server.fabric = FABRIC
    server.begin(Context(0, round))
    return server


def pieces(images, labels) -> set[tuple[bytes, int]]:
    return {(image.numpy().tobytes(), int(label)) for image, label in zip(images, labels, strict=True)}


@pytest.fixture
def data():
    """Of client 0's class 2 there is one image, too few to own it."""
    return {0: loader([0, 1, 0, 1, 1, 2, 1, 0, 1], 0), 1: loader([2, 1, 2, 2, 2, 1, 2, 2, 2], 1)}


@pytest.fixture
def feddm(federate, data):
    """Plays FedDM on two clients, in a few steps."""

    def play(client=None, server=None, **settings):
        client = {"condensation": Condensation(2, 4), "mean": MEAN, "std": STD, "least": 2, "minimum": 3} | (
            client or {}
        )
        server = {"training": CondensedTraining(2, 4)} | (server or {})
        settings = {"task": make(), "data": data, "rounds": 2, **settings}
        return federate(FedDMClient, FedDMServer, client=client, server=server, **settings)

    return play


# ---------------------------------------------------------------------------------------------------- what crosses


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
    client = client_of(share=share, minimum=minimum)
    client.begin(Context(0, 1, 0))
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
    client = client_of(share=share, minimum=0, mean=[0.5], std=[0.5])
    client.begin(Context(0, 1, 0))
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
    noise = {"init": "noise", "condensation": Condensation(2, 4, learning_rate=0.5)}
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


# --------------------------------------------------------------------------------------------------- a client by hand


def moments(weights, images):
    """Features and logits, each batch by its own statistics."""
    maps = F.conv2d(images, weights["encoder.mix.weight"], stride=2)
    centred = maps - maps.mean((0, 2, 3), keepdim=True)
    scaled = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    gain, shift = (weights[f"encoder.norm.{name}"].view(-1, 1, 1) for name in ("weight", "bias"))
    features = (gain * scaled + shift).relu().mean((2, 3))
    logits = features @ weights["classifier.weight"].T + weights["classifier.bias"]
    return torch.cat([features, logits], 1)


def test_a_client_by_hand(feddm, data, tap):
    """Three steps in double precision, each under weights that are rho away, on batches of four of each class."""
    steps, rate, momentum, radius = 3, 0.7, 0.5, 2.0
    settings = {"radius": radius, "init": "noise", "quantize": False}
    condensation = Condensation(steps, 4, rate, momentum, augment=False)
    federation = feddm(client={**settings, "condensation": condensation}, rounds=1, channel=tap)

    context = Context(seed=0, round=1, client=0)
    weights = {name: p.detach().double() for name, p in make().named_parameters()}
    rows = list(data[0].dataset)
    piles = [torch.stack([row["image"] for row in rows if row["label"] == c]).double() for c in (0, 1)]
    with context.seeded("disturbance"):
        noise = [{n: torch.randn(w.shape).double() for n, w in weights.items()} for _ in range(steps)]
    generator = context.generator("condensation")
    images, velocity, losses = torch.randn(6, 3, 8, 8, generator=generator).double(), 0.0, []
    for direction in noise:
        batch = torch.cat(
            [p[torch.multinomial(torch.ones(len(p)), 4, True, generator=generator)] for p in piles]
        )
        norm = math.sqrt(sum(float(part.square().sum()) for part in direction.values()))
        moved = {name: weight + radius * direction[name] / norm for name, weight in weights.items()}
        images.requires_grad_()
        real, synthetic = moments(moved, batch), moments(moved, images)
        loss = sum(
            ((real[4 * c : 4 * c + 4].mean(0) - synthetic[3 * c : 3 * c + 3].mean(0)) ** 2).sum()
            for c in (0, 1)
        )
        (gradient,) = torch.autograd.grad(loss, images)
        velocity = momentum * velocity + gradient
        images = (images - rate * velocity).detach()
        losses.append(float(loss.detach()))

    nearly(tap.uploads(1)[0][IMAGES], (images * std + mean).float())
    told = federation.history[0].per_client[0]
    assert told == pytest.approx({"loss": sum(losses) / steps, "last_loss": losses[-1]}, rel=1e-4)


def test_the_disturbance_has_norm_rho_and_is_anew_each_step(data, exactly):
    task, radius, seen = make(), 3.0, []
    received = {name: p.detach().clone() for name, p in task.named_parameters()}
    layers = {
        "encoder.mix": task.encoder.mix,
        "encoder.norm": task.encoder.norm,
        "classifier": task.classifier,
    }

    def look(layer, inputs):
        seen.append(
            {
                f"{name}.{n}": p.detach().clone()
                for name, own in layers.items()
                for n, p in own.named_parameters()
            }
        )

    task.classifier.register_forward_pre_hook(look)
    client = client_of(task, radius=radius, condensation=Condensation(2, 4))
    client.begin(Context(0, 1, 0))
    client.condense(data[0], FABRIC)
    first, first_again, second, _ = seen  # real and synthetic images of two steps
    for under in (first, second):
        assert under.keys() == received.keys()
        moved = torch.cat([(under[name] - received[name]).flatten() for name in received])
        assert float(moved.norm()) == pytest.approx(radius, rel=1e-5)
    exactly(first, first_again)
    assert (first["encoder.mix.weight"] - second["encoder.mix.weight"]).norm() > 0.1
    exactly({name: p.detach() for name, p in task.named_parameters()}, received)
    assert all(p.requires_grad for p in task.parameters())


def test_without_steps_the_start_is_sent(data):
    client = client_of(init="noise", minimum=3)
    client.begin(Context(0, 1, 0))
    assert client.condense(data[0], FABRIC) == {}
    noise = torch.randn(6, 3, 8, 8, generator=Context(0, 1, 0).generator("condensation"))
    sent = client.send(data[0])[IMAGES]
    assert torch.equal(sent, (255 * (noise * std + mean).clamp(0, 1)).round().to(torch.uint8))


@pytest.mark.parametrize(("minimum", "distinct"), [(2, 4), (7, 3 + 5)])
def test_real_images_are_a_start_each_once_while_there_are_enough(data, minimum, distinct):
    client = client_of(init="real", minimum=minimum)
    client.begin(Context(0, 1, 0))
    client.condense(data[0], FABRIC)
    message = client.send(data[0])
    own = [((255 * (row["image"] * std + mean)).round().byte(), row["label"]) for row in data[0].dataset]
    labels = message[CLASSES].repeat_interleave(message[COUNTS])
    assert pieces(message[IMAGES], labels) <= pieces(*zip(*own, strict=True))
    assert len(pieces(message[IMAGES], labels)) == distinct


def test_condensation_brings_images_nearer_to_the_real_ones(feddm, data):
    settings = {"init": "noise", "radius": 0.0, "condensation": Condensation(40, 32, augment=False)}
    told = feddm(client=settings, rounds=1).history[0].per_client
    assert all(own["last_loss"] < 0.3 * own["loss"] for own in told.values())


# ------------------------------------------------------------------------------------------------------- the server


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


def test_the_order_of_clients_does_not_change_what_is_trained_on():
    updates = {0: upload([0, 0, 1], 1), 1: upload([1, 2], 2), 2: upload([0, 2, 2], 3)}
    first, second = joined(updates), joined(dict(reversed(updates.items())))
    assert len(pieces(*first)) == 8
    assert pieces(*first) == pieces(*second)


def test_the_order_of_a_clients_images_does_not_matter(feddm, exactly):
    still, shuffled = feddm(shuffle=False), feddm(shuffle=True)
    exactly(read_kept(shuffled.server), read_kept(still.server))


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(feddm, exactly):
    whole = feddm(rounds=3)
    feddm(rounds=1, folder="halted")
    resumed = feddm(rounds=3, folder="halted")
    exactly(read_kept(resumed.server), read_kept(whole.server))
    assert [report.scalars for report in resumed.history] == [report.scalars for report in whole.history]
    assert {"knowledge_mmd", "knowledge_mmd_random"} <= whole.history[1].scalars.keys()


def test_classes_that_clients_hold_apart_are_learnt(feddm):
    held = {client: loader([client] * 12, client) for client in range(K)}

    def accuracy(client, number):
        with torch.no_grad():
            batch = {"image": torch.stack([row["image"] for row in loader([0, 1, 2] * 20, 99).dataset])}
            said = client.task.predict_step(batch).logits.argmax(1)
        return float((said == torch.tensor([0, 1, 2] * 20)).float().mean())

    settings = {
        "client": {"minimum": 8},
        "server": {"training": CondensedTraining(20, 8, 0.1, augment=False)},
    }
    assert feddm(**settings, data=held, question=accuracy).history[-1].metrics[0] > 0.9


def test_knowledge_that_stays_is_at_distance_zero_and_other_knowledge_is_not():
    server = server_of()
    same = {0: Update(upload([0, 0, 1, 1]), 9), 1: Update(upload([1, 2], 1), 9)}
    server.aggregate(same)
    assert not {"knowledge_mmd", "knowledge_mmd_random"} & server.diagnostics().keys()
    server.begin(Context(0, 2))
    server.aggregate(same)
    told = server.diagnostics()
    assert told["knowledge_mmd"] == pytest.approx(0, abs=1e-9)
    assert told["knowledge_mmd_random"] == pytest.approx(0, abs=1e-9)
    server.begin(Context(0, 3))
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
    server.begin(Context(0, 2))
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
        task = federation.adversary_view(1, Update(message, 9)).task
        exactly(server.weights, before)
        assert torch.equal(torch.random.get_rng_state(), draws)
        expected = trained_alone(before, message, training, Context(0, report.round + 1))
        exactly({**task.state_dict()}, {**expected})
        assert not task.training
        seen.append(report.round)

    heard = feddm(channel=tap, after_round=listen)
    assert seen == [1, 2]
    quiet = feddm()
    exactly(read_kept(heard.server), read_kept(quiet.server))
    assert [report.scalars for report in heard.history] == [report.scalars for report in quiet.history]


def test_of_an_upload_without_images_an_observer_has_the_received_model(feddm, exactly):
    federation = feddm(rounds=1)
    client = federation.adversary_view(0, Update({**upload([0]), IMAGES: upload([0])[IMAGES][:0]}, 9))
    exactly({**client.task.state_dict()}, federation.server.weights)


# ------------------------------------------------------------------------------------- what is missing or refused


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
    with pytest.raises(UserError, match=r"no client owns a class.*method\.client\.least") as error:
        feddm(client={"least": 100})
    assert "\n" not in str(error.value)


def test_a_class_that_nobody_owns_is_named_once(feddm, data):
    federation = feddm(data={0: data[0]})
    [line], after = (report.warnings for report in federation.history)
    assert "class 2" in line
    assert "method.client.least" in line
    assert after == []
    assert feddm().history[0].warnings == []


def test_images_of_two_sizes_name_the_clients(feddm, data):
    with pytest.raises(UserError, match=r"client 1 sent images \(3, 6, 6\), client 0 \(3, 8, 8\)") as error:
        feddm(data={0: data[0], 1: loader([0, 0, 1, 1], 1, side=6)})
    assert "\n" not in str(error.value)


def test_encoders_of_other_normalisations_are_welcome(feddm, exactly):
    task = make(partial(ConvNet, 8, norm="instance", channels=4))
    federation = feddm(task=task, rounds=1)
    assert all(entry.isfinite().all() for entry in federation.server.weights.values())
    assert math.isfinite(federation.history[0].scalars["loss"])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"share": 1.5}, r"share=1\.5"),
        ({"share": -0.1}, r"share=-0\.1"),
        ({"minimum": -1}, "minimum=-1"),
        ({"least": 0}, "least=0"),
        ({"radius": -1.0}, r"radius=-1\.0"),
        ({"share": 0.0, "minimum": 0}, "share=0 minimum=0 sends no image"),
    ],
)
def test_settings_out_of_range_are_refused(setting, said):
    with pytest.raises(UserError, match=said) as error:
        client_of(**setting)
    assert "\n" not in str(error.value)


class Bare(nn.Conv2d):
    """Images to five features, without a normalisation that would take back what grows."""

    num_features = WIDTH

    def __init__(self) -> None:
        super().__init__(3, WIDTH, 3)

    def forward(self, images):
        return super().forward(images).mean((2, 3))


def test_learning_rates_that_diverge_are_named(feddm):
    rate = r"client 0: condensation diverged; lower method\.client\.condensation\.learning_rate"
    with pytest.raises(UserError, match=rate):
        feddm(task=make(Bare), client={"condensation": Condensation(4, 4, learning_rate=1e30)})
    with pytest.raises(UserError, match=r"server diverged; lower method\.server\.training\.learning_rate"):
        feddm(server={"training": CondensedTraining(4, 4, learning_rate=1e30)})


def test_other_tasks_are_refused(make_linear):
    with pytest.raises(UserError, match="works with task Classifier, not with Linear"):
        FedDMClient(make_linear(), Condensation(1))
