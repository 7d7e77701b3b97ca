"""A Ray worker that notes on which node of its cluster it plays each turn, and may hold one up."""

import os
import time
from pathlib import Path

from lit_fedad.experiment.ray_transport import Worker

NOTES = "LIT_FEDAD_TEST_NOTES"
"""Variable with the folder of the notes: an empty file ``NODE.ROUND.CLIENT`` a turn."""
HOLD = "hold"
"""File in that folder, with ROUND.CLIENT of the turn that never ends."""


class NotingWorker(Worker):
    """A worker that notes its turns."""

    def play(self, context, blob, state, scored):
        import ray

        folder, turn = Path(os.environ[NOTES]), f"{context.round}.{context.client}"
        (folder / f"{ray.get_runtime_context().get_node_id()}.{turn}").touch()
        while (folder / HOLD).exists() and (folder / HOLD).read_text() == turn:
            time.sleep(0.1)
        return super().play(context, blob, state, scored)
