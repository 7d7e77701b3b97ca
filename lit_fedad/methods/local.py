"""Local training without exchanges: the lower bound, and with one client that holds all data the upper bound."""

from collections.abc import Iterable

from lit_fedad.contracts import Exchanges, Task
from lit_fedad.federation.client_runner import Train
from lit_fedad.methods.fedavg import WEIGHTS, FedAvgClient
from lit_fedad.methods.parts.pooled_statistics import Prepare, standardised
from lit_fedad.tasks.memory_bank import MemoryBank


class LocalClient(FedAvgClient):
    """A client that trains without sharing.

    Args:
        local_epochs: Passes over the client's data per round (E); T * E in T rounds.
        keep_optimizer: Whether the optimiser's state is kept between rounds; the server does not overwrite the weights.
    """

    shares_weights = False

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = True) -> None:
        super().__init__(task, local_epochs, keep_optimizer)

    def shared_keys(self, learned: Iterable[str]) -> list[str]:
        """Returns an empty list: no entry is shared."""
        return []


class NearestNeighbourClient(LocalClient):
    """A client that holds all data and builds a bank without training: the centralised bound of a memory bank."""

    needs = MemoryBank


def exchanges(client: LocalClient) -> Exchanges:
    """Local preparation, then training."""
    prepare = (Prepare(pooled=False),) if client.task.prepares or standardised(client.task) else ()
    return Exchanges(prepare, (Train(),), evidence=WEIGHTS)
