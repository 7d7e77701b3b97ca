"""What the round loop costs beside training: 1,000 clients, 10 a round, in milliseconds of the processor a client."""

import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.fabric import Fabric

from benchmarks.simulation import A_ROUND, settings, write_images
from lit_fedad.core.config import compose
from lit_fedad.experiment.local_clients import build_run
from lit_fedad.federation.client_runner import Train
from lit_fedad.report.console import Display

ROUNDS, WARM = 20, 3


def main() -> None:
    """Prints milliseconds a client, of which training takes so many, and the files of the last checkpoint."""
    trained = [0.0]
    fit = Train.train

    def timed_fit(*arguments: Any) -> dict[str, float]:
        began = time.process_time()
        try:
            return fit(*arguments)
        finally:
            trained[0] += time.process_time() - began

    with tempfile.TemporaryDirectory() as folder, patch.object(Train, "train", staticmethod(timed_fit)):
        write_images(Path(folder))
        config = compose([*settings(folder), f"out={folder}/run", "rounds=1000"])
        run = build_run(Fabric(accelerator="cpu", devices=1), config, Display(quiet=True))
        federation = run.federation
        federation.server.register_clients(run.data.module.sizes)
        for round in range(1, WARM + ROUNDS + 1):
            if round == WARM + 1:
                began, trained[0] = time.process_time(), 0.0
            federation.history.append(federation.play(round))
            federation.save(round)
        total, within = (
            (1e3 * seconds) / (ROUNDS * A_ROUND) for seconds in (time.process_time() - began, trained[0])
        )
        latest = federation.checkpoints.latest()
        files = len(list(latest.iterdir())) if latest else 0
    print(
        f"{total:.1f} ms a client: training {within:.1f}, the loop {total - within:.1f}; {files} files in a checkpoint"
    )


if __name__ == "__main__":
    main()
