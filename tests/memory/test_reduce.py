from functools import partial

import numpy as np
import pytest
import torch
from helpers.draws import generator
from scipy.spatial.distance import cdist

from lit_fedad.core.errors import UserError
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.reduce import PositionReduce, Reduced, SampleReduce, SlotReduce


def reduced(rule, maps, memory=None, t=0, slots=6, batch=3, seed=0):
    rule.start(memory, round=t, slots=slots, generator=generator(seed))
    for part in maps.split(batch):
        rule.update(part)
    return rule.finish()


@pytest.fixture
def maps():
    return torch.randn(11, 6, 4, generator=generator(1))


@pytest.fixture
def memory():
    return torch.randn(6, 4, generator=generator(2))


def by_hand_positions(maps, memory, t):
    """Eq. 14 to 16 of FedDyMem, one number at a time."""
    maps, memory = maps.double().numpy(), memory.double().numpy()
    numerator, denominator = np.zeros_like(memory), 0.0
    for image in maps:
        weight = 1.0
        if t > 0:
            weight = sum((a - b) ** 2 for a, b in zip(image.ravel(), memory.ravel(), strict=True)) ** 0.5
        numerator += weight * image
        denominator += weight
    alpha = 1 / (t + 1)
    return alpha * numerator / denominator + (1 - alpha) * memory


def by_hand_slots(maps, memory, t):
    """The recipe's slot-wise rule, one patch at a time."""
    patches, memory = maps.double().numpy().reshape(-1, maps.shape[2]), memory.double().numpy()
    numerator, denominator = np.zeros_like(memory), np.zeros(len(memory))
    counts = np.zeros(len(memory))
    for patch in patches:
        distances = [np.sqrt(((patch - slot) ** 2).sum()) for slot in memory]
        slot = int(np.argmin(distances))
        numerator[slot] += distances[slot] * patch
        denominator[slot] += distances[slot]
        counts[slot] += 1
    result = memory.copy()
    for slot in range(len(memory)):
        if denominator[slot] > 0:
            mean = numerator[slot] / denominator[slot]
            result[slot] = mean / (t + 1) + (1 - 1 / (t + 1)) * memory[slot]
    return result, counts


@pytest.mark.parametrize("t", [1, 2, 7])
def test_position_reduce_is_equations_14_to_16(maps, memory, t):
    result, counts, *_ = reduced(PositionReduce(), maps, memory, t=t)
    np.testing.assert_allclose(result.numpy(), by_hand_positions(maps, memory, t), rtol=1e-5, atol=1e-7)
    assert counts.tolist() == [11] * 6


def test_position_reduce_is_the_plain_mean_in_round_zero(maps, memory):
    for ignored in (None, memory):
        result, counts, *_ = reduced(PositionReduce(), maps, ignored, t=0)
        np.testing.assert_allclose(result.numpy(), maps.double().numpy().mean(0), rtol=1e-6, atol=1e-7)
        assert counts.tolist() == [11] * 6


@pytest.mark.parametrize("t", [1, 2, 7])
def test_slot_reduce_follows_the_recipe(maps, memory, t):
    memory[5] = 50  # far from every patch: stays empty
    result, counts, *_ = reduced(SlotReduce(), maps, memory, t=t)
    expected, expected_counts = by_hand_slots(maps, memory, t)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-7)
    assert counts.tolist() == expected_counts.tolist()
    assert counts[5] == 0
    assert torch.equal(result[5], memory[5])


