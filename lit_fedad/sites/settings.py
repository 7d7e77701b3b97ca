"""What a site's operator says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_fedad.sites.key_registry import KeyRegistry
from lit_fedad.sites.policy import Policy


@dataclass(frozen=True)
class SiteSettings:
    """What a site's operator says of it.

    Attributes:
        name: Name of the site.
        folder: Folder of its states.
        data: Words that describe its images: ``data=folders``, ``data.root=...``.
        own: Words of ``cache`` and ``fabric``, ``calibration.group`` and ``image.page``.
        apart: Whether its products are its own, even where those of another site have the same name.
        key_registry: The keys for secure sums; a site that has some answers in runs of secure sums alone.
        epsilon: Largest budget of differential privacy of all runs together, whose sites draw the noise; None for any,
            and for runs without noise.
        stages: Its products by the stages in which their images come; of none where all are there from the start.
        policy: What may leave it.
        coordinator: Who asks, for its log.
    """

    name: str
    folder: Path
    data: Sequence[str]
    own: Sequence[str] = ()
    apart: bool = False
    key_registry: KeyRegistry | None = None
    epsilon: float | None = None
    stages: Sequence[Sequence[str]] = ()
    policy: Policy = field(default_factory=Policy)
    coordinator: str = ""
