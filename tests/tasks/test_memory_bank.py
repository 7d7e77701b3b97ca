"""The memory-bank task: features, loss, bank, score, and its life under a plain Trainer."""

import numpy as np
import pytest
import torch
from helpers.trainers import plain_trainer
from lightning.fabric import Fabric
from torch.nn import functional as F

from lit_fedad.contracts import Context
from lit_fedad.contracts.task import learned_state
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.methods.local import LocalClient
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale, NearestDistance, Softmin

HERE = Context(seed=0, round=0, client=0)


@pytest.mark.parametrize(
    ("pool", "averaged"), [(True, [True, True]), ("last", [False, True]), (False, [False] * 2)]
)
def test_features_are_layers_brought_to_one_grid(make_task, make_loader, pool, averaged):
    task = make_task(average_pool=pool)
    batch = next(iter(make_loader()))
    layers = [
        F.avg_pool2d(layer, 3, 1, 1) if average else layer
        for layer, average in zip(task.backbone(batch["image"]), averaged, strict=True)
    ]
    expected = torch.cat(
        [F.interpolate(layer, (4, 4), mode="bilinear", align_corners=False) for layer in layers], dim=1
    )
    torch.testing.assert_close(task.embed(batch), expected.flatten(2).transpose(1, 2))


def test_smaller_sizes_of_the_image_count_where_all_layers_are_averaged(make_task, make_loader):
    task, image = make_task(), next(iter(make_loader()))["image"]
    whole, small = (task.backbone(one) for one in (image, F.avg_pool2d(image, 2)))
    both = {"pyramid": (*whole, *small)}
    one, other = (task.embed({"pyramid": layers}, average_pool=True) for layers in (whole, small))
    torch.testing.assert_close(task.embed(both, average_pool=True), (one + other) / 2)
    for pool in ("last", False):
        assert torch.equal(task.embed(both, pool), task.embed({"pyramid": whole}, pool))


def test_cached_pyramids_give_the_same_features(make_task, make_loader):
    task = make_task()
    batch = next(iter(make_loader()))
    assert torch.equal(task.embed({"pyramid": tuple(task.backbone(batch["image"]))}), task.embed(batch))


def test_repulsion_acts_on_the_next_neighbours_only():
    loss = HingeLoss(threshold=1.0, neighbours=1, repulsion=0.5, repelled=2)
    assert loss.reach == 3
    value = loss(torch.tensor([[2.0, 1.05, 3.0]]), torch.tensor(1.0))
    assert float(value) == pytest.approx(1.0 + 0.5 * (0.05 + 0) / 2)


def test_an_unknown_threshold_is_refused():
    with pytest.raises(UserError, match="loss.threshold='mean'"):
        HingeLoss(threshold="mean")


def test_training_step_is_the_loss_of_all_patches(make_task, make_loader):
    task = make_task(residual=False)
    task.load_memory(torch.randn(16, 8))
    batch = next(iter(make_loader()))
    rows = task(batch).flatten(0, 1)
    distances = torch.cdist(rows, task.memory).topk(2, largest=False).values
    output = task.training_step(batch)
    torch.testing.assert_close(output["loss"], (distances - 0.01).clamp(min=0).mean())
    torch.testing.assert_close(output["nn_distance"], distances[:, 0].mean())


def test_patches_are_drawn_with_their_places(make_task, make_loader):
    task = make_task(residual=False, patches_per_image=5)
    seen = {}
    task.generate = lambda rows, places: seen.update(rows=rows, places=places) or rows
    task.load_memory(torch.randn(16, 8))
    batch = next(iter(make_loader()))
    task.training_step(batch)
    everything = torch.cat([task.embed(batch), task.places.expand(4, -1, -1)], dim=2)
    drawn = torch.cat([seen["rows"], seen["places"]], dim=1).reshape(4, 5, 10)
    for image in range(4):
        matches = (drawn[image][:, None] == everything[image]).all(2)
        assert matches.any(1).all()
        assert len(set(matches.int().argmax(1).tolist())) == 5


def test_scores():
    distances = torch.tensor([[1.0, 2.0, 4.0]])
    assert NearestDistance()(distances).item() == 1.0
    softmin = torch.exp(-distances) / torch.exp(-distances).sum()
    assert Softmin()(distances).item() == pytest.approx(softmin[0, 0].item())


