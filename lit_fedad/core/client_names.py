"""The names of clients in output for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_fedad.core.errors import UserError


@dataclass(frozen=True)
class ClientNames:
    """The names of a federation's clients: a site has the name that its operator knows, other clients their number.

    Computations identify clients by number; code that writes text for people gets the names here.

    Attributes:
        sites: Names of sites by client number; empty where clients are no sites.

    Example:
        >>> names = ClientNames({0: "north"})
        >>> names.label(0), names.title(0), names.label(3), names.title(3)
        ('north', 'site north', '3', 'client 3')
    """

    sites: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> ClientNames:
        """Reads the names from the content of a run's ``result.json``.

        Raises:
            UserError: If a site in it has no number.
        """
        try:
            return cls({int(site["client"]): str(name) for name, site in result.get("sites", {}).items()})
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise UserError("result.json: sites needs the number of each site under its name") from error

    def label(self, client: int) -> str:
        """Returns the bare name, for example for the heading of a table."""
        return self.sites.get(client, str(client))

    def title(self, client: int) -> str:
        """Names a client within a sentence."""
        return f"site {self.sites[client]}" if client in self.sites else f"client {client}"

    def titled(self, causes: Mapping[int, str]) -> dict[str, str]:
        """Replaces the client numbers in a mapping by the clients' titles."""
        return {self.title(client): cause for client, cause in causes.items()}

    def number(self, label: str) -> int | None:
        """Finds a client by its label; a site also by its number. Returns None if the label is neither.

        Example:
            >>> names = ClientNames({1: "north"})
            >>> names.number("north"), names.number("1"), names.number("south")
            (1, 1, None)
        """
        by_name = {name: client for client, name in self.sites.items()}
        return by_name.get(label, int(label) if label.isdecimal() else None)


NUMBERS = ClientNames()
"""The names of clients that have only numbers."""
