"""Normal images that clients get after a run is complete, and what the clients then hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_fedad.core.errors import UserError
from lit_fedad.data.content import content_hashes
from lit_fedad.data.partition import Partition
from lit_fedad.data.sample import ImageSet, Sample


@dataclass(frozen=True)
class Addition:
    """Images that came together, each to one client.

    Attributes:
        images: The images of each client that got some.

    Example:
        >>> Addition.from_json(Addition({0: (Sample(Path("a.png"), "nut"),)}).to_json()).images[0][0].name
        'a.png'
    """

    images: Mapping[int, Sequence[Sample]]

    @property
    def total(self) -> int:
        """Number of images."""
        return sum(map(len, self.images.values()))

    def to_json(self) -> dict[str, Any]:
        """Returns paths and products by client."""
        return {
            str(client): [{"path": str(sample.path), "product": sample.category} for sample in samples]
            for client, samples in sorted(self.images.items())
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Addition:
        """Reads what `to_json` returns.

        Raises:
            UserError: If it is not of that form.
        """
        try:
            images = {
                int(client): tuple(Sample(Path(image["path"]), str(image["product"])) for image in samples)
                for client, samples in content.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError("additions: needs path and product of each client's images") from error
        return cls(images)


def grow(images: ImageSet, partition: Partition, additions: Iterable[Addition]) -> tuple[ImageSet, Partition]:
    """Adds images to a set and to its partition, where each addition is a further stage of the clients that got some.

    Args:
        images: The set.
        partition: Its partition.
        additions: The additions, in their order.

    Returns:
        The set, whose new training images come last, and its partition in stages.
    """
    train = list(images.train)
    stages = [list(samples) for samples in partition.by_stage]
    for addition in additions:
        for client, samples in sorted(addition.images.items()):
            stages[client].append(tuple(range(len(train), len(train) + len(samples))))
            train += samples
    grown = Partition.in_stages(stages, partition.reserved, partition.schedule)
    return replace(images, train=tuple(train)), replace(grown, calibration=partition.calibration)


def grown_digest(digest: str, additions: Sequence[Addition], memo: Path | None = None) -> str:
    """Hashes additions together with the hash of the images before: product, name and content of each file.

    Args:
        digest: Hash of the images before.
        additions: The additions, in their order.
        memo: File of known hashes, the `memo_file` of `content_hashes`.

    Raises:
        UserError: If a file is gone.
    """
    added = [
        sample.path for addition in additions for samples in addition.images.values() for sample in samples
    ]
    content = content_hashes(added, memo)
    for addition in additions:
        hasher = hashlib.sha256(digest.encode())
        for client, samples in sorted(addition.images.items()):
            for sample in samples:
                entry = [client, sample.category, sample.name, content[sample.path].hex()]
                hasher.update(json.dumps(entry).encode())
        digest = hasher.hexdigest()[:32]
    return digest
