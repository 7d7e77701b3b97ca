"""What a client of a finished run sends, inverted."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.refusals import refusal
from helpers.tiny_pyramid import TinyPyramid
from PIL import Image
from safetensors.torch import load

from lit_fedad.audits import inversion_attack
from lit_fedad.audits.inversion import invert
from lit_fedad.audits.inversion_attack import InversionOptions
from lit_fedad.audits.page import write_page
from lit_fedad.audits.reconstruction import Inversion, as_sets, by_position
from lit_fedad.contracts import Context
from lit_fedad.contracts.evidence import SentImages
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.train import train
from lit_fedad.methods.parts.bank_evidence import invertible_bank
from lit_fedad.models.large_images import TiledPyramid

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")

SETTINGS = [
    "tracking=off",
    "fabric.accelerator=cpu",
    "image.resize=null",
    "partition=iid",
    "partition.clients=2",
]
CLASSES = [
    *("data=motif_classes", "data.train_per_class=2", "data.test_per_class=1", "image.size=32", "rounds=1"),
    *("task=classifier_convnet", "encoder.channels=4", "batch_size=4", *SETTINGS),
]
LITERAL = ["method=feddymem_literal", "debug=seconds", "cache.enabled=false", "task.head.hidden=8", *SETTINGS]


def played(out, *overrides):
    """Folder of a run."""
    train(compose([*overrides, f"out={out}"]), quiet=True)
    return out


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """Folder of a FedAvg run on classes."""
    return played(tmp_path_factory.mktemp("fedavg") / "run", "method=fedavg", *CLASSES)


@pytest.fixture
def with_heads(tmp_path):
    """A FedDyMem run whose clients train heads."""
    settings = [
        "method=feddymem",
        "debug=seconds",
        "cache.enabled=false",
        f"data.root={tmp_path / 'data'}",
    ]
    return played(tmp_path / "heads", *settings, *SETTINGS)


@pytest.fixture
def asked(monkeypatch):
    """What the attacks are asked, one call a client; they answer with noise."""
    calls = []

    def answer(given, shape):
        calls.append(given)
        return Inversion(torch.rand(shape, generator=torch.Generator().manual_seed(len(calls))), [0.5])

    def features(encode, target, shape, generator, steps, discrepancy, on_step):
        return answer({"encode": encode, "target": target, "steps": steps, "discrepancy": discrepancy}, shape)

    def gradients(logits, parameters, update, shape, generator, classes, labels, steps, on_step):
        return answer({"logits": logits, "parameters": parameters, "update": update, "labels": labels}, shape)

    monkeypatch.setattr(inversion_attack, "invert_features", features)
    monkeypatch.setattr(inversion_attack, "invert_gradients", gradients)
    return calls


def report(folder):
    return json.loads((folder / "privacy" / "inversion.json").read_text())


def private(folder, client):
    """A client's images, read past the code under test."""
    run = reopen(str(folder))
    samples = [run.data.images.train[index] for index in run.data.partition.clients[client]]
    pixels = [
        np.asarray(Image.open(sample.path).convert("RGB").resize((32, 32), Image.BICUBIC))
        for sample in samples
    ]
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255


@pytest.mark.slow
def test_a_bank_is_inverted_judged_and_drawn(copied_run, capsys):
    invert(reopen(str(copied_run)), InversionOptions(images=2, steps=4, client=1))
    found = report(copied_run)
    assert (found["attacked"], found["client"], found["control"], found["exchange"]) == ("memory", 1, 0, 3)
    assert len(found["losses"]) == len(found["control_losses"]) == 4
    assert found["losses"][-1] < found["losses"][0]
    assert len(found["psnr"]) == len(found["ssim"]) == len(found["closest"]) == 2
    assert set(found["closest"]) <= set(reopen(str(copied_run)).data.partition.clients[1])
    assert found["judged"]["client 1"]["psnr"] == pytest.approx(np.mean(found["psnr"]))
    images = private(copied_run, 1)
    errors = ((images - images.mean(0)) ** 2).flatten(1).mean(1)
    expected = float((-10 * errors.log10()).max())
    assert found["judged"]["mean image"]["psnr"] == pytest.approx(expected, abs=0.05)  # two ways to resize
    assert found["judged"]["mean image"]["psnr_to_mean_image"] is None  # infinite
    sheet = np.asarray(Image.open(copied_run / "figures" / "inversion.png"))
    assert sheet.shape[0] > sheet.shape[1] / 2
    assert sheet.std() > 10
    write_page(reopen(str(copied_run)))
    printed = capsys.readouterr().out
    assert "control (client 0)" in printed
    assert f"{found['judged']['client 1']['psnr']:.1f}, {max(found['psnr']):.1f}" in printed


