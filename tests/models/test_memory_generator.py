"""FedDyMem's head against the paper's equations written out with convolutions and grid_sample."""

import pytest
import torch
from torch.nn import functional as F

from lit_fedad.models.memory_generator import MemoryGenerator, sample_grid

SIDE = 6


def places(side: int = SIDE) -> torch.Tensor:
    line = (torch.arange(side) + 0.5) / side * 2 - 1
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def by_convolutions(head: MemoryGenerator, rows: torch.Tensor) -> torch.Tensor:
    """Eq. 9 to 11 as the paper writes them, on one feature map [1, C, H, W]."""

    def conv(layer, x):
        return F.conv2d(x, layer.weight[:, :, None, None], layer.bias)

    feature_map = rows.T.reshape(1, -1, SIDE, SIDE)
    projected = F.relu(conv(head.project, feature_map))
    xy = places().to(rows).T.reshape(1, 2, SIDE, SIDE)
    coord = conv(head.coord_conv, torch.cat([projected, xy], dim=1))
    where = torch.tanh(conv(head.phi_2, torch.tanh(conv(head.phi_1, coord))))
    sampled = F.grid_sample(head.grid[None], where.permute(0, 2, 3, 1), mode="bilinear", align_corners=True)
    return conv(head.out, torch.cat([sampled, coord], dim=1))[0].flatten(1).T


@pytest.mark.parametrize("grad", [True, False])
def test_equals_the_equations(grad):
    torch.manual_seed(0)
    head = MemoryGenerator(channels=8, hidden=5, grid_size=4)
    rows = torch.randn(SIDE * SIDE, 8)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(head(rows, places()), by_convolutions(head, rows), rtol=1e-5, atol=1e-5)


def test_gradients_equal_those_of_the_equations():
    torch.manual_seed(0)
    head = MemoryGenerator(channels=8, hidden=5, grid_size=4).double()
    rows, aim = torch.randn(SIDE * SIDE, 8).double(), torch.randn(SIDE * SIDE, 8).double()
    ours = torch.autograd.grad((head(rows, places().double()) * aim).sum(), list(head.parameters()))
    theirs = torch.autograd.grad((by_convolutions(head, rows) * aim).sum(), list(head.parameters()))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)


def test_the_papers_network_has_13_887_746_parameters():
    with torch.device("meta"):
        head = MemoryGenerator(channels=1792)
    assert sum(p.numel() for p in head.parameters()) == 13_887_746


def test_an_untrained_residual_head_is_the_identity():
    rows = torch.randn(10, 8)
    for generator in (True, False):
        head = MemoryGenerator(8, hidden=4, generator=generator, residual=True)
        assert torch.equal(head(rows, places()[:10]), rows)


def test_ablations():
    rows, where = torch.randn(10, 8), places()[:10]
    neither = MemoryGenerator(8, projection=False, generator=False)
    assert torch.equal(neither(rows, where), rows)
    assert not list(neither.parameters())
    projection = MemoryGenerator(8, generator=False)
    torch.testing.assert_close(projection(rows, where), F.relu(projection.project(rows)))
    generator = MemoryGenerator(8, hidden=4, projection=False)
    assert generator.project is None
    assert generator(rows, where).shape == rows.shape


def test_sampling_is_grid_sample_with_aligned_corners():
    torch.manual_seed(0)
    grid = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    where = (torch.rand(50, 2, dtype=torch.float64) * 2 - 1).requires_grad_()
    corners = torch.tensor([[-1.0, -1], [1, 1], [-1, 1], [1, -1], [0, 0]], dtype=torch.float64)
    for points in (where, corners):
        theirs = F.grid_sample(grid[None], points[None, None], align_corners=True)[0, :, 0].T
        torch.testing.assert_close(sample_grid(grid, points), theirs)
    assert torch.autograd.gradcheck(sample_grid, (grid, where))


def test_reset_draws_again_and_keeps_zero_start():
    head = MemoryGenerator(8, hidden=4, residual=True)
    before = head.grid.detach().clone()
    head.reset_parameters()
    assert not torch.equal(before, head.grid)
    assert not head.out.weight.any()
