"""The contrastive task: views, selection, densities, schedule, and its life under a plain Trainer."""

import math

import numpy as np
import pytest
import torch
from helpers.encoder import ConvEncoder
from helpers.trainers import plain_trainer
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import CRAD, CSI, CRADCode, CrossEntropy, Reconstruction, SimCLR

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def decoder(width: int, size: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 3 * size * size), nn.Unflatten(1, (3, size, size)))


def make(seed: int = 0, **overrides) -> Contrastive:
    torch.manual_seed(seed)
    parts = {
        "encoder": ConvEncoder(),
        "loss": CRAD(),
        "warmup_loss": SimCLR(),
        "warmup": 3,
        "rounds": 11,
        "views": ContrastiveViews(),
        "projection": 4,
        "mean": MEAN,
        "std": STD,
        **overrides,
    }
    return Contrastive(**parts)


def make_loader(count: int = 20, batch_size: int = 8) -> DataLoader:
    """Normalised images whose places in the data set run backwards."""
    draw = torch.Generator().manual_seed(0)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    data = [
        {
            "image": (torch.rand(3, 8, 8, generator=draw) - mean) / std,
            "index": count - 1 - i,
            "category": i % 2,
        }
        for i in range(count)
    ]
    return DataLoader(data, batch_size=batch_size)


def whole(loader: DataLoader) -> dict:
    return next(iter(DataLoader(loader.dataset, batch_size=len(loader.dataset))))


@torch.no_grad()
def test_projections_have_length_one_and_are_made_of_features():
    task, batch = make(), whole(make_loader(5))
    features = task(batch)
    hidden = features @ task.projection[0].weight.T + task.projection[0].bias
    z = (hidden.clamp(min=0) @ task.projection[2].weight.T + task.projection[2].bias).double().numpy()
    torch.testing.assert_close(features, task.encoder(batch["image"]))
    np.testing.assert_allclose(
        task.project(features).numpy(), z / np.linalg.norm(z, axis=1, keepdims=True), rtol=1e-4, atol=1e-6
    )
    assert task.projection[0].weight.shape == (6, 6)
    assert task.num_features == 6


def test_views_are_drawn_from_images_in_unit_range_and_normalised_again():
    given = []

    def draw(images):
        given.append(images)
        return images

    task, batch = make(views=draw), whole(make_loader(5))
    view = task.view(batch)
    unit = batch["image"] * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert len(given) == 8
    torch.testing.assert_close(given[0], unit)
    assert 0 <= given[0].min() < given[0].max() <= 1
    assert view["views"].shape == (8, 5, 3, 8, 8)
    assert view["image"].shape == (40, 3, 8, 8)
    torch.testing.assert_close(view["image"][:10], batch["image"].repeat(2, 1, 1, 1))
    torch.testing.assert_close(view["image"][10:15], torch.rot90(batch["image"], 1, (2, 3)))
    assert torch.equal(view["category"], batch["category"])


def test_a_view_marks_images_by_their_place_in_the_data_set():
    task, batch = make(), whole(make_loader(20))
    assert task.view(batch)["normal"].all()
    task.densities.set(torch.zeros(1, 4), torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))[None])
    z = nn.functional.normalize(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), dim=1)
    places = 19 - torch.arange(20)
    task.select(z, places)
    worst = max(range(20), key=lambda row: float((z[row] ** 2 / torch.tensor([1.0, 2.0, 3.0, 4.0])).sum()))
    # In another order, and beside images it never saw.
    index = torch.tensor([3, int(places[worst]), 17, 25])
    normal = task.view({"image": batch["image"][:4], "index": index})["normal"]
    assert normal.tolist() == [place != int(places[worst]) for place in index]


@pytest.mark.parametrize(("share", "anomalies"), [(0.95, 2), (0.7, 12), (1.0, 0)])
def test_the_quantile_is_that_of_the_images_own_scores(share, anomalies):
    task = make(normal_share=share)
    z = nn.functional.normalize(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), dim=1)
    task.densities.set(torch.zeros(1, 4), torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))[None])
    task.select(z, torch.arange(40))
    view = task.view({"image": torch.rand(40, 3, 8, 8), "index": torch.arange(40)})
    scores = (z.double() ** 2 / torch.tensor([1.0, 2.0, 3.0, 4.0])).sum(1)
    highest = scores.argsort(descending=True)[:anomalies]
    assert sorted((~view["normal"]).nonzero()[:, 0].tolist()) == sorted(highest.tolist())


