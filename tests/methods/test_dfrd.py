"""DFRD: its losses by hand, and equal models that do not change."""

import numpy as np
import pytest
import torch
from helpers.feddm import data_of, make

from lit_fedad.contracts import Context, Update
from lit_fedad.methods import dfrd
from lit_fedad.methods.dfrd import DFRDClient, DFRDServer, Ensemble, disagreement, diversity
from lit_fedad.methods.parts.client_bases import COUNTS
from lit_fedad.models.conditional_gan import ConditionalGenerator

SMALL = {"image_size": 8, "latent": 4, "width": 4, "batch_size": 6, "steps": 2}


def server_of(**settings) -> DFRDServer:
    torch.manual_seed(0)
    server = DFRDServer(DFRDClient(make()), **{**SMALL, **settings})
    server.context = Context(0, 1)
    return server


def uploads(server: DFRDServer) -> dict[int, Update]:
    """The weights of two different models, of which one has seen classes 0 and 1, the other 1 and 2."""
    others = [make(seed=seed).state_dict() for seed in (1, 2)]
    counts = [torch.tensor([4, 2, 0]), torch.tensor([0, 2, 4])]
    return {
        i: Update({**{name: model[name].clone() for name in server.weights}, COUNTS: count}, 6)
        for i, (model, count) in enumerate(zip(others, counts, strict=True))
    }


def test_disagreement_and_diversity_by_hand():
    teacher = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 0.0]])
    student = torch.tensor([[0.0, 1.0], [0.0, 1.0], [2.0, 0.0]])
    # Of the labels 0, 1 and 1, the teacher alone is right about the first image.
    p, q = (np.exp(x) / np.exp(x).sum() for x in (np.array([0.0, 0.5]), np.array([1.0, 0.0])))
    expected = (p * np.log(p / q)).sum()
    found = disagreement(teacher, student, torch.tensor([0, 1, 1]), 2.0)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert disagreement(teacher, teacher, torch.tensor([0, 1, 1]), 2.0) == 0
    mixed = torch.tensor([[0.0, 0.0], [1.0, 0.5]])
    images = torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    # Mean squares .625 and 4, of two of the four pairs.
    assert diversity(mixed, images).item() == pytest.approx(np.exp(-0.5 * 0.625 * 4), rel=1e-6)


def test_the_ensemble_weights_models_by_their_share_of_the_label():
    task = make().eval()
    models = [make(seed=seed).state_dict() for seed in (1, 2)]
    images = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels, counts = torch.tensor([0, 1, 2]), torch.tensor([[3, 1, 0], [1, 1, 5]])
    kept = {name: entry.clone() for name, entry in task.state_dict().items()}
    logits = [make(seed=seed).eval() for seed in (1, 2)]
    with torch.no_grad():
        ensemble = Ensemble(counts, models, task, lambda x: task.classifier(task({"image": x})))
        found = ensemble(images, labels)
        first, second = (model.classifier(model({"image": images})) for model in logits)
    shares = torch.tensor([0.75, 0.5, 0.0])[:, None]
    torch.testing.assert_close(found, shares * first + (1 - shares) * second)
    assert ensemble.frequencies.tolist() == [4, 2, 5]
    assert all(torch.equal(kept[name], entry) for name, entry in task.state_dict().items())


def test_equal_models_leave_their_average_alone():
    server = server_of(weight_decay=0.0)
    model = {name: entry.clone() for name, entry in server.weights.items()}
    message = {**model, COUNTS: torch.tensor([2, 2, 2])}
    server.aggregate({0: Update(message, 6), 1: Update(dict(message), 6)})
    for name, entry in model.items():
        torch.testing.assert_close(server.weights[name], entry, rtol=1e-5, atol=1e-6)


def test_different_models_move_it_and_the_moving_average_follows():
    server = server_of(memory=0.25)
    updates = uploads(server)
    server.aggregate(updates)
    mean = sum(update.message["classifier.weight"] for update in updates.values()) / 2
    assert not torch.equal(server.weights["classifier.weight"], mean)
    torch.testing.assert_close(server.average["embedding.weight"], server.generator["embedding.weight"])
    before = server.average["embedding.weight"].clone()
    server.context = Context(0, 2)
    server.aggregate(updates)
    expected = 0.25 * before + 0.75 * server.generator["embedding.weight"]
    torch.testing.assert_close(server.average["embedding.weight"], expected)
    assert set(server.diagnostics()) == {"generator_loss", "distillation_loss"}


