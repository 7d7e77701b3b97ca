"""A client of FedAvg whose process ends in the middle of one turn."""

import os
import sys

from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS
from lit_fedad.methods.fedavg import FedAvgClient


class DyingClient(FedAvgClient):
    """Client 1 never finishes round 2: in a Ray worker its process ends, elsewhere its turn fails."""

    discloses = (TRAINED_WEIGHTS,)

    def send(self, loader):
        if (self.context.round, self.context.client) == (2, 1):
            if "ray" in sys.modules and sys.modules["ray"].get_runtime_context().get_actor_id():
                os._exit(1)
            raise RuntimeError("out of memory")
        return super().send(loader)
