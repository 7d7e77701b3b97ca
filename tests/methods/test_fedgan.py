"""FedGAN: its networks' form and losses, and what crosses."""

from copy import deepcopy

import pytest
import torch
from helpers.feddm import FABRIC, data_of, loader, make
from torch.nn import functional as F

from lit_fedad.contracts import Context, Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.fedavg import FedAvgServer
from lit_fedad.methods.fedgan import FedGANClient, balanced_labels
from lit_fedad.models.conditional_gan import ConditionalDiscriminator, ConditionalGenerator
from lit_fedad.robust.weights import NormClipping

SMALL = {"image_size": 8, "latent": 4, "width": 4}


def client_of(round: int = 2, **settings) -> FedGANClient:
    torch.manual_seed(0)
    client = FedGANClient(make(), **{**SMALL, **settings})
    client.context = Context(0, round, 0)
    client.task.augment = False
    return client


@pytest.mark.parametrize(("side", "weights"), [(8, 8), (28, 32), (64, 64)])
def test_images_have_the_size_that_was_asked_for(side, weights):
    torch.manual_seed(0)
    generator = ConditionalGenerator(3, side, channels=1, latent=4, width=16, mean=[0.25], std=[0.5])
    images = generator(torch.tensor([0, 2]), torch.randn(2, 4))
    assert images.shape == (2, 1, side, side)
    assert images.min() >= -0.5
    assert images.max() <= 1.5
    assert generator.layers(torch.randn(1, 4, 1, 1)).shape[-1] == weights
    judge = ConditionalDiscriminator(3, side, channels=1, width=16)
    assert judge(images, torch.tensor([0, 2])).shape == (2,)


def test_the_parameters_of_32_pixels_by_hand():
    """4 x 4 kernels: 100 -> 512 -> 256 -> 128 -> 3 with labels' embeddings; 3 + 10 -> 128 -> 256 -> 512 -> 1."""
    generator, judge = ConditionalGenerator(10, 32), ConditionalDiscriminator(10, 32)
    count = [sum(p.numel() for p in network.parameters()) for network in (generator, judge)]
    made = 10 * 100 + 16 * (100 * 512 + 512 * 256 + 256 * 128 + 128 * 3) + 2 * (256 + 128)
    judged = 16 * (13 * 128 + 128 * 256 + 256 * 512 + 512) + 2 * (256 + 512)
    assert count == [made, judged]
    assert not list(generator.buffers())[2:]  # nothing but mean and standard deviation of pixels


def test_the_first_step_s_losses_by_hand():
    client = client_of(learning_rate=1e-12)
    batch = next(iter(loader([0, 1, 2, 1])))
    torch.manual_seed(3)
    found = client.train_gan([batch], FABRIC)
    torch.manual_seed(3)
    with torch.no_grad():
        fake = client.generator(batch["label"], torch.randn(4, 4))
        real, made = (client.discriminator(x, batch["label"]).sigmoid() for x in (batch["image"], fake))
    assert found["discriminator_loss"] == pytest.approx(
        float(-(real.log() + (1 - made).log()).mean()), rel=1e-4
    )
    assert found["generator_loss"] == pytest.approx(float(-made.log().mean()), rel=1e-4)