def turn(federation, context):
    """Plays a client's turn; the live model is that client then."""
    exchange = federation.exchanges.at(context)
    blob = federation.sender.pack(exchange, [context.client], context)[context.client]
    federation.runner.activate(exchange, context, federation.pool.get(context.client), blob)
    return federation.runner.play(exchange, federation.data.at(context.round))


@pytest.mark.slow
def test_the_clients_own_part_of_a_bank_is_matched_by_position(asked, tmp_path):
    """Eq. 16 undone: what is left are the weighted means of the client's maps, position by position."""
    folder = played(tmp_path / "literal", *LITERAL, "rounds=1", f"data.root={tmp_path / 'data'}")
    invert(reopen(str(folder)), InversionOptions(knowledge="own", images=1))
    assert [call["discrepancy"] for call in asked[:2]] == [by_position, by_position]
    run = reopen(str(folder))
    federation, task = run.federation, run.model.task
    for call, number in zip(asked[:2], (0, 1), strict=True):
        context = Context(federation.seed, 2, number)
        federation.server.context = context
        turn(federation, context)  # trains, and leaves the live model as the client is then
        shared = federation.server.known["memory"]
        batches = run.data.module.client_loader(number, torch.Generator(), shuffle=False)
        with torch.no_grad():
            maps = torch.cat([task(batch) for batch in batches])
        weights = (maps - shared).flatten(1).norm(dim=1)[:, None, None]
        torch.testing.assert_close(
            call["target"], (weights * maps).sum(0) / weights.sum(), rtol=1e-3, atol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("knowledge", ["own", "shared"])
def test_the_attackers_features_are_those_of_the_task(asked, with_heads, knowledge):
    invert(reopen(str(with_heads)), InversionOptions(knowledge=knowledge, images=3))
    assert [call["discrepancy"] for call in asked[:2]] == [as_sets, as_sets]
    pixels = private(with_heads, 1).requires_grad_()
    generated = asked[1]["encode"](pixels)  # the control's: the live model is still that client
    assert torch.autograd.grad(generated.sum(), pixels)[0].abs().max() > 0
    run = reopen(str(with_heads))
    task, head = run.model.task, run.model.task.head.state_dict()
    first = {name: entry.clone() for name, entry in head.items()}
    federation = run.federation
    context = Context(federation.seed, 3, 1)
    federation.server.context = context
    turn(federation, context)
    if knowledge == "shared":
        assert any(not torch.equal(first[name], entry) for name, entry in task.head.state_dict().items())
        task.head.load_state_dict(first)
    with torch.no_grad():
        expected = task({"image": (pixels.detach() - 0.5) / 0.5})  # as timm normalises for its test_resnet
    torch.testing.assert_close(generated.detach(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_coreset_is_made_of_the_clients_own_patches(asked, tmp_path):
    overrides = ["method=federated_patchcore", "debug=seconds", "rounds=0", "cache.enabled=false", *SETTINGS]
    folder = played(tmp_path / "coreset", *overrides, f"data.root={tmp_path / 'data'}")
    invert(reopen(str(folder)), InversionOptions())
    assert report(folder)["exchange"] == -1
    run = reopen(str(folder))
    batches = list(run.data.module.client_loader(0, torch.Generator(), shuffle=False))
    with torch.no_grad():
        patches = torch.cat([run.model.task(batch).flatten(0, 1) for batch in batches])
    gaps = torch.cdist(asked[0]["target"], patches, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    assert float(gaps.max()) < 1e-4
    assert len(gaps) == 16


@pytest.mark.slow
def test_the_gradient_of_one_image_is_taken_at_the_weights_that_a_round_begins_with(asked, averaged):
    invert(reopen(str(averaged)), InversionOptions(images=3, seed=5))
    call = asked[2]  # after the client and its control
    assert call["labels"].shape == (1,)
    run = reopen(str(averaged))
    named = dict(run.model.task.named_parameters())
    for (name, parameter), start in zip(named.items(), call["parameters"], strict=True):
        torch.testing.assert_close(start.detach(), run.federation.server.weights[name])
        assert parameter.shape == start.shape
    held = list(run.data.partition.clients[0])
    images, labels = run.data.images.train_images[held], run.data.images.train_labels[held]
    # Which one is the attack's to draw: that whose gradient is the update.

    def step(chosen):
        error = torch.nn.functional.cross_entropy(call["logits"](images[chosen] / 255), labels[chosen])
        return [-gradient for gradient in torch.autograd.grad(error, call["parameters"])]

    fits = [
        chosen
        for chosen in torch.arange(len(held)).split(1)
        if labels[chosen].tolist() == call["labels"].tolist()
        and all(
            torch.allclose(a, b, rtol=1e-2, atol=1e-6)
            for a, b in zip(step(chosen), call["update"], strict=True)
        )
    ]
    assert len(fits) == 1


@pytest.mark.slow
def test_a_round_is_inverted_without_labels(asked, averaged):
    invert(reopen(str(averaged)), InversionOptions(client=1, images=2))
    assert [call["labels"] for call in asked[:2]] == [None, None]
    run = reopen(str(averaged))
    federation = run.federation
    context = Context(federation.seed, 2, 1)
    federation.server.context = context
    sent = load(turn(federation, context).blob)
    names = dict(run.model.task.named_parameters())
    for name, update in zip(names, asked[0]["update"], strict=True):
        torch.testing.assert_close(update, sent[name] - federation.server.weights[name])


@pytest.mark.slow
def test_of_the_models_of_all_clients_the_attacked_clients_own_is_what_its_update_began_with(asked, tmp_path):
    folder = played(tmp_path / "run", "method=apple", *CLASSES)
    invert(reopen(str(folder)), InversionOptions(client=1, images=2))
    run = reopen(str(folder))
    cores = dict(run.federation.server.known)
    run.federation.server.context = context = Context(run.federation.seed, 2, 1)
    sent = load(turn(run.federation, context).blob)
    for (name, _), update in zip(run.model.task.named_parameters(), asked[0]["update"], strict=True):
        torch.testing.assert_close(update, sent[name] - cores[name][1])


@pytest.mark.slow
def test_weights_that_no_logit_depends_on_tell_nothing_of_images(asked, tmp_path):
    """MOON's projection, which is sent with the others."""
    folder = played(tmp_path / "run", "method=moon", *CLASSES)
    invert(reopen(str(folder)), InversionOptions(images=2))
    named = dict(reopen(str(folder)).model.task.named_parameters())
    expected = [weight.shape for name, weight in named.items() if not name.startswith("model_contrast.")]
    assert len(expected) < len(named)
    for call in asked:
        assert [weight.shape for weight in call["parameters"]] == expected


@pytest.mark.slow
def test_an_image_is_made_out_in_its_gradient(tmp_path):
    """And not in the round of a client, which tells what the prior alone gives."""
    folder = played(tmp_path / "run", "method=fedavg", *CLASSES, "encoder.channels=16")
    invert(reopen(str(folder)), InversionOptions(images=1, steps=400, seed=1))
    (found,), judged = report(folder)["positive_controls"], report(folder)["judged"]
    assert found["psnr"] > judged["control (client 1)"]["psnr"] + 2
    assert found["ssim"] > judged["control (client 1)"]["ssim"] + 0.3


def test_shared_images_are_judged_as_they_are(averaged, monkeypatch):
    """As FedDM sends them: bytes; here, a client's third image with noise of one grey level."""
    run = reopen(str(averaged))
    held = run.data.partition.clients
    near = run.data.images.train_images[[held[0][2]]].clone()
    near[..., 0] += 1
    monkeypatch.setattr(
        inversion_attack, "_shared", lambda run: (SentImages(lambda sent: sent["images"] / 255), 2)
    )
    monkeypatch.setattr(
        inversion_attack.Attack, "_send", lambda self, number: {"images": near if number == 0 else 255 - near}
    )
    invert(reopen(str(averaged)), InversionOptions())
    found = report(averaged)
    assert found["closest"] == [held[0][2]]
    assert found["psnr"] == pytest.approx([-10 * np.log10(1 / 255**2 / 32)], abs=0.01)
    assert found["judged"]["control (client 1)"]["psnr"] < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client": 7}, "client=7: the run has clients 0, 1"),
        ({"control": 0}, "control=0 must be another client"),
        (
            {"knowledge": "own"},
            "knowledge=own: attack=inversion of weights has no such option, only client, control",
        ),
    ],
)
def test_bad_input_is_one_line(averaged, options, message):
    with refusal() as caught:
        invert(reopen(str(averaged)), InversionOptions(**options))
    assert message in str(caught.value)


@pytest.mark.parametrize("options", [{"images": 0}, {"steps": 0}, {"steps": -3}, {"restarts": 0}])
def test_nothing_to_seek_and_no_step_are_refused(options):
    with pytest.raises(UserError, match=r"images=-?\d+ steps=-?\d+ restarts=\d+ must be at least 1"):
        InversionOptions(**options)


@pytest.mark.slow
def test_a_method_that_shares_nothing_of_images_is_one_line(tmp_path):
    folder = played(tmp_path / "local", "method=local", *CLASSES)
    with pytest.raises(
        UserError, match=r"method local with task Classifier shares no images, no memory bank"
    ):
        invert(reopen(str(folder)), InversionOptions())


def test_a_bank_of_tiles_is_not_called_shared_by_nobody(make_task):
    backbone = TinyPyramid()
    backbone.strides, backbone.provenance = (4, 8), {}
    task = make_task(backbone=TiledPyramid(backbone, (64, 64), 32), image_size=64, tile=32)
    with pytest.raises(UserError, match=r"a bank is shared, but images in tiles \(image.tile\)"):
        invertible_bank(SimpleNamespace(task=task), {"memory": None})


@pytest.mark.slow
def test_positive_controls_are_of_few_images_of_the_client(asked, copied_run):
    """One image by position; a bank of one image, and of four; the client has eight images."""
    run = reopen(str(copied_run))
    invert(run, InversionOptions(images=2, client=1))
    assert [call["discrepancy"] for call in asked] == [as_sets, as_sets, by_position, as_sets, as_sets]
    found = report(copied_run)["positive_controls"]
    assert [one["control"] for one in found] == [
        "one image, by position",
        "bank of 1 image",
        "bank of 4 images",
    ]
    with torch.no_grad():
        features = asked[2]["encode"](private(copied_run, 1).to(run.fabric.device))
    assert min(float((one - asked[2]["target"]).abs().max()) for one in features) < 0.05


@pytest.mark.slow
def test_a_reconstruction_that_is_the_image_is_identified(averaged, monkeypatch):
    run = reopen(str(averaged))
    held = run.data.partition.clients
    shown = run.data.images.train_images[list(held[0])]
    monkeypatch.setattr(
        inversion_attack, "_shared", lambda run: (SentImages(lambda sent: sent["images"] / 255), 2)
    )
    monkeypatch.setattr(inversion_attack.Attack, "_send", lambda self, number: {"images": shown})
    invert(reopen(str(averaged)), InversionOptions())
    found = report(averaged)
    assert found["identified"]["client 0"]["ranks"] == [1] * len(shown)
    assert (found["top1"], found["top1_high"]) == (1, 1)
    assert found["top1_chance"] == found["identified"]["client 0"]["chance"] < 1


def test_the_restart_with_the_lowest_loss_counts(averaged, monkeypatch):
    losses = iter([0.5, 0.2, 0.9] * 3)

    def gradients(logits, parameters, update, shape, generator, *_, **__):
        loss = next(losses)
        return Inversion(torch.full(shape, loss), [1.0, loss])

    monkeypatch.setattr(inversion_attack, "invert_gradients", gradients)
    invert(reopen(str(averaged)), InversionOptions(restarts=3, images=1))
    assert report(averaged)["losses"] == [1.0, 0.2]
