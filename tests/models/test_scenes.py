"""Scenes: where the two views show the same place, and what they do not share."""

import torch

from lit_fedad.models.scenes import Scenes

SMALL = Scenes(size=48, scenes=6, textures=6, shift=5, lighting=1.0, seed=3)


def test_views_have_their_shape_and_range_and_belong_to_their_number():
    first, second, shift = SMALL.views(2)
    assert first.shape == second.shape == (6, 3, 48, 48)
    for view in (first, second):
        assert (view.min() >= 0) & (view.max() <= 1)
    assert all(abs(way) <= 5 for way in shift)
    again = SMALL.views(2)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, SMALL.views(3)[0])
    assert not torch.equal(first, Scenes(48, 6, textures=6, shift=5, lighting=1.0, seed=4).views(2)[0])


def test_a_place_moves_by_the_shift():
    for number in range(6):
        first, second, (down, right) = Scenes(48, 6, textures=6, shift=5, lighting=0, seed=0).views(number)
        first, second = first.mean(1), second.mean(1)  # some views are grey

        def apart(dy: int, dx: int, first=first, second=second) -> float:
            return float((first[:, 8:40, 8:40] - second[:, 8 + dy : 40 + dy, 8 + dx : 40 + dx]).abs().mean())

        found = {(dy, dx): apart(dy, dx) for dy in range(-8, 9) for dx in range(-8, 9)}
        assert min(found, key=found.get) == (down, right)
        assert found[down, right] < 0.05  # noise and focus


def test_lighting_moves_the_views_apart():
    def difference(lighting: float) -> float:
        first, second, _ = Scenes(48, 6, textures=6, shift=0, lighting=lighting, seed=0).views(0)
        return float((first.mean(1) - second.mean(1)).abs().mean())

    assert difference(0) < difference(0.5) < difference(1.5)


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    SMALL.views(0)
    assert torch.equal(before, torch.get_rng_state())
