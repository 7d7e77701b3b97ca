"""Every table and figure of FedDyMem, FADngs, GLDP and FedVCK: what it shows, and why where it is not made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


_DRAWING = "a drawing of the idea, without results"
_METHOD = "a drawing of the method, without results"
_PROSE = "words about methods, without results"

ITEMS: tuple[Item, ...] = (
    Item("FedDyMem", "Table I", "image-level detection"),
    Item("FedDyMem", "Table II", "pixel-level detection"),
    Item("FedDyMem", "Table III", "ablation"),
    Item("FedDyMem", "Fig. 1", "federated detection", _DRAWING),
    Item("FedDyMem", "Fig. 2", "overview", _METHOD),
    Item("FedDyMem", "Fig. 3", "feature extraction", _METHOD),
    Item("FedDyMem", "Fig. 4", "memory-reduce", _METHOD),
    Item("FedDyMem", "Fig. 5", "images of each product by client"),
    Item("FedDyMem", "Fig. 6", "loss of each client by round"),
    Item("FedDyMem", "Fig. 7", "I-AUROC of all methods by round"),
    Item("FedDyMem", "Fig. 8", "local epochs"),
    Item("FedDyMem", "Fig. 9", "heatmaps of FedAvg and FedDyMem"),
    Item("FADngs", "Table I", "comparison, 1 % of anomalies in training"),
    Item("FADngs", "Table II", "clean training images"),
    Item("FADngs", "Table III", "what sharing densities is worth"),
    Item("FADngs", "Table IV", "what representations are trained by"),
    Item("FADngs", "Table V", "local epochs"),
    Item("FADngs", "Table VI", "queue of the distillation"),
    Item("FADngs", "Fig. 1", "false and missing detection", _DRAWING),
    Item("FADngs", "Fig. 2", "means of raw images", _DRAWING),
    Item("FADngs", "Fig. 3", "overview", _METHOD),
    Item("FADngs", "Fig. 4", "samples of the contrast", _METHOD),
    Item("FADngs", "Fig. 5", "distillation", _METHOD),
    Item("FADngs", "Fig. 6", "representations, false detection"),
    Item("FADngs", "Fig. 7", "representations, missing detection"),
    Item("FADngs", "Fig. 8", "capacities of averaging and distilling"),
    Item("FADngs", "Fig. 9", "distance correlation of densities and images"),
    Item("GLDP", "Table 1", "A_loc with one task"),
    Item("GLDP", "Table 2", "A_glo with five tasks"),
    Item("GLDP", "Table 3", "A_loc with five tasks"),
    Item("GLDP", "Table 4", "ablation"),
    Item("GLDP", "Fig. 1", "spatio-temporal heterogeneity", _DRAWING),
    Item("GLDP", "Fig. 2", "overview", _METHOD),
    Item("GLDP", "Fig. 3", "A_glo with one task"),
    Item("GLDP", "Fig. 4", "A_sel task after task"),
    Item("FedVCK", "Table 1", "problems of other methods", _PROSE),
    Item("FedVCK", "Table 2", "medical images, 100 rounds"),
    Item("FedVCK", "Table 3", "medical images, 10 rounds"),
    Item("FedVCK", "Table 4", "ablation, medical images"),
    Item("FedVCK", "Table 5", "bytes sent in a round, medical images"),
    Item("FedVCK", "Table 6", "membership inference, OrganS"),
    Item("FedVCK", "Table 7", "natural images, 100 rounds"),
    Item("FedVCK", "Table 8", "what other methods synthesise", _PROSE),
    Item("FedVCK", "Table 9", "bytes sent in a round, all images"),
    Item("FedVCK", "Table 10", "what crosses"),
    Item("FedVCK", "Table 11", "natural images, 10 rounds"),
    Item("FedVCK", "Table 12", "membership inference, CIFAR-10"),
    Item("FedVCK", "Table 13", "number of hard negatives K"),
    Item("FedVCK", "Table 14", "ablation, all kinds of images"),
    Item("FedVCK", "Fig. 1 (a)", "loss and accuracy with and without constraints"),
    Item("FedVCK", "Fig. 1 (b)", "change of the knowledge, Path"),
    Item("FedVCK", "Fig. 2", "overview", _METHOD),
    Item("FedVCK", "Fig. 3", "change of the knowledge, OrganC"),
    Item("FedVCK", "Fig. 4", "size of the knowledge, medical images"),
    Item("FedVCK", "Fig. 5", "size of the knowledge, natural images"),
)
"""In the order of the papers, tables before figures."""

OWN: Mapping[str, str] = {"gldp_frozen": "GLDP's settings on frozen features, for two cores"}
"""Tables of ``conf/table`` that no paper has, and what they show."""


def reason_against(name: str) -> str:
    """Returns why there is no table of an item of a paper, for a message; empty for any other name.

    Example:
        >>> reason_against("fedvck_fig2")
        'FedVCK, Fig. 2: a drawing of the method, without results'
    """
    for item in ITEMS:
        if item.reason and item.name == name:
            return f"{item.paper}, {item.printed}: {item.reason}"
    return ""


def listing(items: Sequence[Item] = ITEMS) -> list[dict[str, str]]:
    """Lists items with what makes them, or else the reason, as lines of a table."""
    return [
        {"paper": item.paper, "item": item.printed, "shows": item.shows, "made by": item.call or item.reason}
        for item in items
    ]
