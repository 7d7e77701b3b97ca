"""SED: a whole distillation by hand, its student, teachers and normalisation."""

from collections import deque

import numpy as np
import pytest
import torch
from helpers.distillation import naive_loss, weights_by_hand
from helpers.draws import rows, units
from helpers.encoder import ConvEncoder
from helpers.refusals import refusal
from lightning.fabric import Fabric
from torch import nn

from lit_fedad.contracts import Context, Update
from lit_fedad.methods.fadngs import FADngsClient, FADngsServer
from lit_fedad.methods.parts.ensemble_distillation import (
    EnsembleDistillation,
    as_batch,
)
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import CRAD, SimCLR


def make(seed: int = 0, normalise: bool = False) -> Contrastive:
    torch.manual_seed(seed)
    task = Contrastive(
        ConvEncoder(normalise),
        CRAD(),
        SimCLR(),
        warmup=1,
        rounds=5,
        views=ContrastiveViews(),
        projection=4,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.25),
    )
    task.round = 3
    return task


def message(task: Contrastive) -> dict[str, torch.Tensor]:
    """What crosses: the weights without the densities."""
    return {k: v.clone() for k, v in task.state_dict().items() if k not in task.local_buffers}


def with_densities(task: Contrastive) -> Contrastive:
    root = rows(2, 4, 4).float()
    task.densities.set(units(2, 4).float(), root @ root.mT + 0.1 * torch.eye(4))
    return task


def public_images(count: int = 11) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 8, 8), generator=draw, dtype=torch.uint8)


def distil(distillation, task, teachers, start=None, public=None, context=None, fabric=None):
    start = message(make(7)) if start is None else start
    public = public_images() if public is None else public
    return distillation(task, start, dict(enumerate(teachers)), public, context or Context(0, 3), fabric)


