"""Every table and figure of FedDyMem, FADngs, GLDP and FedVCK (``conf/papers.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import yaml

from lit_fedad.core.config import conf_folder

_ROMAN = {"I": "1", "II": "2", "III": "3", "IV": "4", "V": "5", "VI": "6"}


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Attributes:
        paper: The paper's method.
        printed: Its number, as the paper prints it.
        shows: What it shows.
        reason: Why there is no table of ``conf/table`` for it; empty where there is one.
    """

    paper: str
    printed: str
    shows: str
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of its table in ``conf/table``.

        Example:
            >>> Item("FADngs", "Table IV", "").name, Item("FedVCK", "Fig. 1 (a)", "").name
            ('fadngs_4', 'fedvck_fig1a')
        """
        kind, number, *part = self.printed.replace("(", "").replace(")", "").split()
        number = _ROMAN.get(number, number) + "".join(part)
        return f"{self.paper.lower()}_{'fig' if kind == 'Fig.' else ''}{number}"

    @property
    def call(self) -> str:
        """What ``lit-fedad report`` takes to make it; empty where nothing makes it."""
        return "" if self.reason else f"table={self.name}"


@cache
def items() -> tuple[Item, ...]:
    """Reads all items, in the order of the papers, tables before figures."""
    papers = yaml.safe_load((conf_folder() / "papers.yaml").read_text())
    return tuple(
        Item(paper, printed, **(entry if isinstance(entry, dict) else {"shows": entry}))
        for paper, entries in papers.items()
        for printed, entry in entries.items()
    )


def reason_against(name: str) -> str:
    """Returns why there is no table of an item of a paper, for a message; empty for any other name.

    Example:
        >>> reason_against("fedvck_fig2")
        'FedVCK, Fig. 2: a drawing of the method, without results'
    """
    reasons = {one.name: f"{one.paper}, {one.printed}: {one.reason}" for one in items() if one.reason}
    return reasons.get(name, "")


def listing() -> list[dict[str, str]]:
    """Lists items with what makes them, or else the reason, as lines of a table."""
    return [
        {"paper": one.paper, "item": one.printed, "shows": one.shows, "made by": one.call or one.reason}
        for one in items()
    ]
