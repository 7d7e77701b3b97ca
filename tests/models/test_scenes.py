"""Drawn scenes: their textures by independent arithmetic, and what two views share."""

import numpy as np
import pytest
import torch
from helpers.draws import generator

from lit_fedad.models.scenes import (
    FAMILIES,
    Dials,
    Scenes,
    draw_textures,
    fractal_noise,
    lattice_noise,
    smooth_noise,
)

SEED = torch.tensor(77)


def test_lattice_noise_is_an_integer_hash():
    column, row = np.meshgrid(np.arange(-3, 4), np.arange(-2, 5))
    mixed = np.empty(column.shape)
    for place in np.ndindex(column.shape):
        number = int(column[place]) * 374761393 + int(row[place]) * 668265263 + 77 * 1442695041
        number &= 0x7FFFFFFF
        number = ((number ^ (number >> 13)) * 1274126177) & 0x7FFFFFFF
        number = ((number ^ (number >> 15)) * 974634281) & 0x7FFFFFFF
        mixed[place] = ((number ^ (number >> 14)) & 0xFFFFFF) / 2**24
    found = lattice_noise(torch.from_numpy(column), torch.from_numpy(row), SEED)
    assert np.array_equal(found.double().numpy(), mixed)


def test_lattice_noise_is_even_and_without_neighbours():
    side = torch.arange(-200, 200)
    noise = lattice_noise(side, side[:, None], SEED)
    counts = torch.histc(noise, 16, 0, 1) / noise.numel()
    assert (counts - 1 / 16).abs().max() < 0.004
    right, down, other = noise[:, 1:], noise[1:], lattice_noise(side, side[:, None], SEED + 1)
    for first, second in ((noise[:, :-1], right), (noise[:-1], down), (noise, other)):
        assert abs(np.corrcoef(first.flatten(), second.flatten())[0, 1]) < 0.02


def test_smooth_noise_passes_through_the_lattice_and_blends_between():
    u, v = torch.tensor([2.0, 2.25, 2.0]), torch.tensor([-1.0, -1.0, -0.5])
    corner, right, below = (
        lattice_noise(torch.tensor(a), torch.tensor(b), SEED) for a, b in ((2, -1), (3, -1), (2, 0))
    )
    quarter = 0.25**2 * (3 - 2 * 0.25)
    expected = torch.stack([corner, corner + quarter * (right - corner), (corner + below) / 2])
    torch.testing.assert_close(smooth_noise(u, v, SEED), expected)


def test_fractal_noise_is_the_weighted_mean_of_its_octaves():
    u, v = torch.rand(5, 7, generator=generator()) * 9, torch.rand(5, 7, generator=generator(1)) * 9
    octaves = [smooth_noise(u * 2**k, v * 2**k, SEED + k) for k in range(3)]
    expected = (octaves[0] + 0.4 * octaves[1] + 0.16 * octaves[2]) / 1.56
    torch.testing.assert_close(fractal_noise(u, v, SEED, torch.tensor(0.4), 3), expected)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_a_family_fills_its_range_and_its_tiles_differ(family):
    side = torch.arange(64.0).expand(24, 64, 64)
    fields = family(side, side.transpose(1, 2), Dials(24, generator()))
    assert fields.shape == (24, 64, 64)
    assert (fields.min() >= 0) & (fields.max() <= 1)
    assert (fields.flatten(1).std(1) > 0.02).float().mean() > 0.9  # hardly a tile is plain
    flat = fields.flatten(1)
    assert len(flat.unique(dim=0)) == 24


def test_dials_stay_in_their_range_and_choose_every_option():
    dials = Dials(4000, generator())
    even, log = dials.even(2, 5), dials.log(0.1, 10)
    assert (even.min() >= 2) & (even.max() <= 5) & ((even.mean() - 3.5).abs() < 0.1)
    assert (log.min() >= 0.1) & (log.max() <= 10.001) & (log.log().mean().abs() < 0.1)
    chosen = dials.choice(*(torch.full((4000, 1, 1), float(k)) for k in range(3)))
    assert torch.bincount(chosen.flatten().long()).min() > 1200


def test_textures_follow_their_generator():
    first, again, other = (
        draw_textures(13, 40, generator(3)),
        draw_textures(13, 40, generator(3)),
        draw_textures(13, 40, generator(4)),
    )
    assert first.shape == (13, 3, 40, 40)
    assert (first.min() >= 0) & (first.max() <= 1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


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