def test_each_batch_is_a_step_of_both_networks_with_gradients_of_their_own_loss():
    client, rate = client_of(learning_rate=0.01, latent=2), 0.01
    batches = list(loader([0, 1, 2, 1, 2, 0]))  # of four images, and of two
    generator, judge = deepcopy(client.generator), deepcopy(client.discriminator)
    adams = {n: torch.optim.Adam(n.parameters(), rate, (0.5, 0.999)) for n in (judge, generator)}
    losses = []

    def step(network, loss):
        weights = list(network.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        adams[network].step()
        losses.append(loss.item())

    torch.manual_seed(3)
    found = client.train_gan(batches, FABRIC)
    torch.manual_seed(3)
    for batch in batches:
        labels = batch["label"]
        fake = generator(labels, torch.randn(len(labels), 2))
        real, made = judge(batch["image"], labels), judge(fake.detach(), labels)
        step(judge, -(F.logsigmoid(real) + F.logsigmoid(-made)).mean())
        step(generator, -F.logsigmoid(judge(fake, labels)).mean())
    means = sum(losses[::2]) / 2, sum(losses[1::2]) / 2
    assert (found["discriminator_loss"], found["generator_loss"]) == pytest.approx(means, rel=1e-3)
    for ours, theirs in ((client.generator, generator), (client.discriminator, judge)):
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        # In the mean: rounding decides where a weight whose gradient is almost 0 goes.
        assert torch.cat([(one - other).abs().flatten() for one, other in pairs]).mean() < 0.01 * rate


def test_a_batch_is_joined_by_as_many_generated_images_of_all_classes():
    client = client_of().eval()
    batch = next(iter(loader([0, 0, 0, 1])))
    torch.manual_seed(5)
    found = client.training_step(batch)["loss"].item()
    torch.manual_seed(5)
    asked = balanced_labels(4, 3)
    with torch.no_grad():
        made = client.generator(asked, torch.randn(4, 4))
        task = client.task
        logits = task.classifier(task({"image": torch.cat([batch["image"], made])}))
        expected = F.nll_loss(logits.log_softmax(1), torch.cat([batch["label"], asked])).item()
    assert found == pytest.approx(expected, rel=1e-5)
    assert asked.bincount().sort().values.tolist() == [1, 1, 2]


def test_in_round_one_the_generator_has_learnt_nothing_yet_and_the_model_trains_on_local_images():
    batch = next(iter(loader([0, 0, 0, 1])))
    client = client_of(round=1).eval()
    assert client.training_step(batch)["loss"] == client.task.training_step(batch)["loss"]


def test_received_networks_are_loaded():
    client, sent = client_of(), {n: w + 1 for n, w in client_of().shared_state().items()}
    client.receive(sent)
    for name, weight in client.shared_state().items():
        torch.testing.assert_close(weight, sent[name])


def test_a_gan_that_diverges_is_refused():
    batch = next(iter(loader([0, 1, 2, 1])))
    with pytest.raises(UserError, match=r"lower method\.client\.learning_rate"):
        client_of().train_gan([{**batch, "image": torch.full_like(batch["image"], torch.inf)}], FABRIC)


def test_all_three_networks_cross_in_both_directions(federate, tap):
    played = federate(
        FedGANClient, FedAvgServer, task=make(), data=data_of(), client=SMALL, rounds=2, channel=tap
    )
    last, size = played.history[-1], sum(w.numel() for w in played.server.weights.values())
    assert set(last.elements_up.values()) == {size}
    assert min(last.bytes_down.values()) > 4 * (size - 10)
    names = {name.split(".")[0] + "." for name in played.server.weights}
    assert {"GAN/generator.", "GAN/discriminator."} < names


def test_equal_uploads_are_their_own_mean_and_the_order_of_clients_does_not_matter():
    states = [client_of().shared_state(), {n: w + 1 for n, w in client_of().shared_state().items()}]
    first, second = (Update(state, size) for state, size in zip(states, (3, 5), strict=True))
    servers = [FedAvgServer(client_of()) for _ in range(3)]
    servers[0].aggregate({0: first, 1: Update(dict(first.message), 7)})
    servers[1].aggregate({0: first, 1: second})
    servers[2].aggregate({0: second, 1: first})
    assert all(torch.equal(servers[0].weights[name], entry) for name, entry in first.message.items())
    assert all(torch.equal(servers[1].weights[n], entry) for n, entry in servers[2].weights.items())


def test_the_gan_hides_no_change_of_the_model_that_is_too_long():
    """With the preset their 250 times as many weights change twice as far."""
    client = client_of()
    sent, model = client.shared_state(), dict(client.task.named_parameters())
    moved = {name: entry + (0.01 if name in model else 0.1) for name, entry in sent.items()}
    lie = {n: sent[n] + 10 * (entry - sent[n]) if n in model else entry for n, entry in moved.items()}
    updates = {number: Update(lie if number == 1 else moved, 5) for number in range(4)}
    _, remarks = NormClipping(max_length_ratio=6.0)(updates, client.shared_spec(), sent)
    assert [number for number, _ in remarks] == [1]


def test_a_width_that_cannot_be_halved_is_refused():
    for section in ("method.client", "method.server"):
        with pytest.raises(UserError, match=rf"^{section}\.width=2 must be at least 4$"):
            ConditionalGenerator(3, 32, width=2, section=section)
