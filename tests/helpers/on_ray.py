"""What Ray's workers import by name: a client that ends its process, and a worker that notes where it plays."""

import os
import sys
import time
from pathlib import Path

from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS
from lit_fedad.experiment.ray_transport import Worker
from lit_fedad.methods.fedavg import FedAvgClient

NOTES = "LIT_FEDAD_TEST_NOTES"
"""Variable with the folder of the notes: an empty file ``NODE.ROUND.CLIENT`` a turn."""
HOLD = "hold"
"""File in that folder, with ROUND.CLIENT of the turn that never ends."""


class DyingClient(FedAvgClient):
    """Client 1 never finishes round 2: in a Ray worker its process ends, elsewhere its turn fails."""

    discloses = (TRAINED_WEIGHTS,)

    def send(self, loader):
        if (self.context.round, self.context.client) == (2, 1):
            if "ray" in sys.modules and sys.modules["ray"].get_runtime_context().get_actor_id():
                os._exit(1)
            raise RuntimeError("out of memory")
        return super().send(loader)


class NotingWorker(Worker):
    """A worker that notes its turns, and may hold one up."""

    def play(self, context, blob, state, scored):
        import ray

        folder, turn = Path(os.environ[NOTES]), f"{context.round}.{context.client}"
        (folder / f"{ray.get_runtime_context().get_node_id()}.{turn}").touch()
        while (folder / HOLD).exists() and (folder / HOLD).read_text() == turn:
            time.sleep(0.1)
        return super().play(context, blob, state, scored)
