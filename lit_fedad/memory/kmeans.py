"""temporary"""
from dataclasses import dataclass
import torch
from lit_fedad.memory.knn import nearest

@dataclass
class KMeansResult:
    centroids: torch.Tensor
    counts: torch.Tensor
    assignment: torch.Tensor
    inertia: float
    steps: int

def kmeans(points, clusters, *, weights=None, initial=None, generator, max_steps=20, tolerance=1e-4, backend="auto", seeding="kmeans++"):
    w = torch.ones(len(points)) if weights is None else weights.float()
    if initial is None:
        c = [points[torch.multinomial(w, 1, generator=generator)[0]]]
        d = (points - c[0]).square().sum(1)
        for _ in range(clusters - 1):
            p = (w * d).double().cumsum(0)
            i = torch.searchsorted(p, torch.rand(1, generator=generator, dtype=torch.float64) * p[-1]).clamp(max=len(points) - 1)[0]
            c.append(points[i]); d = torch.minimum(d, (points - points[i]).square().sum(1))
        initial = torch.stack(c)
    cent = initial.clone(); last = None
    for s in range(max_steps):
        d, a = nearest(points, cent, 1); a = a[:, 0]
        inertia = float((w * d[:, 0] ** 2).sum())
        n = torch.zeros(clusters).index_add_(0, a, w)
        new = torch.zeros_like(cent).index_add_(0, a, points * w[:, None]) / n.clamp(min=1e-12)[:, None]
        cent = torch.where(n[:, None] > 0, new, cent)
        if last is not None and last - inertia < tolerance * last: break
        last = inertia
    return KMeansResult(cent, n, a, inertia, s)
