"""Training on condensed images, against loops by hand."""

import pytest
import torch
from helpers.refusals import refusal
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import nn
from torch.nn import functional as F

from lit_fedad.condensation.training import CondensedTraining, ExtraLoss

FABRIC = Fabric(accelerator="cpu", devices=1)
STILL = 1e-30  # a learning rate at which nothing moves


def images(n: int = 5, side: int = 4) -> torch.Tensor:
    return torch.rand(n, 1, side, side, generator=torch.Generator().manual_seed(0))


def labels(n: int = 5) -> torch.Tensor:
    return torch.arange(n) % 3


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), nn.Linear(4, 3))


def train(settings, model=None, extra=None, n: int = 5, features=None, seed: int = 0, fabric=FABRIC):
    model = model or make()
    training = CondensedTraining(**{"epochs": 1, "batch_size": 2, "augment": False, **settings})
    draws = torch.Generator().manual_seed(seed)
    report = training(
        model, features or model[0], model[1], images(n), labels(n), lambda x: 2 * x - 1, draws, fabric, extra
    )
    return model, report


class Constant(nn.Module):
    """A loss of 1 whose gradient in its own parameter is 1; it remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seen = []

    def forward(self, features, target):
        self.seen.append((features.detach(), target))
        return 1 + (self.shift - self.shift.detach()).sum() + 0 * features.sum()


@pytest.mark.parametrize(
    ("epochs", "at_full_rate", "late"),
    [(1, 1, 0.1), (2, 1, 0.1), (3, 2, 0.1), (4, 2, 0.1), (5, 3, 0.1), (4, 2, 0.5), (4, 2, 1.0)],
)
def test_sgd_whose_rate_falls_at_half_time(epochs, at_full_rate, late):
    rate, momentum, decay = 0.3, 0.8, 0.05
    settings = {"learning_rate": rate, "momentum": momentum, "weight_decay": decay}
    model, report = train({"epochs": epochs, **settings, **({} if late == 0.1 else {"late_share": late})})

    by_hand = make().double()
    weights = [p.detach() for p in by_hand.parameters()]
    velocity, draws = [torch.zeros_like(w) for w in weights], torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        losses, right = [], 0
        for rows in torch.randperm(5, generator=draws).split(2):
            x, y = (2 * images()[rows] - 1).double().flatten(1), labels()[rows]
            for w in weights:
                w.requires_grad_()
            logits = (x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]
            loss = F.cross_entropy(logits, y)
            gradients = torch.autograd.grad(loss, weights)
            velocity = [
                momentum * v + g + decay * w.detach()
                for v, g, w in zip(velocity, gradients, weights, strict=True)
            ]
            step = rate if epoch < at_full_rate else rate * late
            weights = [(w - step * v).detach() for w, v in zip(weights, velocity, strict=True)]
            losses += [float(loss.detach())] * len(rows)
            right += int((logits.argmax(1) == y).sum())
    for found, wanted in zip(model.parameters(), weights, strict=True):
        torch.testing.assert_close(found.detach().double(), wanted, rtol=1e-4, atol=1e-6)
    assert report == pytest.approx({"server_loss": sum(losses) / 5, "server_accuracy": right / 5}, rel=1e-4)


def test_a_scaled_loss_takes_the_steps_of_a_plain_one():
    """As in 16-mixed on a GPU; both optimisers share the scale."""
    halved = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    found, plain = (
        train({"epochs": 2}, extra=ExtraLoss(Constant(), 1.0, 0.1), fabric=fabric)[0]
        for fabric in (Fabric(accelerator="cpu", devices=1, plugins=[halved]), FABRIC)
    )
    for one, other in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_a_last_batch_of_one_image_is_learnt_but_not_contrasted():
    module = Constant()
    module.norm = nn.BatchNorm1d(4)  # which refuses a batch of one

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, features, target):
            return self.inner(module.norm(features), target)

    model, report = train({"learning_rate": STILL}, extra=ExtraLoss(Normed(), 3.0, 0.1))
    assert [len(target) for _, target in module.seen] == [2, 2]
    loss = float(F.cross_entropy(model(2 * images() - 1).detach(), labels()))
    assert report["server_loss"] == pytest.approx(loss + 3.0 * 4 / 5, rel=1e-5)
    alone, _ = train({"learning_rate": 0.1}, n=1)
    assert not torch.equal(alone[1].weight, make()[1].weight)


@pytest.mark.parametrize(("epochs", "share"), [(1, 1.0), (2, 0.1), (4, 0.1)])
def test_the_weight_of_the_other_loss_falls_at_half_time(epochs, share):
    """Seen in the last epoch."""
    model, report = train(
        {"learning_rate": STILL, "epochs": epochs}, extra=ExtraLoss(Constant(), 2.0, 0.1), n=6
    )
    loss = float(F.cross_entropy(model(2 * images(6) - 1).detach(), labels(6)))
    assert report["server_loss"] == pytest.approx(loss + 2.0 * share, rel=1e-5)


def test_the_rate_of_the_other_loss_falls_at_half_time():
    """Adam moves by its rate where gradients are equal, as in 3 steps; 3 more at a tenth of rate and gradient."""
    module, rate = Constant(), 0.01
    train({"learning_rate": STILL, "epochs": 1}, extra=ExtraLoss(module, 2.0, rate), n=6)
    assert float(module.shift.detach()) == pytest.approx(-3 * rate, rel=1e-5)
    module = Constant()
    train({"learning_rate": STILL, "epochs": 2}, extra=ExtraLoss(module, 2.0, rate), n=6)
    first = second = moved = 0.0
    for step, (gradient, own) in enumerate([(2.0, rate)] * 3 + [(0.2, rate / 10)] * 3, start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        moved -= own * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)) ** 0.5 + 1e-8)
    assert float(module.shift.detach()) == pytest.approx(moved, rel=1e-5)


def test_cross_entropy_looks_at_augmented_images_each_with_a_draw_of_its_own_and_the_other_loss_does_not():
    model, seen, module = make(), [], Constant()

    def features(batch):
        seen.append(batch)
        return model[0](batch)

    training = CondensedTraining(1, 8, learning_rate=STILL)
    same = images(1).expand(8, 1, 4, 4)
    draws = torch.Generator().manual_seed(0)
    training(
        model, features, model[1], same, labels(8), lambda x: x, draws, FABRIC, ExtraLoss(module, 1.0, 0.1)
    )
    view, plain = seen
    assert torch.equal(plain, same)
    assert len({image.numpy().tobytes() for image in view}) > 3
    torch.testing.assert_close(module.seen[0][0], model[0](same).detach())


def test_the_other_loss_moves_the_features():
    class Pull(nn.Module):
        def __init__(self):
            super().__init__()
            self.place = nn.Parameter(torch.zeros(4))

        def forward(self, features, target):
            return (features - self.place).square().mean()

    pull = Pull()
    with_it, _ = train({"learning_rate": 0.1, "epochs": 20}, extra=ExtraLoss(pull, 1.0, 1e-3))
    without, _ = train({"learning_rate": 0.1, "epochs": 20})
    one, two = (model[0](2 * images() - 1).detach().norm() for model in (with_it, without))
    assert one < 0.5 * two
    assert pull.place.detach().abs().max() > 0


def test_the_model_trains_in_training_mode_and_is_left_in_evaluation():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4)), nn.Linear(4, 3)
    ).eval()
    train({"epochs": 2}, model, n=6)
    assert not any(module.training for module in model.modules())
    assert int(model[0][2].num_batches_tracked) == 6


def test_a_loss_that_is_not_finite_is_named_in_one_line():
    with refusal(r"lower method\.server\.training\.learning_rate"):
        train({"epochs": 4, "learning_rate": 1e30})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1, "batch_size": 0}, "batch_size=0"),
        ({"epochs": 1, "learning_rate": 0.0}, r"learning_rate=0\.0"),
        ({"epochs": 1, "momentum": -0.5}, r"momentum=-0\.5"),
        ({"epochs": 1, "momentum": 1.0}, r"momentum=1\.0"),
        ({"epochs": 1, "weight_decay": -1.0}, r"weight_decay=-1\.0"),
    ],
)
def test_settings_out_of_range_are_refused(setting, said):
    with refusal(said):
        CondensedTraining(**setting)
