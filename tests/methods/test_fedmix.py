"""FedMix: its loss by hand with a gradient by differences, and its averages."""

import pytest
import torch
from helpers.feddm import loader, make
from torch.nn import functional as F

from lit_fedad.contracts import Context, Update
from lit_fedad.core.errors import UserError
from lit_fedad.federation.message_check import check
from lit_fedad.methods.fedmix import IMAGES, LABELS, FedMixClient, FedMixServer, SendAverages


def client_of(**settings) -> FedMixClient:
    client = FedMixClient(make(), **settings)
    client.context = Context(0, 1, 0)
    client.task.augment = False
    return client


def data_of():
    return {0: loader([0, 0, 1, 1, 2]), 1: loader([1, 2, 2], seed=1)}


def test_the_loss_by_hand():
    """The inner product of the gradient with the average, by differences in double precision."""
    client = client_of(weight=0.2).double().eval()
    batch = next(iter(loader([0, 1, 2, 1])))
    images, labels = batch["image"].double(), batch["label"]
    other = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(1)).double()
    shares = torch.tensor([0.5, 0.25, 0.25]).double()
    client.mixed = {IMAGES: other[None], LABELS: shares[None]}

    def own(scaled):
        with torch.no_grad():
            return 0.8 * F.cross_entropy(client.task.classifier(client.task.encoder(scaled)), labels)

    outputs = client.training_step({"image": images, "label": labels})
    slope = (own(0.8 * images + 1e-6 * other) - own(0.8 * images - 1e-6 * other)) / 2e-6
    with torch.no_grad():
        logp = client.task.classifier(client.task.encoder(0.8 * images)).log_softmax(1)
    expected = own(0.8 * images) - 0.2 * (logp @ shares).mean() + 0.2 * slope
    assert outputs["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert outputs["accuracy"] == (logp.argmax(1) == labels).float().mean()
    outputs["loss"].backward()  # through the gradient, to the weights
    assert client.task.encoder.mix.weight.grad.abs().sum() > 0


def test_averages_are_means_of_groups_that_hold_each_image_once():
    client = client_of(group=2)
    images = loader([0, 0, 1, 1, 2])
    found = SendAverages().send(client, images)
    assert found[LABELS].shape == (2, 3)
    torch.testing.assert_close(found[LABELS].sum(1), torch.ones(2))
    every = torch.stack([row["image"] for row in images.dataset])
    sizes = torch.tensor([3.0, 2.0]).view(-1, 1, 1, 1)  # none has fewer than two
    torch.testing.assert_close((sizes * found[IMAGES]).sum(0), every.sum(0), rtol=1e-4, atol=1e-5)
    whole = SendAverages().send(client_of(), images)
    torch.testing.assert_close(whole[IMAGES][0], every.mean(0), rtol=1e-4, atol=1e-5)
    assert whole[LABELS].tolist() == [pytest.approx([0.4, 0.4, 0.2])]


def test_averages_cross_once_and_everyone_has_them_all(federate, tap):
    played = federate(FedMixClient, FedMixServer, task=make(), data=data_of(), rounds=2, channel=tap)
    assert [report.round for report in played.history] == [-1, 0, 1, 2]
    assert {at for at, _, message in tap.sent if IMAGES in message} == {-1, 0}
    for number in (0, 1):
        assert torch.equal(played.pool.get(number)["mixed"][LABELS], played.server.mixed[LABELS])
    assert len(played.server.mixed[LABELS]) == 2
    # Bytes are those of the images: one average a client up, all of them down.
    up, down = (played.history[0].elements_up, played.history[1].bytes_down)
    assert set(up.values()) == {3 * 8 * 8 + 3}
    assert min(down.values()) > 2 * 4 * (3 * 8 * 8 + 3)


@pytest.mark.parametrize(("rows", "group", "most"), [(2, None, 1), (0, None, 1), (2, 10, 1), (5, 2, 4)])
def test_too_many_averages_are_refused(rows, group, most):
    exchange, server = SendAverages(), FedMixServer(client_of(group=group))
    messages = [{IMAGES: torch.zeros(n, 3, 8, 8), LABELS: torch.full((n, 3), 1 / 3)} for n in (most, rows)]
    exchange.validate(server, 0, Update(messages[0], 9))
    with pytest.raises(UserError, match=f"sent {rows} averages, and its images make at most {most}"):
        exchange.validate(server, 0, Update(messages[1], 9))


def test_fewer_images_than_a_group_are_one_average_and_of_one_class_have_its_label():
    """Two averages of two images each would reveal them."""
    client = client_of(group=10)
    found = SendAverages().send(client, loader([1, 1, 1, 1]))
    assert found[LABELS].tolist() == [[0, 1, 0]]
    check(found, client.averages_spec(), "the client")


def test_averages_of_several_sizes_are_refused():
    sides = {0: 8, 1: 16}
    sent = {c: {IMAGES: torch.zeros(1, 3, s, s), LABELS: torch.full((1, 3), 1 / 3)} for c, s in sides.items()}
    with pytest.raises(UserError, match="several sizes; bring them to one size"):
        SendAverages().aggregate(FedMixServer(client_of()), {c: Update(m, 1) for c, m in sent.items()})


def test_labels_that_are_no_shares_are_refused():
    message = {IMAGES: torch.zeros(1, 3, 8, 8), LABELS: torch.full((1, 3), 0.5)}
    with pytest.raises(UserError, match="do not sum to 1"):
        SendAverages().validate(FedMixServer(client_of()), 0, Update(message, 9))