def test_without_densities_all_images_are_normal_again():
    task, batch = make(), whole(make_loader(20))
    task.refresh(make_loader(20), Context(0, 1, 0), first=True)
    assert not task.view(batch)["normal"].all()
    task.densities.set(torch.empty(0, 4), torch.empty(0, 4, 4))
    task.select(torch.rand(20, 4), torch.arange(20))
    assert task.view(batch)["normal"].all()


@torch.no_grad()
def test_prepare_estimates_own_densities_and_selects_in_one_pass():
    calls, task, loader = [], make(), make_loader(20)
    task.encoder.register_forward_hook(lambda *_: calls.append(1))
    task.refresh(loader, Context(0, 1, 0), first=True)
    assert len(calls) == len(loader)
    batch = whole(loader)
    z = task.project(task(batch)).double()
    centred = z - z.mean(0)
    sample = (centred.T @ centred / 20).numpy()
    covariance = 0.9 * sample + 0.1 * np.trace(sample) / 4 * np.eye(4)
    np.testing.assert_allclose(task.densities.mean[0].numpy(), z.mean(0).numpy(), rtol=1e-4)
    np.testing.assert_allclose(task.densities.covariance[0].numpy(), covariance, rtol=1e-3, atol=1e-7)
    scores = np.einsum("ni,ij,nj->n", centred, np.linalg.inv(covariance), centred)
    prediction = task.predict_step(batch)
    np.testing.assert_allclose(prediction.image_score.numpy(), scores, rtol=0.01)
    assert prediction.anomaly_map is None
    assert (~task.view(batch)["normal"]).nonzero()[:, 0].tolist() == [int(scores.argmax())]


def test_refresh_renews_what_prepare_made():
    task, other, loader = make(), make(seed=1), make_loader(20)
    task.refresh(loader, Context(0, 1, 0), first=True)
    other.refresh(loader, Context(0, 1, 0), first=True)
    task.load_state_dict(
        {k: v for k, v in other.state_dict().items() if k not in task.local_buffers}, strict=False
    )
    assert not torch.allclose(task.densities.mean, other.densities.mean)
    task.refresh(loader, Context(0, 2, 0))
    assert torch.equal(task.densities.mean, other.densities.mean)


def test_embedding_looks_at_every_image_once_and_unaugmented():
    task, loader = make(), make_loader(20)
    z, index = task.embed(loader)
    batch = whole(loader)
    with torch.no_grad():
        torch.testing.assert_close(z, task.project(task(batch)))
    assert index.tolist() == batch["index"].tolist()
    assert not z.requires_grad


def test_clusters_are_drawn_by_the_context():
    task = make(clusters=4)
    z, _ = task.embed(make_loader(20))
    first, again = (task.estimate(z, Context(0, 1, 0)) for _ in range(2))
    others = [task.estimate(z, Context(0, 1, client)).mean for client in range(1, 5)]
    assert torch.equal(first.mean, again.mean)
    assert 2 <= len(first.mean) <= 4
    assert not all(len(mean) == len(first.mean) and torch.equal(mean, first.mean) for mean in others)


@pytest.mark.parametrize("round", [0, 1, 3, 4, 5, 8, 11, 12, 99])
def test_the_learning_rate_is_constant_in_the_warm_up_and_falls_as_a_cosine_after(round):
    task = make(learning_rate=0.1, final_learning_rate=0.02, momentum=0.8, weight_decay=0.03)
    task.round = round
    done = {0: 0, 1: 0, 3: 0, 4: 0, 5: 1, 8: 4, 11: 7, 12: 8, 99: 8}[round]
    optimizer = task.configure_optimizers()
    expected = 0.02 + 0.08 * (1 + math.cos(math.pi * done / 8)) / 2
    assert optimizer.defaults["lr"] == pytest.approx(expected)
    assert (optimizer.defaults["momentum"], optimizer.defaults["weight_decay"]) == (0.8, 0.03)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in task.parameters()}


@pytest.mark.parametrize(("rounds", "warmup"), [(3, 3), (2, 5), (5, 0)])
def test_any_length_of_the_warm_up_has_a_schedule(rounds, warmup):
    task = make(rounds=rounds, warmup=warmup)
    rates = []
    for task.round in range(1, 8):
        rates.append(task.decay)
    assert rates[: warmup + 1] == [1.0] * min(warmup + 1, 7)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] >= 0


