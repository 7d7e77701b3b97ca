"""Memory-bank kernels beside their alternatives: nearest neighbours and k-means.

Run it with ``python benchmarks/kernels.py``; ``--paper`` adds the sizes of the FedDyMem paper (minutes),
``--device cuda`` computes on a GPU.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import faiss
import torch
from sklearn.cluster import KMeans

from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest


def best_times(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """Seconds of the fastest run of each; the works take turns, so a busy machine is unfair to none."""
    best = [float("inf")] * len(works)
    for _ in range(repeats + 1):
        for position, work in enumerate(works):
            begin = time.perf_counter()
            work()
            synchronise()
            best[position] = min(best[position], time.perf_counter() - begin)
    return best


def synchronise() -> None:
    """Waits for a GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compare_nearest(sizes: list[tuple[int, int, int]], repeats: int, device: str) -> None:
    """Prints times of the search beside the plain matrix product of queries and bank, and its GFLOP/s."""
    heads = f"{'torch ms':>10} {'faiss ms':>10} {'product ms':>10}"
    print(f"{'nearest: n x C in m':>24} {'k':>2} {heads} {'GFLOP/s of each':>25}")
    for count, channels, slots in sizes:
        queries, bank = (torch.randn(rows, channels, device=device) for rows in (count, slots))
        product = torch.empty(count, slots, device=device)
        for k in (1, 3, 6):
            works = [partial(nearest, queries, bank, k, backend=backend) for backend in ("torch", "faiss")]
            times = best_times([*works, partial(torch.mm, queries, bank.T, out=product)], repeats)
            size, operations = f"{count} x {channels} in {slots}", 2e-9 * count * channels * slots
            speeds = " ".join(f"{operations / seconds:7.1f}" for seconds in times)
            milliseconds = " ".join(f"{1e3 * seconds:10.1f}" for seconds in times)
            print(f"{size:>24} {k:>2} {milliseconds} {speeds:>25}")


def compare_kmeans(
    count: int, channels: int, clusters: int, steps: int, with_sklearn: bool, device: str
) -> None:
    points = torch.randn(count, channels, generator=torch.Generator().manual_seed(0)).to(device)

    def ours(max_steps: int = steps) -> float:
        generator = torch.Generator().manual_seed(0)
        return kmeans(points, clusters, generator=generator, max_steps=max_steps, tolerance=0).inertia

    def faiss_kmeans() -> float:
        model = faiss.Kmeans(channels, clusters, niter=steps, seed=0, min_points_per_centroid=1)
        model.train(points.numpy())
        return float(model.index.search(points.numpy(), 1)[0].sum())

    def sklearn_kmeans() -> float:
        return KMeans(clusters, n_init=1, max_iter=steps, tol=0, random_state=0).fit(points.numpy()).inertia_

    rows: list[tuple[str, Callable[[], float]]] = [
        ("ours, k-means++ only", lambda: ours(max_steps=0)),
        ("ours", ours),
    ]
    if device == "cpu":
        rows.append(("faiss.Kmeans (random)", faiss_kmeans))
    if with_sklearn and device == "cpu":
        rows.append(("sklearn (greedy ++)", sklearn_kmeans))
    print(f"\nk-means: {count} x {channels} into {clusters}, {steps} steps")
    for name, work in rows:
        begin = time.perf_counter()
        inertia = work()
        synchronise()
        print(f"{name:>24} {time.perf_counter() - begin:8.2f} s   inertia {inertia:.4g}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paper", action="store_true", help="also 31,360 x 1,792 in 3,136")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    faiss.omp_set_num_threads(arguments.threads)
    print(f"{arguments.device}, {arguments.threads} thread(s)")

    sizes = [(2_560, 448, 256), (46_080, 448, 256), (7_840, 448, 784)]
    compare_nearest(sizes + [(31_360, 1_792, 3_136)] * arguments.paper, arguments.repeats, arguments.device)
    compare_kmeans(3_920, 448, 784, steps=20, with_sklearn=True, device=arguments.device)
    if arguments.paper:
        compare_kmeans(15_680, 1_792, 3_136, steps=20, with_sklearn=False, device=arguments.device)


if __name__ == "__main__":
    main()