def embedded(state, images, normalise: bool = False) -> torch.Tensor:
    """Unit projections of uint8 images under a message's weights, in evaluation mode."""
    task = make(normalise=normalise)
    task.load_state_dict(state, strict=False)
    task.eval()
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.25])
    pixels = (images.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    return nn.functional.normalize(task.projection(task.encoder(pixels)), dim=1)


@pytest.fixture
def teachers():
    return [message(make(seed)) for seed in (1, 2, 3)]


def test_public_images_look_as_the_tasks_loaders_give_them():
    images = public_images(2)
    found = as_batch(make(), images)["image"].double().numpy()
    mean, std = (np.array(x).reshape(3, 1, 1) for x in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
    np.testing.assert_allclose(found, (images.numpy() / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    features = torch.ones(2, 5)  # of a frozen encoder, as they are
    assert as_batch(make(), features)["image"] is features


@pytest.mark.parametrize(("own_key", "decay"), [(False, True), (True, False)])
def test_a_distillation_is_what_it_is_by_hand(teachers, own_key, decay):
    task, public = with_densities(make()), public_images(11)
    options = {"momentum": 0.9, "weight_decay": 0.01, "learning_rate": 0.2}
    temperatures = {"teacher_temperature": 0.1, "student_temperature": 0.3}
    found, report = distil(
        EnsembleDistillation(
            10, epochs=2, batch_size=4, own_key=own_key, decay=decay, **options, **temperatures
        ),
        task,
        teachers,
        public=public,
    )

    with torch.no_grad():
        z = torch.stack([embedded(teacher, public) for teacher in teachers])
        difference = z[:, :, None] - task.densities.mean
        inverse = torch.linalg.inv(task.densities.covariance)
        scores = torch.einsum("cpmi,mij,cpmj->cpm", difference, inverse, difference).amin(2)
    weights = torch.tensor(weights_by_hand(scores.numpy())).float()
    draw = Context(0, 3).generator("distillation")
    queues = [deque(nn.functional.normalize(torch.randn(10, 4, generator=draw), dim=1), maxlen=10) for _ in z]
    student = make(7)
    # Round 3 is the second of the four after the warm-up.
    options["lr"] = options.pop("learning_rate") * ((1 + np.cos(np.pi / 4)) / 2 if decay else 1)
    optimizer, losses = torch.optim.SGD(student.parameters(), **options), []
    for _ in range(2):
        for batch in torch.randperm(11, generator=draw).split(4):
            projections = student.project(student.encoder(as_batch(student, public[batch])["image"]))
            keys = torch.stack([torch.stack(list(queue)) for queue in queues])
            loss = naive_loss(projections, z[:, batch], keys, weights, 0.1, 0.3, own_key)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            for queue, embeddings in zip(queues, z, strict=True):
                queue.extend(embeddings[batch])
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-3, atol=1e-5)
    assert report.pop("queue_filled") == 1
    by_hand = {"distillation_loss": np.mean(losses)}
    by_hand |= {f"teacher_weight_{number}": float(weight) for number, weight in enumerate(weights)}
    # Weights are a matter of small differences between scores in single precision.
    assert report == pytest.approx(by_hand, rel=1e-4, abs=1e-5)


def test_only_what_was_sent_comes_back_and_the_task_keeps_it(teachers):
    task, start = with_densities(make()), message(make(7))
    densities = {name: task.state_dict()[name].clone() for name in task.local_buffers}
    before = {name: entry.clone() for name, entry in start.items()}
    found, _ = distil(EnsembleDistillation(10, epochs=1, batch_size=4), task, teachers, start)
    assert found.keys() == start.keys()
    assert not task.training
    assert all(torch.equal(task.state_dict()[name], entry) for name, entry in found.items())
    assert all(torch.equal(task.state_dict()[name], entry) for name, entry in densities.items())
    assert all(torch.equal(start[name], entry) for name, entry in before.items())
    assert not torch.equal(found["projection.0.weight"], start["projection.0.weight"])
    kept = {name: entry.clone() for name, entry in found.items()}
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.zero_()
    assert all(torch.equal(kept[name], entry) for name, entry in found.items())


def test_teachers_are_asked_once_a_round(teachers):
    task, seen = with_densities(make()), {True: [], False: []}
    task.encoder.register_forward_hook(lambda module, inputs, _: seen[module.training].append(len(inputs[0])))
    distil(EnsembleDistillation(10, epochs=3, batch_size=4), task, teachers)
    assert seen[False] == [11] * 3
    assert seen[True] == [4, 4, 3] * 3


@pytest.mark.parametrize("weighting", ["uniform", "pearson"])
def test_weights_are_uniform_if_asked_for_or_without_densities(teachers, weighting):
    task = with_densities(make()) if weighting == "uniform" else make()
    _, report = distil(EnsembleDistillation(10, 1, 4, weighting=weighting), task, teachers)
    assert [report[f"teacher_weight_{number}"] for number in range(3)] == pytest.approx([1 / 3] * 3)


def test_the_server_weights_teachers_by_the_densities_that_it_shares(teachers):
    task, distillation = with_densities(make()), EnsembleDistillation(10, 1, 4)
    server = FADngsServer(FADngsClient(make()), distillation, public_images())
    server.auxiliary = {name: task.state_dict()[name] for name in ("densities.mean", "densities.covariance")}
    server.context = Context(0, 3)
    server.aggregate({client: Update(teacher, 5) for client, teacher in enumerate(teachers)})
    _, report = distil(distillation, task, teachers)
    weights = [report[f"teacher_weight_{number}"] for number in range(3)]
    assert [server.report[f"teacher_weight_{number}"] for number in range(3)] == pytest.approx(weights)
    assert max(weights) - min(weights) > 0.01


def test_normalisation_layers_follow_the_student_and_judge_teachers_by_their_own():
    public = public_images(12)
    states = [message(make(seed, normalise=True)) for seed in (1, 2)]
    for seed, state in enumerate(states):
        state["encoder.norm.running_mean"] = rows(6, seed=seed).float()
    task, start = with_densities(make(normalise=True)), message(make(7, normalise=True))
    distillation = EnsembleDistillation(10, 1, 4, freeze_normalisation=False)
    found, report = distil(distillation, task, states, start, public)
    with torch.no_grad():
        scores = torch.stack([task.densities(embedded(state, public, normalise=True)) for state in states])
    expected = weights_by_hand(scores.double().numpy())
    assert [report["teacher_weight_0"], report["teacher_weight_1"]] == pytest.approx(
        expected.tolist(), rel=1e-4
    )
    # From the start's statistics, three batches on.
    assert int(found["encoder.norm.num_batches_tracked"]) == 3
    assert not torch.equal(found["encoder.norm.running_mean"], start["encoder.norm.running_mean"])


def test_with_frozen_normalisation_equal_teachers_teach_nothing():
    task, start = with_densities(make(normalise=True)), message(make(7, normalise=True))
    start["encoder.norm.running_mean"] = rows(6, seed=1).float()
    for frozen in (True, False):
        distillation = EnsembleDistillation(10, 2, 4, weight_decay=0.0, freeze_normalisation=frozen)
        found, _ = distil(distillation, task, [start, start], start, public_images(12))
        close = [torch.allclose(found[name], entry, atol=1e-6) for name, entry in start.items()]
        assert all(close) is frozen


def test_fewer_public_images_than_a_batch_are_one_batch(teachers):
    task = with_densities(make())
    found, report = distil(EnsembleDistillation(40, epochs=2), task, teachers, public=public_images(5))
    assert report["queue_filled"] == 10 / 40
    assert all(entry.isfinite().all() for entry in found.values())


def test_a_last_batch_of_one_image_is_left_out(teachers):
    task, seen = with_densities(make()), {True: [], False: []}
    task.encoder.register_forward_hook(lambda module, inputs, _: seen[module.training].append(len(inputs[0])))
    distillation = EnsembleDistillation(10, epochs=2, batch_size=4, freeze_normalisation=False)
    distil(distillation, task, teachers, public=public_images(5))
    assert seen[True] == [4, 4]


def test_settings_out_of_range_are_refused():
    zero = dict.fromkeys(("queue", "epochs", "batch_size"), 0)
    zero |= dict.fromkeys(("teacher_temperature", "student_temperature"), 0.0)
    negative = dict.fromkeys(("learning_rate", "momentum", "weight_decay"), -0.1)
    for name, value in [*zero.items(), *negative.items(), ("momentum", 1.0)]:
        with refusal(rf"method\.server\.distillation\.{name}={value} must be"):
            EnsembleDistillation(**{name: value})


def test_a_learning_rate_that_diverges_is_named(teachers):
    distillation = EnsembleDistillation(10, epochs=3, batch_size=4, learning_rate=1e38)
    with refusal(r"lower method\.server\.distillation\.learning_rate"):
        distil(distillation, with_densities(make()), teachers)


def test_mixed_precision_distils_nearly_the_same(teachers):
    distillation = EnsembleDistillation(10, epochs=2, batch_size=4)
    exact, exact_report = distil(distillation, with_densities(make()), teachers)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    found, report = distil(distillation, with_densities(make()), teachers, fabric=fabric)
    assert report["distillation_loss"] == pytest.approx(exact_report["distillation_loss"], rel=0.02)
    assert report["distillation_loss"] != exact_report["distillation_loss"]
    start = message(make(7))
    for name, entry in found.items():
        assert entry.dtype == torch.float32
        # What rounding does is small beside what training does.
        assert (entry - exact[name]).norm() < 0.2 * (exact[name] - start[name]).norm()


class Forgetful(nn.Sequential):
    num_features = 8

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, stride=2), nn.AvgPool2d(3), nn.Flatten(), nn.Dropout(0.5))


def test_draws_of_dropout_depend_on_the_round_alone(federate, make_contrastive, make_images, exactly):
    """Not on numbers that the process has drawn before, as it has not after an interruption."""
    public = torch.arange(12 * 3 * 8 * 8).remainder(251).to(torch.uint8).view(12, 3, 8, 8)
    distillation = EnsembleDistillation(queue=16, epochs=2, batch_size=5, learning_rate=0.01)
    weights = []
    for drawn in (1, 2):
        torch.manual_seed(0)
        played = federate(
            FADngsClient,
            FADngsServer,
            task=make_contrastive(encoder=Forgetful(), warmup=0),
            data={0: make_images(), 1: make_images(seed=1)},
            server={"distillation": distillation, "public": public},
            rounds=2,
            question=lambda client, number: None,
            after_round=lambda *_, count=drawn: torch.manual_seed(count),
        )
        weights.append(played.server.weights)
    exactly(*weights)
