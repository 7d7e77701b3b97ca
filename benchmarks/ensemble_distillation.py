"""An epoch of FADngs' distillation, ten teachers (ResNet-18, 512 public images): seconds and memory by queue size."""

import subprocess
import sys

QUEUES = (256, 65536)

CODE = """
import resource, sys, time
import lit_fedad  # before torchvision
import torch
from torch.nn import functional as F
from lit_fedad.experiment.build import build_model
from lit_fedad.core.config import compose
from lit_fedad.contracts import Context
from lit_fedad.data.public import synthetic
from lit_fedad.methods.parts import ensemble_distillation as sed

queue, kind = int(sys.argv[1]), sys.argv[2]
if kind == "naive":  # every distribution kept for the backward pass, as the equations are printed

    def naive(student, teachers, queues, weights, tau_t, tau_s, own_key, counts):
        terms, often = [], counts.log()
        for z, keys, weight in zip(teachers, queues, weights):
            p = F.softmax(z @ keys.T / tau_t + often, 1)
            log_q = F.log_softmax(student @ keys.T / tau_s + often, 1)
            terms.append(-weight * (p * log_q).sum(1).mean())
        return torch.stack(terms).sum()

    sed.distillation_loss = naive
torch.manual_seed(0)
model = build_model(compose(["method=fadngs", "features=train", "encoder=resnet18", "task.warmup=0"]), ["a", "b"])
start = model.client.shared_state()
teachers = {
    c: {n: w + 0.01 * torch.randn_like(w) if w.is_floating_point() and w.dim() > 1 else w for n, w in start.items()}
    for c in range(10)
}
public = synthetic(512, 32)
peaks, seconds = [], {}
for epochs, rounds in ((1, 1), (2, 2)):
    distil = sed.EnsembleDistillation(queue=queue, epochs=epochs, weighting="uniform")
    for round in range(rounds):
        began = time.perf_counter()
        distil(model.server.task, start, teachers, public, Context(0, round + 1), None)
        seconds[epochs] = time.perf_counter() - began
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
print(seconds[2] - seconds[1], 2 * seconds[1] - seconds[2], peaks[1], peaks[-1])
"""


def main() -> None:
    """Prints seconds of an epoch and of the teachers' one pass a round, and peak memory after two and three rounds."""
    for kind in ("ours", "naive"):
        for queue in QUEUES if kind == "ours" else QUEUES[-1:]:
            command = [sys.executable, "-c", CODE, str(queue), kind]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            epoch, teachers, first, last = map(float, out.split()[-4:])
            print(
                f"{kind:>5}, queue {queue:>6,}: {epoch:.1f} s an epoch, teachers {teachers:.1f} s a round,"
                f" peak {first:.2f} GiB after two rounds, {last:.2f} after three",
                flush=True,
            )


if __name__ == "__main__":
    main()
