"""temporary"""
import torch
from lit_fedad.memory.kmeans import kmeans
from lit_fedad.memory.knn import nearest

class MemoryReduce: pass

class PositionReduce(MemoryReduce):
    def start(self, memory, round, slots, generator):
        self.m, self.t, self.num, self.den, self.n, self.plain = memory, round, 0, 0, 0, 0
    def update(self, maps):
        w = torch.ones(len(maps)) if self.t == 0 else (maps - self.m).flatten(1).norm(dim=1)
        self.num = self.num + (w[:, None, None] * maps).double().sum(0); self.den += float(w.sum()); self.n += len(maps)
    def finish(self):
        m = (self.num / self.den).float()
        if self.t: m = m / (self.t + 1) + self.m * (1 - 1 / (self.t + 1))
        return m, torch.full((len(m),), float(self.n))

class SampleReduce(MemoryReduce):
    def start(self, memory, round, slots, generator): self.rows, self.slots, self.g = [], slots, generator
    def update(self, maps): self.rows.append(maps.flatten(0, 1).clone())
    def finish(self):
        r = torch.cat(self.rows); i = torch.randperm(len(r), generator=self.g)[: self.slots]
        i = i if len(i) == self.slots else torch.randint(len(r), (self.slots,), generator=self.g)
        return r[i], torch.ones(self.slots)

class SlotReduce(MemoryReduce):
    def start(self, memory, round, slots, generator):
        self.m, self.t, self.slots, self.g, self.rows = memory, round, slots, generator, []
        if memory is not None:
            self.num = torch.zeros(memory.shape, dtype=torch.float64); self.den = torch.zeros(len(memory), dtype=torch.float64)
            self.plain = torch.zeros_like(self.num); self.n = torch.zeros(len(memory))
    def update(self, maps):
        q = maps.flatten(0, 1)
        if self.m is None: self.rows.append(q.clone()); return
        d, a = nearest(q, self.m, 1); d, a = d[:, 0].double(), a[:, 0]
        self.num.index_add_(0, a, q * d[:, None]); self.den.index_add_(0, a, d)
        self.plain.index_add_(0, a, q.double()); self.n.index_add_(0, a, torch.ones(len(a)))
    def finish(self):
        if self.m is None:
            r = kmeans(torch.cat(self.rows), self.slots, generator=self.g, max_steps=10); return r.centroids, r.counts
        mean = torch.where(self.den[:, None] > 0, self.num / self.den.clamp(min=1e-30)[:, None], self.plain / self.n.clamp(min=1)[:, None])
        m = torch.where(self.n[:, None] > 0, mean, self.m.double()).float()
        a = 1 / (self.t + 1)
        return a * m + (1 - a) * self.m, self.n
