"""DP-SGD on clients: its steps, its noise, its budget, and what it is refused for."""

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.methods import SameEveryRound, method_of
from helpers.refusals import refusal
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Exchanges
from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.methods.creff import CReFFClient
from lit_fedad.methods.deep_svdd import Pretrain
from lit_fedad.methods.fedavg import MEANS, FedAvgClient, FedAvgServer
from lit_fedad.methods.fedbn import FedBNClient
from lit_fedad.methods.fedprox import FedProxClient
from lit_fedad.methods.fedrep import FedRepClient
from lit_fedad.models.convnets import BatchNorm
from lit_fedad.privacy.dp_sgd import Steps, TrainingPlan, TrainingPrivacy, TrainPrivately, fit_privately
from lit_fedad.privacy.image_privacy import Course, mu_of
from lit_fedad.tasks.classifier import Classifier

needs_opacus = pytest.mark.usefixtures("opacus")


@pytest.fixture
def opacus():
    return pytest.importorskip("opacus")


class Rows:
    """Images of three numbers with two classes."""

    def __init__(self, count, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.images, self.labels = torch.randn(count, 3, generator=generator), torch.arange(count) % 2

    def __len__(self):
        return len(self.images)

    def __getitems__(self, places):
        return {"image": self.images[places], "label": self.labels[places]}


class AsIs(nn.Flatten):
    num_features = 3


class Batchwise(nn.Sequential):
    num_features = 3


def client(encoder=None, kind=FedAvgClient, **settings):
    torch.manual_seed(0)
    options = {"augment": False, "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0, **settings}
    return kind(Classifier(encoder or AsIs(), 2, **options))


def weights(own):
    return torch.cat([own.task.classifier.weight.detach(), own.task.classifier.bias.detach()[:, None]], 1)


def trained(rows, steps, clip=0.3, key=b"secret", round=1, own=None, precision="32-true"):
    own = own or client()
    own.context = Context(0, round, 0)
    loader = DataLoader(rows, batch_size=4, collate_fn=lambda batch: batch)
    fit_privately(own, loader, Fabric(accelerator="cpu", precision=precision), steps, clip, key)
    return own


def clipped_mean(rows, weight, clip):
    """The mean gradient of softmax regression, each image's shortened to a norm, by hand."""
    inputs = torch.cat([rows.images, torch.ones(len(rows), 1)], 1).double()
    errors = (inputs @ weight.double().T).softmax(1)
    errors[range(len(rows)), rows.labels] -= 1
    gradients = errors[:, :, None] * inputs[:, None]
    norms = gradients.flatten(1).norm(dim=1)
    assert (norms > clip).any()
    return ((clip / norms).clamp(max=1)[:, None, None] * gradients).mean(0)


def plan(own=None, rounds=3, sizes=(40, 10), staged=False, exchanges=None, **settings):
    sizes = dict(enumerate(sizes))
    privacy = TrainingPrivacy(**{"epsilon": 4.0, "batch_size": 10, **settings})
    method = method_of(own or client())
    method = replace(method, exchanges=exchanges or method.exchanges)
    return privacy.plan(method, Course(rounds, sizes, ClientSampler(), staged=staged))


@needs_opacus
def test_a_step_without_noise_is_the_mean_of_clipped_gradients():
    rows, before = Rows(8), weights(client())
    after = weights(trained(rows, Steps(share=1.0, number=1, noise=0.0)))
    expected = before.double() - 0.5 * clipped_mean(rows, before, 0.3)
    torch.testing.assert_close(after.double(), expected, rtol=1e-4, atol=1e-6)


@needs_opacus
def test_momentum_lasts_from_round_to_round_where_the_optimizer_is_kept():
    rows, own = Rows(8), client(momentum=0.9)
    own.keep_optimizer = True
    steps, before = Steps(share=1.0, number=1, noise=0.0), weights(own).double()
    first = weights(trained(rows, steps, own=own)).double()
    second = weights(trained(rows, steps, own=own, round=2)).double()
    momentum = 0.9 * clipped_mean(rows, before, 0.3) + clipped_mean(rows, first, 0.3)
    torch.testing.assert_close(second, first - 0.5 * momentum, rtol=1e-4, atol=1e-6)


@needs_opacus
def test_layers_are_in_training_mode_while_they_train():
    seen = []

    class Watching(AsIs):
        def forward(self, images):
            seen.append(self.training)
            return super().forward(images)

    own = client(Watching())
    own.task.eval()  # as a plan leaves it
    trained(Rows(8), Steps(share=1.0, number=2, noise=0.0), own=own)
    assert seen == [True, True]
    assert not own.task.training


@needs_opacus
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_no_image_adds_more_than_the_clip_in_whatever_precision(precision):
    for seed in range(8):
        own = client(learning_rate=1.0)
        before = weights(own).double()
        moved = weights(trained(Rows(1, seed), Steps(1.0, 1, 0.0), own=own, precision=precision)) - before
        assert float(moved.norm()) < 0.3 * (1 + 1e-5)


@needs_opacus
def test_a_step_that_draws_no_image_is_noise_of_the_declared_width():
    steps = Steps(share=1e-9, number=400, noise=2.0)
    moved = weights(trained(Rows(8), steps, clip=0.3)) - weights(client())
    # 400 steps of 0.5 * (2 * 0.3) / (8e-9): the deviation of a sum of as many independent draws.
    width = 0.5 * 2.0 * 0.3 / 8e-9 * math.sqrt(400)
    assert 0.4 < float(moved.std()) / width < 1.8  # 8 numbers


@needs_opacus
def test_draws_and_noise_follow_from_the_secret_and_the_round_alone():
    steps = Steps(share=0.5, number=3, noise=1.0)
    once = weights(trained(Rows(8), steps))
    torch.manual_seed(5)
    assert torch.equal(weights(trained(Rows(8), steps)), once)
    assert not torch.equal(weights(trained(Rows(8), steps, key=b"other")), once)
    assert not torch.equal(weights(trained(Rows(8), steps, round=2)), once)


class Digest:
    """A hash whose lowest 32 bits are the same for every secret."""

    def __init__(self, place, key, digest_size):
        self.bytes = key[:1] * (digest_size - 4) + b"same"

    def digest(self):
        return self.bytes


@needs_opacus
def test_all_of_a_secret_decides_and_not_only_the_32_bits_that_a_seed_of_torch_has(monkeypatch):
    monkeypatch.setattr("lit_fedad.privacy.noised_sums.blake2b", Digest)
    steps = Steps(share=1.0, number=1, noise=1.0)
    found = [weights(trained(Rows(8), steps, key=key)) for key in (b"a", b"b")]
    assert not torch.isclose(*found).any()


@needs_opacus
def test_views_of_images_are_as_secret_as_which_of_them_a_step_draws():
    """One image more changes those of all others in a batch, and who knew them would see it."""
    rows = Rows(8)
    rows.images = torch.randn(8, 1, 8, 8)

    def moved(key):
        encoder = AsIs()
        encoder.num_features = 64
        return weights(trained(rows, Steps(1.0, 1, 0.0), key=key, own=client(encoder, augment=True)))

    assert torch.equal(moved(b"one"), moved(b"one"))
    assert not torch.equal(moved(b"one"), moved(b"other"))


@needs_opacus
def test_nothing_stays_on_the_model():
    own = client()
    rows = Rows(8)
    rows.images[:] = torch.nan
    with pytest.raises(UserError, match="the loss is not finite"):
        trained(rows, Steps(share=1.0, number=2, noise=1.0), own=own)
    trained(Rows(8), Steps(share=0.5, number=2, noise=1.0), own=own)
    assert not any(hasattr(parameter, "grad_sample") for parameter in own.task.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in own.task.modules())
    assert not own.task.training


@needs_opacus
def test_layers_that_write_over_their_input_train_as_others_do():
    steps = Steps(share=1.0, number=2, noise=0.0)
    found = [
        weights(trained(Rows(8), steps, own=client(Batchwise(nn.Linear(3, 3), nn.ReLU(inplace)))))
        for inplace in (True, False)
    ]
    assert torch.equal(*found)


@needs_opacus
def test_a_budget_that_no_noise_keeps_is_refused_before_the_run():
    with refusal(r"federation\.privacy\.epsilon=0\.01: no noise .*; give larger"):
        plan(epsilon=0.01)


@needs_opacus
def test_noise_of_whole_batches_is_that_of_the_gaussian_mechanism():
    """With every image in every step there is nothing to gain by drawing: a closed form, by another accountant."""
    found = plan(sizes=(10,), rounds=4, batch_size=10).steps(10)
    assert (found.share, found.number) == (1.0, 1)
    closed = math.sqrt(4) / mu_of(4.0, 1e-5)
    assert closed <= found.noise < 1.1 * closed  # Renyi's bound is a few per cent above


@pytest.mark.slow
@needs_opacus
def test_epochs_are_paid_for_as_rounds_are():
    own = client()
    own.local_epochs = 2
    twice, once = plan(own, sizes=(40,)), plan(rounds=6, sizes=(40,))
    assert twice.steps(40).noise == once.steps(40).noise
    assert twice.epsilon(2) == once.epsilon(4)


@pytest.mark.slow
@needs_opacus
def test_the_budget_is_spent_when_the_rounds_are_over():
    found = plan()
    assert found.steps(40).share == 0.25
    assert found.steps(40).number == 4
    assert found.steps(4).share == 1
    assert found.steps(40).noise < found.steps(10).noise  # fewer draws of an image hide more
    assert found.epsilon(3) == pytest.approx(4.0, rel=5e-3)
    assert found.epsilon(3) <= 4.0
    assert found.epsilon(1) < found.epsilon(2) < found.epsilon(3)
    assert found.summary(3)["epsilon"] == found.epsilon(3)
    assert found.summary(0)["epsilon"] == 0
    with pytest.raises(UserError, match="round 4 would be number 4 of a client's rounds of training"):
        found.check(4, "round 4")


@needs_opacus
@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (lambda: client(kind=FedProxClient), "FedProxClient with task Classifier sends more than weights"),
        (lambda: client(kind=CReFFClient), "CReFFClient with task Classifier sends more than weights"),
        # Which holds parts of the model still in turn.
        (
            lambda: client(Batchwise(nn.Flatten(), nn.Linear(3, 3)), FedRepClient),
            "FedRepClient with task Classifier sends more than weights",
        ),
        (lambda: client(Batchwise(nn.Flatten(), nn.BatchNorm1d(3))), "looks at several images at once"),
        (
            lambda: client(Batchwise(nn.Conv2d(3, 3, 1), BatchNorm(3)), FedBNClient),
            "a layer keeps statistics of batches",
        ),
        (
            lambda: client(Batchwise(nn.BatchNorm1d(3, affine=False)), FedBNClient),
            "a layer keeps statistics of batches",
        ),
        (lambda: client(Batchwise(nn.LSTM(3, 3))), "We do not support nn.LSTM"),
    ],
)
def test_what_cannot_be_trained_privately_is_one_line(made, cause):
    with refusal(cause):
        plan(made())