def test_the_generator_s_loss_by_hand():
    weights = {"transfer": 2.0, "diversity": 3.0, "embedding_bound": 5.0, "temperature": 3.0}
    server = server_of(steps=1, generator_steps=1, distillation_steps=1, **weights)
    updates = uploads(server)
    for client, label in enumerate([0, 2]):  # the ensemble is right where the average is in doubt
        updates[client].message["classifier.bias"][label] += 9
    network = ConditionalGenerator(3, 8, latent=4, width=4)
    server.generator["embedding.weight"] *= 9  # longer than the root of the latent size
    network.load_state_dict(server.generator)
    models, student = [make().eval() for _ in updates], make().eval()
    for model, update in zip(models, updates.values(), strict=True):
        model.load_state_dict({name: update.message[name] for name in server.weights}, strict=False)
    mean = {n: sum(u.message[n] for u in updates.values()) / 2 for n in server.weights}
    student.load_state_dict(mean, strict=False)
    with torch.no_grad(), server.context.seeded("distillation"):
        labels = torch.multinomial(torch.tensor([4.0, 4.0, 4.0]), 6, replacement=True)
        mixed = network.mixed(labels, torch.randn(6, 4))
        images = network.decode(mixed)
        logits = [model.classifier(model({"image": images})) for model in (*models, student)]
        first = torch.tensor([1.0, 0.5, 0.0])[labels, None]
        teacher = first * logits[0] + (1 - first) * logits[1]
        lengths = network.embedding(labels).norm(dim=1)
        apart = disagreement(teacher, logits[2], labels, 3.0)
        expected = (
            torch.nn.functional.cross_entropy(teacher, labels)
            - 2 * apart
            + 3 * diversity(mixed, images)
            + 5 * (lengths - 2).clamp(min=0).mean()
        )
    assert apart > 0
    server.aggregate(updates)
    assert server.diagnostics()["generator_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_the_server_s_steps_have_the_rates_that_are_set(monkeypatch):
    """In each turn Adam with the released code's betas on the generator, then SGD on the average; both start anew."""
    taken = []
    monkeypatch.setattr(dfrd, "take_step", lambda optimizer, loss, key: taken.append(optimizer) or 0.0)
    rates = {"generator_rate": 0.3, "learning_rate": 0.2, "weight_decay": 0.1}
    server_of(**rates, generator_steps=3, distillation_steps=4).aggregate(uploads(server_of()))
    turns = [(type(optimizer), optimizer.defaults["lr"]) for optimizer in taken]
    assert turns == 2 * [*3 * [(torch.optim.Adam, 0.3)], *4 * [(torch.optim.SGD, 0.2)]]
    assert len(set(map(id, taken))) == 4
    assert taken[0].defaults["betas"] == (0.5, 0.999)
    assert (taken[3].defaults["weight_decay"], taken[3].defaults["momentum"]) == (0.1, 0)


def test_every_divergence_has_the_temperature_and_replay_weighs_the_second(monkeypatch):
    monkeypatch.setattr(
        dfrd, "divergence", lambda logits, teacher, temperature: 0 * logits.sum() + temperature
    )
    server = server_of(temperature=3.0, replay=0.25, transfer=1.0, diversity=0.0, embedding_bound=0.0)
    for round, expected in ((1, 3.0), (2, 3.0 + 0.25 * 3.0)):
        server.context = Context(0, round)
        server.aggregate(uploads(server))
        assert server.diagnostics()["distillation_loss"] == pytest.approx(expected)


def test_images_of_the_moving_average_are_replayed_from_round_2_on():
    """The average is distilled on them too: another moving average gives other weights, and not where replay is 0."""

    def weights_after(shift: float, replay: float) -> torch.Tensor:
        server = server_of(replay=replay)
        server.aggregate(uploads(server))
        server.average = {name: entry + shift for name, entry in server.average.items()}
        server.context = Context(0, 2)
        server.aggregate(uploads(server))
        return server.weights["classifier.weight"]

    assert not torch.equal(weights_after(0.0, 0.5), weights_after(1.0, 0.5))
    assert torch.equal(weights_after(0.0, 0.0), weights_after(1.0, 0.0))


def test_weights_alone_come_down(federate):
    played = federate(DFRDClient, DFRDServer, task=make(), data=data_of(), server=SMALL, rounds=1)
    assert COUNTS not in played.client.broadcast_spec()
    assert set(played.client.upload_spec()) == {COUNTS, *played.server.weights}
