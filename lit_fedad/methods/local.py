"""Local training: nothing is exchanged. The lower bound, and with one client that holds everything the upper one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from lit_fedad.contracts import Client, Message, Payload, Server, Task, Update


class LocalClient(Client):
    """A client on its own.

    Args:
        task: What it learns.
        local_epochs: E; T rounds of E epochs make T * E epochs in all.
        keep_optimizer: Whether the optimiser's state lives on between rounds; nothing overwrites the weights here.
    """

    def __init__(self, task: Task, local_epochs: int = 1, keep_optimizer: bool = True) -> None:
        super().__init__(task, local_epochs, keep_optimizer)

    def receive(self, broadcast: Message) -> None:
        """Nothing comes."""

    def send(self, loader: DataLoader) -> Message:
        """Sends nothing; lets the task prepare before round 1, and renew what it prepared after each round."""
        if self.context.round > 0:
            self.task.refresh(loader, self.context)
        else:
            self.task.prepare(loader, self.context)
        return {}

    def personal_state(self) -> dict[str, Any]:
        """All that training changes, and the optimiser."""
        return {**super().personal_state(), "task": self.task.learned_state()}

    def load_personal_state(self, state: Mapping[str, Any]) -> None:
        """Swaps another client in."""
        super().load_personal_state(state)
        self.task.load_state_dict(state["task"], strict=False)


class LocalServer(Server):
    """A server that says and hears nothing.

    Args:
        client: Unused; every server is built from a client.
    """

    setup = ("prepare",)

    def __init__(self, client: Client) -> None:
        super().__init__()

    def download_payload(self) -> Payload:
        """Nothing."""
        return {}

    def upload_payload(self) -> Payload:
        """Nothing."""
        return {}

    def broadcast(self, client_id: int) -> Message:
        """Nothing."""
        return {}

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Nothing."""
