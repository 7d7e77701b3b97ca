"""Local training: nothing is exchanged. The lower bound, and with one client that holds everything the upper one."""

from __future__ import annotations

from lit_fedad.contracts import Exchanges, Task
from lit_fedad.federation.local_training import Train
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.pooled_statistics import Prepare
from lit_fedad.tasks.memory_bank import MemoryBank


class LocalClient(FedAvgClient):
    """A client on its own: it shares nothing.

    Args:
        task: What it learns.
        local_epochs: E; T rounds of E epochs make T * E epochs in all.
        keep_optimizer: Whether the optimiser's state lives on between rounds; nothing overwrites the weights here.
    """

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = True) -> None:
        super().__init__(task, local_epochs, keep_optimizer)

    @property
    def exchanges(self) -> Exchanges:
        """Local preparation alone, then training."""
        prepare = (Prepare(pooled=False),) if self.task.prepares else ()
        return Exchanges(prepare, (Train(),))

    def shared_keys(self) -> list[str]:
        """Lists nothing: all stays with the client."""
        return []


class NearestNeighbourClient(LocalClient):
    """A client that holds everything, and only remembers: the centralised bound on a memory bank."""

    needs = MemoryBank