@needs_opacus
def test_training_of_its_own_and_stages_are_refused():
    with refusal("sends more than weights"):
        plan(exchanges=Exchanges(rounds=(Pretrain(MEANS),)))
    (train,) = method_of(client()).exchanges.rounds
    for several in (Exchanges((train,), (train,)), Exchanges((), (train, train))):
        with refusal("sends more than weights that are trained once a round"):
            plan(exchanges=several)
    with refusal("data that come in stages"):
        plan(staged=True)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setattr("lit_fedad.core.extras.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs opacus: pip install 'lit-fedad\[dp\]'"):
        plan()


@pytest.mark.parametrize("given", [{"epsilon": 0.0}, {"delta": 0.2}, {"clip": 0.0}, {"batch_size": 0}])
def test_numbers_out_of_range_are_refused(given):
    with pytest.raises(UserError, match=r"federation\.privacy"):
        TrainingPrivacy(**given)


@needs_opacus
def test_batch_normalisation_that_stays_as_it_is_looks_at_single_images():
    own = client(Batchwise(nn.Flatten(), nn.BatchNorm1d(3)), FedBNClient)
    own.task.encoder[1].requires_grad_(False).train = lambda mode: own.task.encoder[1]
    own.task.encoder[1].training = False
    assert plan(own).steps(10).share == 1.0