def test_local_scale_takes_the_nearest_of_some_slots_in_units_of_their_radii():
    """Slots of radii .5 and 1.5 lie 1 and 2 away: in units of the mean radius, 1, these are 2 and 4 / 3."""
    distances, slots = torch.tensor([[1.0, 2.0]]), torch.tensor([[0, 1]])
    radii = torch.tensor([0.5, 1.5])
    assert LocalScale(1.0)(distances[:, :1], radii, slots[:, :1]).item() == pytest.approx(2)
    assert LocalScale(1.0, neighbours=2)(distances, radii, slots).item() == pytest.approx(4 / 3)
    narrow = torch.tensor([0.001, 1.999])  # counts as a tenth of the mean
    assert LocalScale(1.0)(distances[:, :1], narrow, slots[:, :1]).item() == pytest.approx(10)


@pytest.mark.parametrize(
    ("exponent", "grid", "used"),
    [(0.5, 8, 0.5), (0.5, 32, 0.5**0.5), (0.5, 64, 0.5**0.5), (0.75, 64, 1.0), (1.5, 64, 1.5)],
)
def test_local_scale_divides_by_more_on_finer_grids_but_never_by_more_than_the_full_scale(
    exponent, grid, used
):
    distances, slots, radii = torch.ones(1, 1), torch.tensor([[0]]), torch.tensor([0.5, 1.5])
    scored = LocalScale(exponent, grid=grid)(distances, radii, slots).item()
    assert scored == pytest.approx(0.5**-used)


def test_prediction_is_the_maximum_of_the_smoothed_map(make_task, make_loader):
    task = make_task().eval()
    task.load_memory(torch.randn(16, 8))
    batch = next(iter(make_loader()))
    with torch.no_grad():
        prediction = task.predict_step(batch)
        nearest = torch.cdist(task(batch), task.memory).amin(2).reshape(-1, 4, 4)
    assert prediction.anomaly_map.shape == (4, 32, 32)
    torch.testing.assert_close(prediction.anomaly_map, task.draw_map(nearest), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(prediction.image_score, prediction.anomaly_map.flatten(1).amax(1))


def test_maps_of_the_subspace_are_of_what_image_scores_are_made_of(make_task, make_loader):
    batch = next(iter(make_loader(3)))
    settings = {"head": None, "subspace": 0.9, "image_score": LocalScale(1.0), "standardise": True, "rim": 0}
    predictions = {}
    for maps in ("bank", "subspace"):
        task = make_task(**settings, maps=maps)
        task.refresh(make_loader(9), HERE, first=True)
        predictions[maps] = task.predict(task(batch), batch)
    scores, maps = (getattr(predictions["subspace"], name) for name in ("image_score", "anomaly_map"))
    assert scores.equal(maps.flatten(1).amax(1))
    assert scores.equal(predictions["bank"].image_score)
    assert not maps.equal(predictions["bank"].anomaly_map)


@pytest.mark.parametrize("standardise", [False, True])
def test_the_subspace_is_that_of_features_averaged_over_neighbours(make_task, make_loader, standardise):
    task = make_task(head=None, subspace=0.8, standardise=standardise)
    task.refresh(make_loader(9), HERE, first=True)
    rows = torch.cat([task.embed(batch, average_pool=True) for batch in make_loader(9)]).flatten(0, 1)
    torch.testing.assert_close(task.centre[0], rows.mean(0), rtol=1e-4, atol=1e-5)


def test_image_scores_add_weighted_distances_to_the_bank_to_residuals(make_task, make_loader):
    task, batch = make_task(head=None, subspace=0.8, bank_weight=2.0), next(iter(make_loader(seed=1)))
    task.refresh(make_loader(9), HERE, first=True)
    blurred, features = (task.embed(batch, average_pool=pool).flatten(0, 1) for pool in (True, False))
    residuals = ((blurred - task.centre) @ task.basis[0]).norm(dim=1)
    distances = torch.cdist(features, task.memory).amin(1)
    expected = task.judge(residuals + 2 * distances)
    torch.testing.assert_close(task.predict_step(batch).image_score, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "sets"),
    [
        ({}, 0),
        ({"standardise": True}, 1),
        ({"whiten": 0.1}, 1),
        ({"subspace": 0.8}, 1),
        ({"subspace": 0.8, "products": ["nut"]}, 1),
        ({"subspace": "likelihood", "standardise": True}, 3),
        ({"subspace": "likelihood", "standardise": True, "products": ["nut", "bolt"]}, 7),
    ],
)
def test_moments_are_of_what_is_standardised_and_of_the_folds_of_each_subspace(make_task, settings, sets):
    """Images of no named product share one more subspace."""
    assert make_task(head=None, **settings).moment_sets == sets


