"""Projection layer and memory generator: the trainable head of FedDyMem (Section IV-B)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_fedad.core.bounds import at_least


class MemoryGenerator(nn.Module):
    """Trainable head from frozen patch features to memory features.

    Every layer is a 1x1 convolution, hence a linear map of single patches: patches are rows, and their places on the
    feature map are given as coordinates. With ``projection`` and ``generator`` and without ``residual`` this is the
    paper's network: 13,887,746 parameters at 1,792 channels.

    Args:
        channels: Width C of the features, in and out.
        hidden: Width of the coordinate network phi.
        grid_size: Side of the trainable grid G (H_G = W_G).
        projection: Whether there is a projection layer P = relu(conv(F)) (FedDyMem Eq. 9); without it P = F.
        generator: Whether CoordConv, coordinates, grid sample (FedDyMem Eq. 10, FedDyMem Eq. 11) and output layer
            follow; without them M = P.
        residual: Whether the output is added to the input. The last layer then starts at zero, so that an untrained
            head is the identity. This is not in the paper; it keeps the information of the frozen features.
    """

    def __init__(
        self,
        channels: int,
        hidden: int = 512,
        grid_size: int = 8,
        projection: bool = True,
        generator: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__()
        at_least("task.head", 1, hidden=hidden, grid_size=grid_size)
        self.residual = residual and (projection or generator)
        self.project = nn.Linear(channels, channels) if projection else None
        self.grid = nn.Parameter(torch.empty(channels, grid_size, grid_size)) if generator else None
        if generator:
            self.coord_conv = nn.Linear(channels + 2, channels)
            self.phi_1 = nn.Linear(channels, hidden)
            self.phi_2 = nn.Linear(hidden, 2)
        # A residual without a generator still needs one layer that can start at zero.
        inputs = 2 * channels if generator else channels
        self.out = nn.Linear(inputs, channels) if generator or self.residual else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws initial weights from torch's global generator."""
        for layer in self.children():
            layer.reset_parameters()  # type: ignore[operator]
        if self.grid is not None:
            nn.init.xavier_normal_(self.grid)
        if self.residual and self.out is not None:
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(self, rows: Tensor, places: Tensor) -> Tensor:
        """Generates memory features [n, C] of patch features [n, C] at their centres (x, y) in [-1, 1] [n, 2]."""
        if self._adds_nothing():
            return rows
        projected = rows if self.project is None else F.relu(self.project(rows))
        generated = projected if self.out is None else self._generate(projected, places)
        return rows + generated if self.residual else generated

    def _adds_nothing(self) -> bool:
        """Returns whether the last layer is zero, as before training: then the head is the identity."""
        if not self.residual or self.out is None or torch.is_grad_enabled() or torch.compiler.is_exporting():
            return False
        return not (self.out.weight.any() or self.out.bias.any())

    def _generate(self, projected: Tensor, places: Tensor) -> Tensor:
        assert self.out is not None
        if self.grid is None:
            return self.out(projected)
        channels = projected.shape[1]
        weight_grid, weight_coord = self.out.weight.split(channels, dim=1)
        # An exported graph must not depend on the number of patches.
        if torch.is_grad_enabled() or torch.compiler.is_exporting() or len(projected) < channels:
            coord = self.coord_conv(torch.cat([projected, places], dim=1))
            hidden, merged = self.phi_1(coord), F.linear(coord, weight_coord, self.out.bias)
        else:
            hidden = self._after_coord_conv(projected, places, self.phi_1.weight, self.phi_1.bias)
            merged = self._after_coord_conv(projected, places, weight_coord, self.out.bias)
        where = torch.tanh(self.phi_2(hidden.tanh_()))
        # Sampling is linear: the output layer is applied to the few grid points instead of every sample.
        return merged + sample_grid(torch.einsum("oc,chw->ohw", weight_grid, self.grid), where)

    def _after_coord_conv(self, projected: Tensor, places: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Computes a linear layer behind the CoordConv; both are folded into one, the same map at half the cost."""
        folded = weight @ self.coord_conv.weight
        shift = weight @ self.coord_conv.bias + bias
        return torch.addmm(F.linear(projected, folded[:, :-2], shift), places, folded[:, -2:].T)


def sample_grid(grid: Tensor, where: Tensor) -> Tensor:
    """Samples a grid bilinearly at single points (FedDyMem Eq. 10, FedDyMem Eq. 11).

    The result is that of ``grid_sample`` with ``align_corners=True``.

    Args:
        grid: Values [C, H, W].
        where: Coordinates (x, y) in [-1, 1] [n, 2]; samples [n, C] are differentiable in both.
    """
    if torch.compiler.is_exporting():  # embedding_bag would be a loop, which OpenVINO cannot read
        return F.grid_sample(grid[None], where[None, None], align_corners=True)[0, :, 0].T
    _, height, width = grid.shape
    x = (where[:, 0] + 1) / 2 * (width - 1)
    y = (where[:, 1] + 1) / 2 * (height - 1)
    # After training has diverged, samples may be NaN; indices must stay within the grid even then.
    left = x.detach().nan_to_num().floor().clamp(0, max(width - 2, 0))
    top = y.detach().nan_to_num().floor().clamp(0, max(height - 2, 0))
    dx, dy = x - left, y - top
    weights = torch.stack([(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx], dim=1)
    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    corners = torch.stack(
        [top * width + left, top * width + right, bottom * width + left, bottom * width + right], dim=1
    )
    # embedding_bag never builds the [n, 4, C] block of corner values.
    return F.embedding_bag(corners.long(), grid.flatten(1).T, per_sample_weights=weights, mode="sum")
