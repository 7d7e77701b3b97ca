"""DeSA: its losses by hand, anchors that are means over owners, and what crosses."""

import numpy as np
import pytest
import torch
from helpers.feddm import DESA, FABRIC, loader, make, mean, std, upload
from torch.nn import functional as F

from lit_fedad.contracts import Context, Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.desa import (
    ANCHORS,
    LOGITS,
    DESAClient,
    DESAServer,
    SendAnchors,
    supervised_contrast,
)


def client_of(**settings) -> DESAClient:
    client = DESAClient(make(), **{**DESA, **settings})
    client.context = Context(0, 2, 0)
    client.task.augment = False
    return client


def server_of() -> DESAServer:
    server = DESAServer(client_of())
    server.context = Context(0, 1)
    return server


def data_of():
    return {0: loader([0, 0, 0, 1, 1]), 1: loader([1, 1, 2, 2, 2], seed=1)}


def test_the_contrast_by_hand():
    features = torch.tensor([[2.0, 0.0], [3.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    found = supervised_contrast(features, torch.tensor([0, 0, 1, 1]), 0.5)
    e = np.exp
    first = -np.log(e(2) / (e(2) + e(0) + e(-2)))
    third, fourth = -np.log(1 / (1 + 1 + 1)), -np.log(e(0) / (e(0) + 2 * e(-2)))
    assert found.item() == pytest.approx((2 * first + third + fourth) / 4, rel=1e-6)
    alone = supervised_contrast(features[:3], torch.tensor([0, 0, 1]), 0.5)
    assert alone.item() == pytest.approx(2 * -np.log(e(2) / (e(2) + e(0))) / 3, rel=1e-6)
    # Two others of the class each: their mean.
    three = supervised_contrast(features, torch.tensor([0, 0, 1, 0]), 0.5)
    first, fourth = (
        -np.log(e(2 - 2) / (e(2) + e(0) + e(-2)) ** 2) / 2,
        -np.log(e(-4) / (e(0) + 2 * e(-2)) ** 2) / 2,
    )
    assert three.item() == pytest.approx((2 * first + fourth) / 4, rel=1e-6)


def test_mixed_precision_rounds_no_cosine():
    """At a temperature of 0.07, eight bits of a cosine would move its exponent by up to 0.05."""
    features, labels = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = supervised_contrast(features, labels, 0.07)
    assert torch.equal(mixed, supervised_contrast(features, labels, 0.07))


def test_the_client_s_loss_by_hand():
    client = client_of(
        anchor_weight=0.5, distillation=2.0, contrast=0.0, temperature=4.0, soft_share=0.75
    ).eval()
    batch = next(iter(loader([0, 1, 2, 1])))
    sent = upload([0, 0, 1])
    client.anchors, client.labels = sent["images"], torch.tensor([0, 0, 1])
    client.logits = torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 0.0], [0.5, 0.5, 0.0]])
    found = client.training_step(batch)["loss"].item()
    with torch.no_grad():
        task = client.task
        logits = task.classifier(task({"image": (sent["images"] / 255 - mean) / std}))
        plain = task.training_step(batch)["loss"].item()
        cross = F.nll_loss(logits.log_softmax(1), client.labels).item()
        q, p = ((x / 4).softmax(1).numpy() for x in (logits, client.logits))
    expected = plain + 0.5 * cross + 2 * (0.25 * cross + 0.75 * 16 * (p * np.log(p / q)).mean())
    assert found == pytest.approx(expected, rel=1e-5)
    client.logits = torch.empty(0, 3)  # as in round 1
    assert client.training_step(batch)["loss"].item() == pytest.approx(plain + 0.5 * cross, rel=1e-5)