def test_in_mixed_precision_images_score_as_their_cached_features(make_task, make_loader):
    """Thresholds come from cached features, which the backbone computed in full precision."""
    client = LocalClient(make_task().eval())
    client.task.refresh(make_loader(), HERE, first=True)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    batch = next(iter(make_loader(seed=1)))
    from_images = predict_batch(client, batch, fabric)
    cached = predict_batch(client, {"pyramid": client.task.backbone(batch["image"])}, fabric)
    assert torch.equal(from_images.image_score, cached.image_score)
    assert torch.equal(from_images.anomaly_map, cached.anomaly_map)
    # Nor do scores have the eight bits of bfloat16 only.
    assert not torch.equal(from_images.anomaly_map, from_images.anomaly_map.bfloat16().float())


def test_channel_moments_are_those_of_all_patches(make_task, make_loader):
    task = make_task()
    count, mean, variance = task.channel_moments(make_loader())
    rows = torch.cat([task.embed(batch) for batch in make_loader()]).flatten(0, 1)
    assert count == len(rows) == 6 * 16
    torch.testing.assert_close(mean, rows.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(variance, rows.var(0, correction=0), rtol=1e-4, atol=1e-6)


def test_standardised_features_have_mean_0_and_variance_1(make_task, make_loader):
    task = make_task(head=None, standardise=True, shrinkage=0.0)
    task.refresh(make_loader(), HERE, first=True)
    rows = torch.cat([task(batch) for batch in make_loader()]).flatten(0, 1)
    torch.testing.assert_close(rows.mean(0), torch.zeros(8), rtol=0, atol=1e-4)
    torch.testing.assert_close(rows.std(0, correction=0), torch.ones(8), rtol=1e-3, atol=0)


def test_median_threshold(make_task, make_loader):
    task = make_task(head=None, loss=HingeLoss("median", neighbours=2))
    assert task.threshold.isnan()
    task.refresh(make_loader(), HERE, first=True)
    rows = torch.cat([task(batch) for batch in make_loader()]).flatten(0, 1)
    distances = torch.cdist(rows, task.memory).topk(2, largest=False).values
    assert float(task.threshold) == pytest.approx(float(distances.median()), rel=0.1)


@pytest.mark.parametrize("round", [1, 7])
def test_a_renewed_bank_depends_on_weights_and_images_alone(make_task, make_loader, round):
    moved, fresh = make_task(), make_task(seed=1)
    moved.refresh(make_loader(), HERE, first=True)
    moved.load_state_dict(dict(fresh.head.state_dict(prefix="head.")), strict=False)
    moved.refresh(make_loader(), Context(seed=0, round=round, client=0))
    fresh.backbone = moved.backbone
    fresh.refresh(make_loader(), HERE, first=True)
    assert torch.equal(moved.memory, fresh.memory)
    assert torch.equal(moved.radii, fresh.radii)


def test_learned_state_leaves_the_backbone_out(make_task):
    names = learned_state(make_task())
    assert "memory" in names
    assert any(name.startswith("head.") for name in names)
    assert not any(name.startswith("backbone.") for name in names)


def test_trains_and_predicts_under_a_plain_trainer(make_task, make_loader):
    task = make_task(residual=False, learning_rate=1e-2, patches_per_image=8)
    trainer = plain_trainer(2)
    before = [p.detach().clone() for p in task.head.parameters()]
    trainer.fit(task, make_loader())
    assert not task.memory.isnan().any()
    assert any(not torch.equal(a, b) for a, b in zip(before, task.head.parameters(), strict=True))
    predictions = trainer.predict(task, make_loader())
    assert [len(p.image_score) for p in predictions] == [4, 2]
    assert all(p.anomaly_map.isfinite().all() for p in predictions)


# --------------------------------------------------------------- cosines: in NumPy, without lengths and chords


def cosine_distances(features, slots):
    """1 - cos of every pair of rows, [n, slots], in double precision."""
    features, slots = (np.asarray(rows.detach(), dtype=np.float64) for rows in (features, slots))
    lengths = np.sqrt((features**2).sum(1))[:, None] * np.sqrt((slots**2).sum(1))[None]
    return 1 - features @ slots.T / lengths


def frozen(task, batch):
    """Patch features as no length was divided out of them [n, C]."""
    with torch.no_grad():
        return task.standardised(task.embed(batch)).flatten(0, 1)


@pytest.fixture
def cosine_bank(make_task):
    task = make_task(head=None, distance="cosine").eval()
    task.load_memory(torch.randn(16, 8) * torch.arange(1, 17)[:, None])
    return task


def test_patch_scores_are_cosine_distances_to_the_nearest_slot(cosine_bank, make_loader):
    batch = next(iter(make_loader()))
    nearest = cosine_distances(frozen(cosine_bank, batch), cosine_bank.memory).min(1)
    maps = cosine_bank.draw(torch.from_numpy(nearest).float())
    with torch.no_grad():
        prediction = cosine_bank.predict_step(batch)
    torch.testing.assert_close(prediction.anomaly_map, maps, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(prediction.image_score, maps.flatten(1).amax(1), rtol=1e-4, atol=1e-6)


def test_the_loss_and_its_threshold_are_of_cosine_distances(make_task, make_loader):
    task = make_task(head=None, distance="cosine", loss=HingeLoss("median", neighbours=2))
    task.refresh(make_loader(), HERE, first=True)
    rows = torch.cat([frozen(task, batch) for batch in make_loader()])
    two = np.sort(cosine_distances(rows, task.memory), 1)[:, :2]
    assert float(task.threshold) == pytest.approx(float(np.median(two)), rel=0.1)
    batch = next(iter(make_loader()))
    two = np.sort(cosine_distances(frozen(task, batch), task.memory), 1)[:, :2]
    output = task.training_step(batch)
    assert float(output["loss"]) == pytest.approx(np.maximum(two - float(task.threshold), 0).mean(), rel=1e-3)
    assert float(output["nn_distance"]) == pytest.approx(two[:, 0].mean(), rel=1e-3)


def test_radii_are_in_the_unit_of_the_distances(cosine_bank, make_loader):
    """The scale of a slot is the mean cosine distance of its patches: half the mean of their squared chords."""
    cosine_bank.image_score, batch = LocalScale(exponent=1.0), next(iter(make_loader()))
    chords = torch.linspace(0.5, 1.0, 16)
    cosine_bank.load_memory(cosine_bank.memory, chords)
    found = cosine_distances(frozen(cosine_bank, batch), cosine_bank.memory)
    scale = (chords**2 / 2).numpy()
    scores = found.min(1) / (scale / scale.mean())[found.argmin(1)]
    with torch.no_grad():
        prediction = cosine_bank.predict_step(batch)
    expected = cosine_bank.draw(torch.from_numpy(scores).float()).flatten(1).amax(1)
    torch.testing.assert_close(prediction.image_score, expected, rtol=1e-3, atol=1e-6)


def test_a_head_is_trained_on_features_of_length_1(make_task, make_loader):
    task = make_task(distance="cosine", residual=False)
    task.refresh(make_loader(), HERE, first=True)
    batch = next(iter(make_loader()))
    lengths = torch.linalg.vector_norm(task(batch), dim=2)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))
    task.training_step(batch)["loss"].backward()
    gradients = [parameter.grad for parameter in task.head.parameters() if parameter.grad is not None]
    assert any(gradient.abs().sum() > 0 for gradient in gradients)


def test_an_unknown_distance_is_refused(make_task):
    with pytest.raises(UserError, match="task.distance=manhattan: give euclidean or cosine"):
        make_task(distance="manhattan")
