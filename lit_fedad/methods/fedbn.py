"""FedBN: FedAvg with personal normalisation layers (Li et al., ICLR 2021)."""

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lit_fedad.contracts import Task
from lit_fedad.contracts.task import learned_state
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def normalisation_keys(task: Task) -> set[str]:
    """Returns the names of a task's state entries that belong to normalisation layers; the type tells the layers."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in task.named_modules()
        if isinstance(module, NORMALISATION)
        for name in module.state_dict()
    }


class FedBNClient(FedAvgClient):
    """A client whose normalisation layers are personal, with their statistics and affine weights."""

    def shared_keys(self, learned: Iterable[str]) -> list[str]:
        """Lists the entries that FedAvg shares, without normalisation layers."""
        personal = normalisation_keys(self.task)
        return [name for name in super().shared_keys(learned) if name not in personal]


class FedBNServer(FedAvgServer):
    """FedAvg's server, which warns if the task has no normalisation layer that training changes."""

    def __init__(self, client: FedBNClient) -> None:
        super().__init__(client)
        self.nothing_to_leave = not normalisation_keys(client.task).intersection(learned_state(client.task))
        self.task_name = type(client.task).__name__

    def warnings(self) -> list[str]:
        """Returns one line in the first round if the task has no normalisation layer that training changes."""
        if self.nothing_to_leave and self.context.round == 1:
            return [f"{self.task_name} has no normalisation layer that trains: fedbn is fedavg here"]
        return []
