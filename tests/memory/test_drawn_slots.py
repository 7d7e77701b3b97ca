"""Drawn slots have the moments that they are drawn from; copies move apart alike everywhere; sums of slots part."""

import torch

from lit_fedad.memory.moments import Moments
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.memory.slot_sums import SlotSums, copies_apart, draw_slots, split_fullest
from lit_fedad.memory.subspace import statistics_of


def test_drawn_slots_have_the_moments_of_standardised_features():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[2.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 3.0, 0.1]])
    rows = torch.randn(4000, 3, generator=generator) @ mixing + torch.tensor([5.0, -1.0, 100.0])
    moments = Moments.of([rows], 3)
    statistics = statistics_of(moments, standardise=True, shrinkage=0.0, whiten=1e-6)
    drawn = draw_slots(moments, statistics, 20_000, generator)
    assert drawn.shape == (20_000, 3)
    torch.testing.assert_close(drawn.mean(0), torch.zeros(3), rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.T.cov(), torch.eye(3), rtol=0, atol=0.05)
    plain = draw_slots(moments, {}, 20_000, generator)
    torch.testing.assert_close(plain.mean(0).double(), moments.mean, rtol=0, atol=0.15)

    given = {"mean": torch.ones(3), "scale": torch.tensor([2.0, 4.0, 10.0])}  # of other features
    drawn = draw_slots(moments, given, 20_000, generator)
    torch.testing.assert_close(drawn.mean(0).double(), (moments.mean - 1) / given["scale"], rtol=0, atol=0.1)
    expected = moments.covariance / given["scale"] / given["scale"][:, None]
    torch.testing.assert_close(drawn.T.cov().double(), expected, rtol=0, atol=0.1)


def test_copies_move_apart_and_others_stay():
    memory = torch.tensor([[0.0, 1.0], [4.0, 2.0], [0.0, 1.0], [4.0, 2.0], [7.0, 7.0]])
    moved, again = (copies_apart(memory, torch.Generator().manual_seed(3)) for _ in range(2))
    assert moved.equal(again)
    assert moved[[0, 1, 4]].equal(memory[[0, 1, 4]])
    assert (moved[[2, 3]] != memory[[2, 3]]).all()
    draws = torch.randn(5, 2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close((moved - memory)[[2, 3]], (0.1 * memory.std(0, correction=0) * draws)[[2, 3]])


def test_the_fullest_slot_is_split_first_and_counts_half_from_then_on():
    counts = torch.tensor([3.0, 0.0, 8.0, 0.0, 0.0])
    assert split_fullest(counts, counts > 0).tolist() == [0, 2, 2, 2, 0]


def test_sums_without_a_clients_images_are_those_of_the_others():
    """Slot 3 has patches of the first client alone, slot 4 of nobody."""
    draw = torch.Generator().manual_seed(0)
    anchors = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0], [-50.0, 0.0], [99.0, 99.0]])
    places = torch.randint(3, (5, 20), generator=draw)
    maps = anchors[places] + torch.randn(5, 20, 2, generator=draw)
    maps[0, :4] -= torch.tensor([60.0, 0.0])

    def reduced(images):
        rule = SlotReduce(weights="none", average=False)
        rule.start(anchors, round=1, slots=5, generator=draw)
        rule.update(images)
        return rule.finish()

    def sums(part):
        squares = part.counts.double() * part.radii.double().square()
        return SlotSums(anchors, part.memory, part.counts, squares, part.images)

    whole, rest = sums(reduced(maps)), sums(reduced(maps[2:]))
    found = whole.without(reduced(maps[:2]))
    torch.testing.assert_close(found.memory[:3], rest.memory[:3])
    torch.testing.assert_close(found.counts.float(), rest.counts.float())
    torch.testing.assert_close(found.squares, rest.squares, rtol=1e-4, atol=1e-3)
    assert found.images.tolist() == rest.images.tolist()
    assert found.memory[3:].equal(reduced(maps).memory[3:])  # they keep their place
    # Of values that are measured otherwise than those in the sums, it is not known what there is to take away.
    kept = whole.without(reduced(maps[:2]), same_values=False)
    torch.testing.assert_close(kept.squares[:3] / kept.counts[:3], (whole.squares / whole.counts)[:3])