@pytest.mark.parametrize(("round", "warm"), [(0, False), (1, True), (3, True), (4, False), (11, False)])
def test_the_warm_up_has_a_loss_and_views_of_its_own(round, warm):
    task, batch = make(loss=CRAD(), warmup_loss=SimCLR()), whole(make_loader(5))
    task.round = round
    assert task.warming_up is warm
    view = task.view(batch)
    assert len(view["views"]) == (2 if warm else 8)
    with torch.no_grad():
        features = task(view)
        found = task.objective(features, view)["loss"]
        z = task.projection(features).view(-1, 5, 4)
        torch.testing.assert_close(found, (SimCLR() if warm else CRAD())(z, view)["loss"])


def test_without_a_loss_of_its_own_the_warm_up_goes_on():
    task, batch = make(loss=None, warmup_loss=SimCLR(0.5, 0.07)), whole(make_loader(5))
    task.round = 4
    view = task.view(batch)
    with torch.no_grad():
        features = task(view)
        found = task.objective(features, view)["loss"]
        z = task.projection(features).view(-1, 5, 4)
        torch.testing.assert_close(found, 0.5 / 0.07 * SimCLR(0.5)(z, view)["loss"])


def test_a_step_on_one_image():
    task = make()
    task.training_step(whole(make_loader(1)))["loss"].backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in task.parameters())


@pytest.mark.parametrize(
    "loss", [CRAD(), CRADCode(), SimCLR(), CSI(), CrossEntropy(2, 4), Reconstruction(decoder, 8, 4)]
)
def test_a_step_in_mixed_precision_is_near_one_in_single_precision(loss):
    task, batch = make(loss=loss), whole(make_loader(8))
    losses = []
    for mixed in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
            losses.append(task.training_step(batch)["loss"])
    losses[1].backward()
    assert losses[1].dtype == torch.float32
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=0)
    assert all(p.grad is None or p.grad.isfinite().all() for p in task.parameters())


def test_densities_belong_to_the_client_and_travel_in_the_state():
    task, other = make(), make(seed=1)
    task.refresh(make_loader(20), Context(0, 1, 0), first=True)
    state = task.state_dict()
    assert set(task.local_buffers) <= set(state)
    # How images were normalised is not learnt.
    assert not {"mean", "std"} & set(state)
    other.load_state_dict(state)
    batch = whole(make_loader(20))
    with torch.no_grad():
        expected, found = task.predict_step(batch), other.predict_step(batch)
    assert torch.equal(found.image_score, expected.image_score)


def test_what_is_predicted_anomalous_travels_in_the_state():
    task, other, batch = make(), make(seed=1), whole(make_loader(20))
    task.refresh(make_loader(20), Context(0, 1, 0), first=True)
    before = other.state_dict()
    for state, expected in ((task.state_dict(), task.view(batch)["normal"]), (before, torch.ones(20).bool())):
        other.load_state_dict(state)
        assert torch.equal(other.view(batch)["normal"], expected)
    assert not task.view(batch)["normal"].all()


def test_learns_under_a_plain_trainer():
    task, loader = make(loss=SimCLR(), learning_rate=0.05), make_loader(24)

    def loss() -> float:
        torch.manual_seed(5)
        with torch.no_grad():
            return float(torch.stack([task.training_step(whole(loader))["loss"] for _ in range(8)]).mean())

    before, weights = loss(), [p.detach().clone() for p in task.encoder.parameters()]
    plain_trainer(16).fit(task, loader)
    assert all(not torch.equal(old, new) for old, new in zip(weights, task.encoder.parameters(), strict=True))
    assert loss() < before
    scores = torch.cat([prediction.image_score for prediction in plain_trainer().predict(task, loader)])
    assert scores.isfinite().all()


@torch.no_grad()
def test_densities_may_be_of_the_encoders_features():
    task, loader = make(score_from="encoder"), make_loader()
    task.refresh(loader, Context(seed=0, round=0), first=True)
    assert task.densities.mean.shape[1] == task.num_features
    z, _ = task.embed(loader)
    features = task(whole(loader))
    torch.testing.assert_close(z, features / features.norm(dim=1, keepdim=True))
    scores = task.predict(features, whole(loader)).image_score
    torch.testing.assert_close(scores, task.densities(z))


def test_known_views_take_the_place_of_drawn_ones():
    task = make()
    features = torch.rand(4, 10, 6, generator=torch.Generator().manual_seed(0))
    batch = {"image": features[:, 0], "views": features, "index": torch.arange(4)}
    view = task.view(batch)
    assert view["views"].shape == (8, 4, 6)
    assert torch.equal(view["image"], view["views"].flatten(0, 1))
    assert view["normal"].all()