def test_the_contrast_has_no_gradient_through_anchors():
    client = client_of(anchor_weight=0.0, distillation=0.0, contrast=2.0, contrast_temperature=0.3).eval()
    client.anchors, client.labels = upload([0, 1])["images"], torch.tensor([0, 1])
    batch = next(iter(loader([0, 1, 2, 1])))
    torch.manual_seed(0)
    client.training_step(batch)["loss"].backward()
    found = client.task.encoder.mix.weight.grad.clone()
    client.task.zero_grad()
    torch.manual_seed(0)
    rows = torch.randperm(2)
    task = client.task
    with torch.no_grad():
        held = task({"image": ((client.anchors / 255 - mean) / std)[rows]})
    features = task(batch)
    labels = torch.cat([batch["label"], client.labels[rows]])
    loss = 2 * supervised_contrast(torch.cat([features, held]), labels, 0.3)
    (task.objective(features, batch)["loss"] + loss).backward()
    torch.testing.assert_close(found, task.encoder.mix.weight.grad, rtol=1e-4, atol=1e-5)


def test_anchors_are_means_over_the_clients_that_own_the_class():
    server, first, second = server_of(), upload([0, 0, 1, 1]), upload([1, 1], seed=1)
    SendAnchors().aggregate(server, {0: Update(first, 9), 1: Update(second, 9)})
    assert server.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(server.anchors[:2], first["images"][:2])
    both = (first["images"][2:].float() + second["images"].float()) / 2
    assert torch.equal(server.anchors[2:], both.round().to(torch.uint8))


def test_each_client_receives_the_others_mean_logits():
    server = server_of()
    assert server.broadcast(0)[LOGITS].shape == (0, 3)
    server.logits = {i: torch.full((2, 3), float(i)) for i in (0, 1, 2)}
    assert [server.broadcast(i)[LOGITS][0, 0].item() for i in (0, 1, 2, 7)] == [1.5, 1.0, 0.5, 1.0]


def test_anchors_cross_once_and_everyone_has_them_all(federate, tap):
    played = federate(DESAClient, DESAServer, task=make(), data=data_of(), client=DESA, rounds=2, channel=tap)
    assert [report.round for report in played.history] == [-1, 0, 1, 2]
    assert {at for at, _, message in tap.sent if ANCHORS in message} == {0}
    # Two classes of two anchors each, of 3 x 8 x 8 bytes, with the list of classes and their numbers.
    assert set(played.history[0].elements_up.values()) == {4 * 3 * 8 * 8 + 4}
    assert played.server.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert set(played.server.logits) == {0, 1}
    for number in (0, 1):
        assert torch.equal(played.pool.get(number)["anchors"], played.server.anchors)


def test_anchors_begin_as_noise_whatever_the_images():
    """As in the released run: N(0, 1) in normalised pixels; its function of class statistics is never called."""
    condenser = client_of().condenser
    dark = condenser.images_by_class(loader([0, 0, 1, 1]))
    bright = dark._replace(images=dark.images + 2)
    began, other = (
        condenser.initial_images(own, [400, 400], torch.Generator().manual_seed(0)) for own in (dark, bright)
    )
    assert torch.equal(began, other)
    expected = torch.randn(began.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(began, expected)


def test_networks_are_drawn_anew_and_the_task_is_untouched():
    client, batches = client_of(), loader([0, 0, 1, 1])
    before = {name: entry.clone() for name, entry in client.task.state_dict().items()}
    client.condenser.context = Context(0, 0, 0)
    made = [client.condenser.condense(batches, FABRIC)["loss"] for _ in range(2)]
    assert made[0] == made[1]  # drawn from the context alone
    assert all(torch.equal(before[name], entry) for name, entry in client.task.state_dict().items())
    assert all(parameter.requires_grad for parameter in client.task.parameters())


@pytest.mark.parametrize(
    ("labels", "samples", "why"),
    [([0, 0, 0], 9, "sent 3 anchors of 1 classes, not 2"), ([0, 0, 1, 1], 3, "sent 2 classes, and has 3")],
)
def test_other_numbers_of_anchors_are_refused(labels, samples, why):
    with pytest.raises(UserError, match=why):
        SendAnchors().validate(server_of(), 0, Update(upload(labels), samples))
