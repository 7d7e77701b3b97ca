"""Options of the attack by inversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lit_fedad.core.errors import UserError

Target = Literal["images", "memory", "weights"]

SEARCH: dict[Target, tuple[str, ...]] = {
    "images": (),
    "memory": ("images", "steps", "restarts", "seed", "knowledge", "by", "public"),
    "weights": ("images", "steps", "restarts", "seed", "update"),
}
"""Options that decide the search, by what is attacked."""


@dataclass(frozen=True)
class InversionOptions:
    """Options of ``lit-fedad privacy attack=inversion``.

    Attributes:
        client: Attacked client; None for the first.
        control: Client that it is compared with; None for the next one.
        images: How many images are sought and shown.
        steps: Steps of the search.
        restarts: How often the search begins anew; the one of the lowest loss counts.
        seed: Seed of what the search starts from.
        knowledge: With which head features are generated when a memory bank is attacked: ``shared``, the one that all
            clients began with, or ``own``, the client's own trained one, which never leaves it: the worst case.
        by: How a memory bank that keeps positions is inverted: ``search`` for images whose features it has, or
            ``decoder``, a network trained in as many steps to make images of shared features.
        public: Folder or ``.npz`` file of images that the decoder is trained on; None for drawn scenes.
        update: What is inverted when weights are attacked: ``round``, a whole round as the run would play it, with
            labels unknown, or ``step``, the plain gradient on ``images`` of the client's images, not augmented, with
            labels known: the classical setting.

    Raises:
        UserError: If ``images``, ``steps`` or ``restarts`` is less than 1, or options exclude each other.
    """

    client: int | None = None
    control: int | None = None
    images: int = 4
    steps: int = 500
    restarts: int = 1
    seed: int = 0
    knowledge: Literal["shared", "own"] = "shared"
    by: Literal["search", "decoder"] = "search"
    public: str | None = None
    update: Literal["round", "step"] = "round"

    def __post_init__(self) -> None:
        if min(self.images, self.steps, self.restarts) < 1:
            raise UserError(
                f"images={self.images} steps={self.steps} restarts={self.restarts} must be at least 1"
            )
        if self.by == "decoder" and self.knowledge == "own":
            raise UserError(
                "by=decoder learns to invert the features that all share: leave out knowledge=own"
            )
        if self.public is not None and self.by != "decoder":
            raise UserError(f"public={self.public}: a search learns from no images; give by=decoder")
