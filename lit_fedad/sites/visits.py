"""When sites answered, and how long they took, as their coordinator sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Visit:
    """What a coordinator knows of one site's answers.

    Attributes:
        last_seen: Time of its last answer in seconds since 1970; None before the first.
        answers: Number of its answers.
        seconds: Time from order to answer, over all answers.
    """

    last_seen: float | None = None
    answers: int = 0
    seconds: float = 0.0


@dataclass
class Visits:
    """The answers of all sites, those before a restart of the coordinator included.

    Attributes:
        sites: By client.
    """

    sites: dict[int, Visit] = field(default_factory=dict)

    def of(self, client: int) -> Visit:
        """Returns what is known of a site."""
        return self.sites.setdefault(client, Visit())

    def note(self, client: int, seconds: float) -> None:
        """Adds an answer that came just now, some seconds after its order."""
        visit = self.of(client)
        visit.last_seen = time.time()
        visit.answers += 1
        visit.seconds += seconds

    def state(self) -> dict[int, dict[str, Any]]:
        """Returns what `restore` takes."""
        return {client: asdict(visit) for client, visit in self.sites.items()}

    def restore(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Goes back to a state, but keeps when sites were seen since."""
        for client, values in state.items():
            seen = self.of(client).last_seen
            self.sites[client] = Visit(**{**values, "last_seen": seen or values["last_seen"]})
