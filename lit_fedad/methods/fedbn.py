"""FedBN: FedAvg that leaves normalisation layers at home (Li et al., ICLR 2021)."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lit_fedad.contracts import Task
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def normalisation_keys(task: Task) -> set[str]:
    """Entries of a task's state that belong to a normalisation layer, by type of layer, whatever its name."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in task.named_modules()
        if isinstance(module, NORMALISATION)
        for name in module.state_dict()
    }


class FedBNClient(FedAvgClient):
    """A client whose normalisation layers, statistics and affine weights, are personal."""

    def shared_keys(self) -> list[str]:
        """Lists all that FedAvg shares, less normalisation layers."""
        personal = normalisation_keys(self.task)
        return [name for name in super().shared_keys() if name not in personal]


class FedBNServer(FedAvgServer):
    """FedAvg's server, which says so where there is no normalisation layer to leave at home.

    Args:
        client: A client, for the initial weights.
    """

    def __init__(self, client: FedBNClient) -> None:
        super().__init__(client)
        self.nothing_to_leave = not normalisation_keys(client.task).intersection(client.task.learned_state())
        self.task_name = type(client.task).__name__

    def warnings(self) -> list[str]:
        """One line, in the first round."""
        if self.nothing_to_leave and self.context.round == 1:
            return [f"{self.task_name} has no normalisation layer that trains: fedbn is fedavg here"]
        return []
