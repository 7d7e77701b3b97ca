"""What a message tells of a client's images: every exchange and every client query declares it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar


class Kind(Enum):
    """A kind of what a message tells, from what tells least to the images themselves."""

    COUNTS = "counts"
    SUMS = "sums"
    WEIGHTS = "weights"
    CLASS_STATISTICS = "class_statistics"
    PATCHES = "single_patches"
    SYNTHETIC_IMAGES = "synthetic_images"
    MEAN_IMAGES = "mean_images"
    IMAGES = "images"

    @property
    def words(self) -> str:
        """Its name in a sentence."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class Disclosure:
    """One thing that a message tells.

    Attributes:
        kind: Its kind.
        what: What it is, in words that a person reads who does not know the method.
        images: Fewest images behind each value, of sums, weights (`Task.images_behind`), class statistics and mean
            images; None for all images of the client.
        noised: Whether the client adds noise of differential privacy before anybody else sees it.
        by_product: Whether each value is of the images of one product.
    """

    kind: Kind
    what: str
    images: int | None = None
    noised: bool = False
    by_product: bool = False


Disclosures = tuple[Disclosure, ...]


@dataclass(frozen=True)
class DisclosedBy:
    """What an exchange discloses, where the client's settings decide.

    Attributes:
        of: Returns it, of the live client.
    """

    of: Callable[[Any], Disclosures]


TRAINED_WEIGHTS = Disclosure(Kind.WEIGHTS, "weights of the model, trained on the images")
"""What most methods send."""


def counted(what: str) -> Disclosure:
    """Declares counts, or a histogram."""
    return Disclosure(Kind.COUNTS, what)


def summed(what: str, images: int | None = None, by_product: bool = False) -> Disclosure:
    """Declares sums or means over images.

    Args:
        what: Of what.
        images: See `Disclosure`.
        by_product: See `Disclosure`.
    """
    return Disclosure(Kind.SUMS, what, images, by_product=by_product)


def by_class(what: str, images: int = 1) -> Disclosure:
    """Declares statistics of each class or group of images, which may hold as few as ``images``."""
    return Disclosure(Kind.CLASS_STATISTICS, what, images)


class Discloses:
    """A base of classes that send a message: one with a sending method of its own declares what that tells of images.

    Attributes:
        sends: Name of the method.

    Raises:
        TypeError: If a subclass has a method of its own and no ``discloses``, or one that is no tuple of
            `Disclosure`; when it is defined.
    """

    sends: ClassVar[str] = "send"

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.sends in vars(cls) and "discloses" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides {cls.sends}: say discloses = (...) beside it, what its message tells of a"
                " client's images (lit_fedad.contracts.disclosure)"
            )
        said = vars(cls).get("discloses", ())
        parts = said if isinstance(said, tuple) else (said,)
        if isinstance(said, Disclosure) or any(isinstance(one, str | Kind) for one in parts):
            raise TypeError(f"{cls.__name__}: discloses={said!r} must be a tuple of such as summed('...')")
