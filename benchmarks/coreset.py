"""Greedy k-centre coreset: selections per second, and the covering radius beside the textbook loop's.

Run it with ``python benchmarks/coreset.py``; ``--points 20000`` takes seconds.
"""

import argparse
import time

import torch
from torch import Tensor

from lit_fedad.memory.coreset import greedy_k_center
from lit_fedad.memory.knn import nearest


def patches(count: int, channels: int, generator: torch.Generator, intrinsic: int = 24) -> Tensor:
    """Rows that resemble patch features: unequal clusters on a sheet of few dimensions, plus noise."""
    latent = torch.randn(count, intrinsic, generator=generator)
    middle = 2 * torch.randn(64, intrinsic, generator=generator)
    share = torch.rand(64, generator=generator).square()
    latent += middle[torch.multinomial(share, count, replacement=True, generator=generator)]
    lift = torch.randn(intrinsic, channels, generator=generator) / intrinsic**0.5
    return (latent @ lift).relu_().add_(0.05 * torch.randn(count, channels, generator=generator))


def textbook_greedy(points: Tensor, size: int, start: int) -> Tensor:
    """One pass over all points a selection."""
    norms = points.square().sum(1)
    nearest = torch.full_like(norms, torch.inf)
    selected = [start]
    while len(selected) < size:
        last = selected[-1]
        nearest = torch.minimum(nearest, norms + norms[last] - 2 * (points @ points[last]))
        nearest[last] = -1
        selected.append(int(nearest.argmax()))
    return torch.tensor(selected)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=214_000)
    parser.add_argument("--channels", type=int, default=384)
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument(
        "--reference-points", type=int, default=20_000, help="size of the comparison; 0: none"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(arguments.seed)

    points = patches(arguments.points, arguments.channels, generator)
    size = max(1, int(arguments.fraction * len(points)))
    print(f"{size:,} of {len(points):,} x {arguments.channels} patches, {arguments.threads} thread(s)")
    begin = time.perf_counter()
    selected = greedy_k_center(points, size, generator=generator, start=0)
    seconds = time.perf_counter() - begin
    print(f"  batches: {seconds:8.1f} s, {size / seconds:8,.0f} selections/s")
    if not arguments.reference_points:
        return

    points = points[: arguments.reference_points]
    size = max(1, int(arguments.fraction * len(points)))
    print(f"beside the textbook loop, {size:,} of {len(points):,} patches")
    for name, select in (
        ("batches", lambda: greedy_k_center(points, size, generator=generator, start=0)),
        ("textbook", lambda: textbook_greedy(points, size, start=0)),
    ):
        begin = time.perf_counter()
        selected = select()
        seconds = time.perf_counter() - begin
        radius = nearest(points, points[selected], k=1)[0].max().item()
        print(
            f"  {name:8}: {seconds:6.1f} s, {size / seconds:8,.0f} selections/s, covering radius {radius:.5f}"
        )


if __name__ == "__main__":
    main()