def test_training_takes_the_place_of_training_alone():
    found = TrainingPlan(TrainingPrivacy(epsilon=1.0), {0: 4}, 1, 2)
    noised = found.noised(method_of(client()), b"secret")
    assert [type(one) for one in noised.rounds] == [TrainPrivately]
    assert found.released_in(noised.rounds, client()) == 1
    with pytest.raises(ValueError, match="no secret"):
        TrainPrivately(found, b"", None).train(client(), None, None)


class Two(SameEveryRound):
    """Two clients with eight images each."""

    sizes = {0: 8, 1: 8}

    def client_loader(self, client, generator, shuffle=True):
        return DataLoader(Rows(8, client), batch_size=4, collate_fn=lambda batch: batch)


@pytest.mark.slow
@needs_opacus
def test_an_interrupted_run_ends_with_the_noise_of_an_uninterrupted_one(toy, tmp_path):
    def federation(name, key=b"secret"):
        own = client()
        return toy(
            folder=tmp_path / name,
            server=FedAvgServer(own),
            client=own,
            data=Two(),
            evaluator=SimpleNamespace(after_fit=False),
            privacy=TrainingPrivacy(epsilon=8.0, batch_size=4),
            noise_key=key,
        )

    def end(run):
        run.resume()
        for number in range(run.history[-1].round + 1 if run.history else 1, 4):
            run.history.append(run.play(number))
            run.save(number)
        return run.server.weights["classifier.weight"]

    whole, cut = federation("whole"), federation("cut")
    cut.history.append(cut.play(1))
    cut.save(1)
    assert torch.equal(end(whole), end(federation("cut")))
    assert not torch.equal(end(federation("other", b"other")), end(whole))
    assert whole.privacy["epsilon"] == pytest.approx(8.0, rel=5e-3)
    assert (whole.privacy["sums"], whole.privacy["of"]) == (3, "rounds of DP-SGD")
    assert not any("loss" in report.scalars for report in whole.history)
