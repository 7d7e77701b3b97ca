"""What tracking a round costs: 20 metrics of 10 clients into MLflow's SQLite store, against a FedDyMem round."""

import tempfile
import time
from pathlib import Path

from benchmarks._runs import run, seconds_a_round
from lit_fedad.tracking.tracker import Tracker

METRICS, CLIENTS, ROUNDS = 20, 10, 20
COMMON = ["partition=iid", f"partition.clients={CLIENTS}", "backbone.weights=random", "rounds=4"]


def main() -> None:
    """Prints milliseconds a round that training waits for, and those of a processor altogether."""
    with tempfile.TemporaryDirectory() as folder:
        cache = f"cache.folder={folder}/cache"
        whole = seconds_a_round(run(*COMMON, cache, folder=Path(folder)))
        waited, processor, rest = track(Path(folder) / "tracked")
    print(f"a round of {CLIENTS} clients: {whole:.2f} s")
    print(f"{'':<32} {'ms a round':>10} {'share':>8}")
    for name, seconds in (("training waits", waited), ("a processor works, in all", processor)):
        print(f"{name:<32} {1000 * seconds:>10.2f} {seconds / whole:>8.2%}")
    print(f"{rest} records were not delivered")


def track(folder: Path) -> tuple[float, float, int]:
    """Seconds a round spent in the tracker's call, and by the process in all; how many records were left over."""
    tracker = Tracker(folder, "benchmark", "overhead", uri=f"sqlite:///{folder.parent}/mlflow.db")
    tracker.metrics({"begun": 0.0}, step=0)
    while tracker.run_id is None:  # MLflow's import and the making of the tables are no part of a round
        time.sleep(0.1)
    values = {f"metric_{m}/client_{c}": 0.5 for m in range(METRICS) for c in range(CLIENTS)}
    waited, before = 0.0, time.process_time()
    for number in range(1, ROUNDS + 1):
        began = time.perf_counter()
        tracker.metrics(values, step=number)
        waited += time.perf_counter() - began
    delivery = tracker.close(timeout_s=120)
    return waited / ROUNDS, (time.process_time() - before) / ROUNDS, delivery.pending


if __name__ == "__main__":
    main()