@pytest.mark.parametrize("rule", [PositionReduce, SlotReduce, partial(SlotReduce, weights="clipped")])
def test_the_unit_of_features_does_not_matter(rule, maps, memory):
    """Distances are below 1 with the smaller unit, and so are their sums."""
    usual, small = (reduced(rule(), unit * maps, unit * memory, t=2) for unit in (1.0, 2.0**-12))
    torch.testing.assert_close(small.memory * 2.0**12, usual.memory, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(small.radii * 2.0**12, usual.radii, rtol=1e-4, atol=1e-5)
    assert small.counts.equal(usual.counts)


@pytest.mark.parametrize("rule", [PositionReduce, SlotReduce])
@pytest.mark.parametrize("t", [1, 2, 5])
def test_maps_equal_to_the_memory_return_it_exactly(rule, memory, t):
    result = reduced(rule(), memory.repeat(4, 1, 1), memory, t=t).memory
    assert torch.equal(result, memory)


@pytest.mark.parametrize("rule", [PositionReduce, SlotReduce])
@pytest.mark.parametrize("t", [0, 3])
def test_neither_batch_size_nor_image_order_matter_after_round_zero(rule, maps, memory, t):
    reference, counts, *_ = reduced(rule(), maps, memory, t=t, batch=11)
    for batch in (1, 4):
        result, same_counts, *_ = reduced(rule(), maps, memory, t=t, batch=batch)
        torch.testing.assert_close(result, reference, rtol=1e-6, atol=1e-7)
        assert torch.equal(counts, same_counts)
    if t > 0 or rule is PositionReduce:
        shuffled = reduced(rule(), maps[torch.randperm(11, generator=generator())], memory, t=t).memory
        torch.testing.assert_close(shuffled, reference, rtol=1e-6, atol=1e-7)


def test_slot_reduce_clusters_all_patches_in_round_zero(maps):
    result, counts, *_ = reduced(SlotReduce(), maps)
    expected = kmeans(maps.flatten(0, 1), 6, generator=generator(), max_steps=10, tolerance=0)
    assert torch.equal(result, expected.centroids)
    assert torch.equal(counts, expected.counts)
    assert counts.sum() == 66


def test_the_reservoir_is_the_same_for_every_batch_size_and_scales_its_counts():
    maps = torch.randn(40, 6, 4, generator=generator(1))
    runs = [reduced(SlotReduce(max_patches=50), maps, batch=batch) for batch in (1, 7, 16, 40)]
    for run in runs:
        assert all(torch.equal(ours, first) for ours, first in zip(run, runs[0], strict=True))
        assert run.counts.sum().item() == pytest.approx(240)


@pytest.mark.slow
def test_the_reservoir_samples_the_stream_uniformly():
    # Slots = reservoir size: round 0 returns the sample itself. Patches are numbered.
    maps = torch.arange(60.0).view(10, 6, 1)
    kept = torch.zeros(60)
    for seed in range(600):
        rule = SlotReduce(max_patches=12, steps=0)
        result = reduced(rule, maps, slots=12, seed=seed, batch=4).memory
        assert len(result.unique()) == 12
        kept[result[:, 0].long()] += 1
    expected, spread = 600 * 12 / 60, (600 * 0.2 * 0.8) ** 0.5
    assert ((kept - expected).abs() < 4.5 * spread).all()
    assert abs(kept[:12].mean() - expected) < 3 * spread / 12**0.5  # neither the first rows ...
    assert abs(kept[-12:].mean() - expected) < 3 * spread / 12**0.5  # ... nor the last are preferred


def test_fewer_patches_than_slots_fill_the_memory_with_copies():
    maps = torch.randn(1, 4, 3, generator=generator())
    result, counts, *_ = reduced(SlotReduce(), maps, slots=10)
    assert torch.equal(result[:4], maps[0])
    assert counts.tolist() == [1] * 4 + [0] * 6


@pytest.mark.parametrize("t", [0, 1, 4])
def test_position_radii_are_the_root_mean_square_distances_to_the_slot(maps, memory, t):
    result, _, radii, _ = reduced(PositionReduce(), maps, memory, t=t)
    centre = (memory if t else result).double().numpy()
    expected = np.sqrt(((maps.double().numpy() - centre) ** 2).sum(2).mean(0))
    np.testing.assert_allclose(radii.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("t", [0, 1, 4])
def test_slot_radii_are_the_root_mean_square_distances_to_the_slot(maps, memory, t):
    memory[5] = 50
    result, counts, radii, _ = reduced(SlotReduce(), maps, memory, t=t)
    centre = (memory if t else result).double().numpy()
    distances = cdist(maps.flatten(0, 1).double().numpy(), centre)
    nearest, squares = distances.argmin(1), distances.min(1) ** 2
    for slot in range(6):
        expected = np.sqrt(squares[nearest == slot].mean()) if counts[slot] else 0
        assert radii[slot].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_sample_reduce_returns_distinct_patches_of_the_stream_uniformly():
    maps = torch.arange(60.0).view(10, 6, 1)
    kept = torch.zeros(60)
    for seed in range(600):
        result, counts, radii, _ = reduced(SampleReduce(), maps, slots=12, seed=seed, batch=4)
        assert torch.equal(result, reduced(SampleReduce(), maps, slots=12, seed=seed, batch=10).memory)
        assert len(result.unique()) == 12
        assert (counts.tolist(), radii.tolist()) == ([1] * 12, [0] * 12)
        kept[result[:, 0].long()] += 1
    assert ((kept - 120).abs() < 4.5 * (600 * 0.2 * 0.8) ** 0.5).all()


def test_sample_reduce_repeats_patches_to_fill_its_slots_and_keeps_single_precision(maps):
    result = reduced(SampleReduce(), maps[:1].half(), slots=15).memory
    assert result.dtype == torch.float32
    assert len(result) == 15
    assert torch.equal(result[:6], maps[0].half().float())
    assert torch.equal(result.unique(dim=0), maps[0].half().float().unique(dim=0))
    empty = SampleReduce()
    empty.start(None, round=0, slots=4, generator=generator())
    with pytest.raises(UserError, match="no image"):
        empty.finish()


@pytest.mark.parametrize("rule", [PositionReduce, SlotReduce])
def test_a_round_without_images_keeps_the_memory_but_round_zero_needs_one(rule, memory):
    reduce = rule()
    reduce.start(memory, round=2, slots=6, generator=generator())
    result, counts, radii, images = reduce.finish()
    assert torch.equal(result, memory)
    assert counts.tolist() == radii.tolist() == images.tolist() == [0] * 6
    reduce.start(None, round=0, slots=6, generator=generator())
    with pytest.raises(UserError, match="no image in round 0"):
        reduce.finish()


@pytest.mark.parametrize("rule", [PositionReduce, SlotReduce])
def test_half_precision_maps_that_require_gradients_are_taken(rule, maps, memory):
    half = maps.half().requires_grad_()
    for t in (0, 1):
        result = reduced(rule(), half, memory, t=t).memory
        expected = reduced(rule(), half.detach().float(), memory, t=t).memory
        assert result.dtype == torch.float32
        assert not result.requires_grad
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [PositionReduce, SlotReduce])
def test_a_later_round_needs_a_memory_of_the_right_size(rule, memory):
    for wrong in (None, memory[:5]):
        with pytest.raises(ValueError, match="round 1 needs the memory"):
            rule().start(wrong, round=1, slots=6, generator=generator())


def test_bad_sizes_are_refused(maps):
    with pytest.raises(UserError, match="an image has 6 patches; give task.slots=6"):
        reduced(PositionReduce(), maps, slots=9)
    with pytest.raises(UserError, match="max_patches=0"):
        SlotReduce(max_patches=0)


@pytest.mark.parametrize("batch", [1, 4, 11])
def test_slots_count_the_different_images_behind_them(maps, memory, batch):
    _, counts, _, images = reduced(SlotReduce(), maps, memory, t=1, batch=batch)
    at = torch.cdist(maps.flatten(0, 1), memory).argmin(1).view(maps.shape[:2])
    assert images.tolist() == [int((at == k).any(1).sum()) for k in range(6)]
    assert (images <= counts).all()


@pytest.mark.parametrize("batch", [1, 4, 11])
def test_new_slots_count_the_different_images_behind_them_too(maps, batch):
    found = reduced(SlotReduce(), maps, slots=6, batch=batch)
    at = torch.cdist(maps.flatten(0, 1), found.memory).argmin(1).view(maps.shape[:2])
    assert found.images.tolist() == [int((at == k).any(1).sum()) for k in range(6)]


def test_radii_are_of_what_patches_are_judged_by(maps, memory):
    others = torch.rand(maps.shape[:2], generator=generator()).flatten()
    reduce = SlotReduce()
    reduce.start(memory, 1, 6, generator())
    reduce.update(maps, lambda distances: others + 2 * distances)
    distances, at = torch.cdist(maps.flatten(0, 1), memory).min(1)
    values = others + 2 * distances
    for slot, radius in enumerate(reduce.finish().radii.tolist()):
        own = values[at == slot]
        assert radius == pytest.approx(float(own.square().mean().sqrt()) if len(own) else 0.0, rel=1e-5)


def test_only_plain_means_add_up():
    plain = [
        SlotReduce(weights, average).adds_up for weights in ("none", "distance") for average in (False, True)
    ]
    assert plain == [True, False, False, False]
    assert not PositionReduce().adds_up


def test_plain_means_are_one_lloyd_step(maps, memory):
    reduce = SlotReduce(weights="none", average=False)
    reduce.start(memory, 5, 6, generator())
    reduce.update(maps)
    at = torch.cdist(maps.flatten(0, 1), memory).argmin(1)
    for slot, mean in enumerate(reduce.finish().memory):
        own = maps.flatten(0, 1)[at == slot]
        torch.testing.assert_close(mean, own.mean(0) if len(own) else memory[slot], rtol=1e-5, atol=1e-6)


def test_vectors_of_earlier_stages_count_as_so_many_patches(maps, memory):
    past = Reduced(
        memory[[0, 0, 3]] + torch.tensor([[0.01], [0.03], [0.02]]),
        torch.tensor([2.0, 3.0, 4.0]),
        torch.tensor([0.5, 0.0, 1.5]),
        torch.tensor([2, 3, 1]),
    )
    reduce = SlotReduce(weights="none", average=False)
    found = []
    for seen in (False, True):
        reduce.start(memory, 1, 6, generator())
        reduce.update(maps)
        if seen:
            reduce.remember(past)
        found.append(reduce.finish())
    new, both = found
    # Slots 0 and 3: patches, their sum and the sum of their squared distances; images surely different.
    for slot, old, total, squares, images in (
        (0, 5, 2 * past.memory[0] + 3 * past.memory[1], 0.5, 3),
        (3, 4, 4 * past.memory[2], 9.0, 1),
    ):
        count = float(new.counts[slot])
        assert both.counts[slot] == count + old
        torch.testing.assert_close(both.memory[slot], (count * new.memory[slot] + total) / (count + old))
        radius = ((count * float(new.radii[slot]) ** 2 + squares) / (count + old)) ** 0.5
        assert both.radii[slot].item() == pytest.approx(radius, rel=1e-5)
        assert both.images[slot] == new.images[slot] + images
    others = [1, 2, 4, 5]
    assert all(torch.equal(one[others], other[others]) for one, other in zip(new, both, strict=True))


def test_a_clipped_weight_keeps_an_outlier_from_pulling_a_slot_away():
    memory, maps = torch.tensor([[0.0], [2.0]]), torch.tensor([[[-1.0], [-50.0]]])

    def moved(weights):
        reduce = SlotReduce(weights=weights, average=False)
        reduce.start(memory, 1, 2, generator())
        reduce.update(maps)
        return reduce.finish().memory.flatten().tolist()

    assert moved("distance") == pytest.approx([-(1 + 50 * 50) / 51, 2.0])
    assert moved("clipped") == pytest.approx([-(1 + 2 * 50) / 3, 2.0])
    with pytest.raises(UserError, match="task.reduce.weights=far: give distance, clipped, none"):
        SlotReduce(weights="far")


@pytest.mark.parametrize(
    ("memory", "moved"),
    [([0.0], (1 * 1 + 3 * 3) / 4), ([0.0, 0.0, 2.0], (1 * 1 + 3 * 2) / 3)],
    ids=["the only slot", "a slot with a copy"],
)
def test_a_clipped_weight_reaches_to_the_nearest_slot_elsewhere(memory, moved):
    """Patches -1 and -3: without another slot nothing is clipped, and a copy at distance 0 would weigh all as 0."""
    reduce = SlotReduce(weights="clipped", average=False)
    reduce.start(torch.tensor(memory)[:, None], 1, len(memory), generator())
    reduce.update(torch.tensor([[[-1.0], [-3.0]]]))
    assert reduce.finish().memory.min().item() == pytest.approx(-moved)
