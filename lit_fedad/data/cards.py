"""Facts about the public sets behind the data configurations, from ``cards.yaml``: licences, papers and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

UNSTATED = "see the page"


class Counts(NamedTuple):
    """Numbers of images of one product type.

    Attributes:
        train: Normal training images.
        good: Normal test images.
        anomalous: Anomalous test images.
    """

    train: int
    good: int
    anomalous: int


@dataclass(frozen=True)
class Source:
    """A download.

    Attributes:
        title: Name of the set.
        address: Page of the download.
        licence: Licence; `UNSTATED` where it is not established.
        paper: Paper to cite; `UNSTATED` where the page names it.
    """

    title: str
    address: str
    licence: str
    paper: str


@dataclass(frozen=True)
class Card:
    """Description of a data configuration.

    Attributes:
        title: Its contents in one line.
        kind: The measurements that it allows.
        sources: Downloads that it needs.
        counts: Product -> official size; only where it is established, and where the split is the set's own.
        layout: What its layout was taken from, where no download was at hand; empty where this is not recorded.
    """

    title: str
    kind: Literal["detection, localisation", "detection", "classification", "semantic detection"]
    sources: tuple[Source, ...]
    counts: Mapping[str, Counts] = field(default_factory=dict)
    layout: str = ""


def _read(file: Path) -> dict[str, Card]:
    """Reads the cards of a YAML file; a null entry of a source becomes `UNSTATED`."""
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    sources = {
        name: Source(**{key: UNSTATED if value is None else value for key, value in fields.items()})
        for name, fields in content["sources"].items()
    }
    return {
        name: Card(
            fields["title"],
            fields["kind"],
            tuple(sources[source] for source in fields["sources"]),
            {product: Counts(*numbers) for product, numbers in fields.get("counts", {}).items()},
            fields.get("layout", ""),
        )
        for name, fields in content["cards"].items()
    }


CARDS: Mapping[str, Card] = _read(Path(__file__).with_suffix(".yaml"))
"""Name of a data configuration -> its card. Configurations for images of one's own have none."""
